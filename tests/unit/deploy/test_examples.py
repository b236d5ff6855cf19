"""The examples are runs that the program takes; the compose file, its settings and the image fit each other."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from xtoken_core.config import RunSpec, load_run_spec
from xtoken_services.cli.app import app
from xtoken_services.common.run.resolve import largest_row

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.toml"))
COMPOSE = ROOT / "docker-compose.yml"
REMOTE = ROOT / "deploy" / "compose.remote.yml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"

KNOWN_TO_BOTH_COMPOSES = {
    "build", "cap_drop", "command", "deploy", "environment", "healthcheck", "image", "init", "network_mode", "profiles",
    "read_only", "restart", "secrets", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "user", "volumes",
}  # fmt: skip
"""Keys of a service that both Compose v2 and docker-compose 1.29 take, among those used here."""


def paths_of(spec: RunSpec) -> list[Path]:
    """Every path that a run names."""
    models = [spec.student, *spec.teacher]
    projections = [teacher.projection for teacher in spec.teacher if teacher.projection]
    held_out = spec.eval.paths if spec.eval else ()
    return [spec.output, *(m.model for m in models), *projections, *spec.data.paths, *held_out]


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"minimal-cpu", "two-teachers", "llama-3.2-1b-from-qwen3-4b"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_run(path: Path) -> None:
    spec = load_run_spec(path)
    assert all(found.is_relative_to(path.parent) for found in paths_of(spec)), "relative to the file it stands in"
    span = spec.queue.span_steps * spec.train.samples_per_step
    assert span * largest_row(spec) <= spec.queue.memory_limit, "the queue would refuse to open it"


def test_the_two_teachers_are_one_of_each_kind() -> None:
    spec = load_run_spec(ROOT / "deploy/examples/two-teachers.toml")
    assert spec.loss.mode == "chain" and all(teacher.projection is None for teacher in spec.teacher)
    assert [teacher.weight for teacher in spec.teacher] == [1.0, 0.5]


# docker-compose.yml, .env and the image


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """The variables of `.env`."""
    lines = (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled_in(file: Path, settings: dict[str, str]) -> dict[str, Any]:
    """What a Compose file says, with the variables filled in as Compose does."""
    text = file.read_text(encoding="utf-8")
    filled = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: settings.get(m[1]) or m[2], text)
    assert "$" not in filled, "a variable without a default"
    return dict(yaml.safe_load(filled))


@pytest.fixture(scope="module")
def services(settings: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The services."""
    return dict(filled_in(COMPOSE, settings)["services"])


def parameters(service: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a service's command, as the program reads it."""
    group = typer.main.get_command(app)
    command, *arguments = service["command"]
    context = typer.Context(group.commands[command])  # type: ignore[attr-defined]
    group.commands[command].parse_args(context, arguments)  # type: ignore[attr-defined]
    return context.params


def test_each_profile_of_ours_has_one_container(services: dict[str, dict[str, Any]], settings: dict[str, str]) -> None:
    profiles = {name: service["profiles"] for name, service in services.items()}
    assert profiles == {"xtoken": ["gpu"], "xtoken-cpu": ["cpu"], "prometheus": ["metrics"], "grafana": ["metrics"]}
    assert settings["COMPOSE_PROFILES"] == "gpu"


def test_what_is_mounted_from_the_tree_is_there(services: dict[str, dict[str, Any]]) -> None:
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert [path for path in mounted if path.startswith("./deploy") and not (ROOT / path).exists()] == []


def test_prometheus_and_grafana_are_reached_on_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    assert any(part.startswith("--web.listen-address=127.0.0.1:") for part in services["prometheus"]["command"])
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    for name in ("prometheus", "grafana"):
        assert services[name]["network_mode"] == "host"
        assert services[name]["cap_drop"] == ["ALL"]


# deploy/compose.remote.yml


@pytest.mark.parametrize("name", ["xtoken", "xtoken-cpu"])
def test_what_other_machines_reach_asks_for_a_token(
    services: dict[str, dict[str, Any]], settings: dict[str, str], name: str
) -> None:
    remote = filled_in(REMOTE, settings)
    service = remote["services"][name]
    given = parameters(service)
    assert given["host"] == "0.0.0.0"
    assert [f"/run/secrets/{secret}" for secret in service["secrets"]] == [str(given["token_file"])]
    assert remote["secrets"] == {"control-token": {"file": settings["XTOKEN_TOKEN_FILE"]}}
    kept = [word for word in services[name]["command"] if word not in ("--host", "127.0.0.1")]
    assert set(kept) <= set(service["command"])


def test_the_second_file_only_changes_services_of_the_first(
    services: dict[str, dict[str, Any]], settings: dict[str, str]
) -> None:
    remote = filled_in(REMOTE, settings)["services"]
    assert set(remote) <= set(services)
    assert {key for service in remote.values() for key in service} <= KNOWN_TO_BOTH_COMPOSES
    targets = {volume.split(":")[1] for volume in services["prometheus"]["volumes"]}
    for volume in remote["prometheus"]["volumes"]:
        source, target, *_ = volume.split(":")
        assert (ROOT / source).is_file()
        assert target in targets


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_the_older_compose_takes_both_files() -> None:
    named = [part for file in (COMPOSE, REMOTE) for part in ("-f", str(file))]
    done = subprocess.run(
        ["docker-compose", *named, "config", "--services"],
        cwd=ROOT,
        env={**os.environ, "COMPOSE_PROFILES": "gpu,cpu,metrics"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"xtoken", "xtoken-cpu", "prometheus", "grafana"}


# the image and its settings


def test_both_composes_know_every_key(services: dict[str, dict[str, Any]]) -> None:
    assert {key for service in services.values() for key in service} <= KNOWN_TO_BOTH_COMPOSES


def test_a_variable_has_the_same_default_in_both_files(settings: dict[str, str]) -> None:
    used: dict[str, str] = {}
    for file in (COMPOSE, REMOTE):
        for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", file.read_text(encoding="utf-8")):
            assert used.setdefault(name, default) == default
    assert used == {name: value for name, value in settings.items() if name != "COMPOSE_PROFILES"}


@pytest.mark.parametrize("name", ["xtoken", "xtoken-cpu"])
def test_a_container_is_watched_unprivileged_and_reaped(services: dict[str, dict[str, Any]], name: str) -> None:
    service = services[name]
    user, group = service["user"].split(":")
    assert int(user) > 0 < int(group)
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert any("/readyz" in part for part in service["healthcheck"]["test"])
    targets = {volume.split(":")[1]: volume.split(":")[2:] for volume in service["volumes"]}
    assert targets == {"/data": ["ro"], "/runs": [], "/cache": []}


@pytest.mark.parametrize("name", ["xtoken", "xtoken-cpu"])
def test_the_control_plane_is_reached_on_loopback_only(services: dict[str, dict[str, Any]], name: str) -> None:
    """It serves loopback: so the host's, and no port is published to anybody else."""
    service = services[name]
    assert service["network_mode"] == "host"
    assert "ports" not in service
    command = service["command"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    port = command[command.index("--port") + 1]
    assert any(f"127.0.0.1:{port}/readyz" in part for part in service["healthcheck"]["test"])


@pytest.mark.parametrize("name", ["xtoken", "xtoken-cpu"])
def test_the_command_is_one_of_the_programs(services: dict[str, dict[str, Any]], name: str) -> None:
    given = parameters(services[name])
    assert (given["host"], str(given["runs_dir"])) == ("127.0.0.1", "/runs")


def test_only_the_gpu_profile_asks_for_gpus(services: dict[str, dict[str, Any]]) -> None:
    devices = services["xtoken"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
    assert "deploy" not in services["xtoken-cpu"]


def stages() -> dict[str, list[str]]:
    """The instructions of every stage of the image, by the stage's name."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in filter(None, (line.strip() for line in text.splitlines())):
        stage = re.fullmatch(r"FROM (\S+) AS (\S+)", line)
        if stage:
            name = stage[2]
            found[name] = list(found.get(stage[1], []))
        elif not line.startswith("#"):
            found[name].append(line)
    return found


@pytest.mark.parametrize("name", ["xtoken", "xtoken-cpu"])
def test_an_image_is_built_from_its_stage_as_nobody_in_particular(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    build = services[name]["build"]
    assert ROOT / build["context"] / build["dockerfile"] == DOCKERFILE
    instructions = stages()[build["target"]]
    assert instructions[-1] == "USER 10001:10001"
    assert 'ENTRYPOINT ["xtoken"]' in instructions
    declared = {line.split()[1].partition("=")[0] for line in stages()[""] if line.startswith("ARG")}
    assert set(build["args"]) <= declared


def locked(image: str) -> dict[str, Requirement]:
    """The requirements of an image's lock file, by name; each has a version and hashes."""
    text = (ROOT / "deploy" / "lock" / f"{image}.txt").read_text("utf-8").replace("\\\n", " ")
    lines = [line.split("--hash=sha256:") for line in text.splitlines()]
    assert all(len(hashes) and all(re.fullmatch(r"[0-9a-f]{64} *", found) for found in hashes) for _, *hashes in lines)
    found = [Requirement(words) for words, *_ in lines]
    assert all(re.fullmatch(r"==[^*]+", str(each.specifier)) for each in found)
    return {canonicalize_name(each.name): each for each in found}


@pytest.mark.parametrize(("image", "extras"), [("cpu", ["all"]), ("gpu", ["all", "gpu", "wandb"])])
def test_a_lock_file_has_what_the_image_needs(image: str, extras: list[str]) -> None:
    found, project = locked(image), tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    optional = project["project"]["optional-dependencies"]
    wanted = [Requirement(text) for text in (*project["project"]["dependencies"], *project["build-system"]["requires"])]
    left = [Requirement(text) for extra in extras for text in optional[extra]]
    while left:
        one = left.pop()
        if one.name == "xtoken":
            left += [Requirement(text) for extra in one.extras for text in optional[extra]]
        else:
            wanted.append(one)
    assert {"torch", "ray", "triton", "hatchling"} <= {each.name for each in wanted}
    missing = [str(one) for one in wanted if not one.specifier.contains(version_of(found[canonicalize_name(one.name)]))]
    assert missing == []


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_a_lock_file_obeys_the_constraints(image: str) -> None:
    versions = {name: version_of(one) for name, one in locked(image).items()}
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {canonicalize_name(one.name): one for one in (Requirement(x) for x in lines if not x.startswith("#"))}
    if image == "gpu":  # the CUDA build of torch chooses its triton
        del pinned["torch"], pinned["triton"]
    shared = versions.keys() & pinned.keys()
    assert len(shared) > 80
    assert [name for name in shared if not pinned[name].specifier.contains(versions[name])] == []
    assert versions["torch"].endswith("+cpu") == (image == "cpu")


def version_of(locked: Requirement) -> str:
    return str(locked.specifier).removeprefix("==")


@pytest.mark.parametrize("image", ["cpu", "gpu"])
def test_an_image_has_only_packages_of_its_lock_file(image: str) -> None:
    """No resolver runs: each file is one of those hashed, and xtoken comes without what it asks for."""
    installs = [line for line in stages()[f"build-{image}"] if "pip install" in line]
    packages, own = installs
    assert "--no-deps --require-hashes" in packages and f"-r lock/{image}.txt" in packages
    assert own.endswith("--no-deps --no-build-isolation .")
    assert not any("index-url" in line for line in installs)


@pytest.mark.parametrize("name", ["xtoken", "xtoken-cpu", "prometheus", "grafana"])
def test_a_root_file_system_is_read_only(services: dict[str, dict[str, Any]], name: str) -> None:
    """Programs load from /tmp what they have compiled there."""
    service = services[name]
    assert service["read_only"] is True
    if name.startswith("xtoken"):
        (temporary,) = service["tmpfs"]
        assert temporary.startswith("/tmp:exec,")


@pytest.mark.parametrize("stage", ["build-cpu", "build-gpu"])
def test_what_the_image_copies_is_in_the_tree_and_not_ignored(stage: str) -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    copied = [line.split()[1:-1] for line in stages()[stage] if line.startswith("COPY")]
    sources = [source for sources in copied for source in sources]
    assert sorted(sources) == sorted(kept)
    assert all((ROOT / source).exists() for source in sources)
