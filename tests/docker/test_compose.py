"""`docker compose up` with the CPU profile: a run started over HTTP, finished, its model taken out, nothing left."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.tiny_run import make_assets, tiny_spec, write_jsonl

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "docker-compose.yml", ROOT / "tests" / "docker" / "build.yml")
STARTED_S, FINISHED_S = 120, 300


def composer() -> list[str]:
    """Compose as a plugin of docker, or as the older program."""
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor docker-compose is installed")


def docker(*arguments: str) -> str:
    """The output of a docker command."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Project:
    """One Compose project of this test's own."""

    name: str
    port: int
    command: list[str]
    environment: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        files = [part for file in FILES for part in ("-f", str(file))]
        done = subprocess.run(
            [*self.command, "-p", self.name, *files, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done

    def leftovers(self) -> dict[str, str]:
        """Containers, volumes and networks that carry the project's name."""
        own = ["--filter", f"label=com.docker.compose.project={self.name}"]
        return {
            "containers": docker("ps", "-aq", *own),
            "volumes": docker("volume", "ls", "-q", *own),
            "networks": docker("network", "ls", "-q", *own),
        }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a projection and text, readable by the container's user."""
    directory = tmp_path_factory.mktemp("data")
    make_assets(directory)
    for place in (directory, *directory.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    for parent in directory.parents:
        if parent.owner() == directory.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    return directory


@pytest.fixture(scope="module")
def project(data: Path) -> Iterator[Project]:
    if not shutil.which("docker"):
        pytest.skip("docker is not installed")
    answer = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.skip(f"no container engine answers: {answer.stderr.strip().splitlines()[-1]}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    environment = {**os.environ, "COMPOSE_PROFILES": "cpu", "XTOKEN_PORT": str(port), "XTOKEN_DATA": str(data)}
    built = Project(f"xtoken-test-{os.getpid()}", port, composer(), environment)
    try:
        built("build")
        built("up", "-d")
        yield built
    finally:
        built("down", "-v", "--remove-orphans")


def wait_for(what: str, seconds: float, look: Any) -> Any:
    """Look until there is something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError(f"{what}: not within {seconds:.0f} s")


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def container(project: Project) -> str:
    return docker("ps", "-q", "--filter", f"label=com.docker.compose.project={project.name}").strip()


def run_over_data(data: Path) -> dict[str, Any]:
    """The tiny run as the container sees it: everything it reads is under /data, its output under /runs."""
    from tests.support.tiny_run import TinyAssets, documents

    write_jsonl(data / "train.jsonl", documents(32, seed=2))
    (data / "train.jsonl").chmod(0o644)
    inside = Path("/data")
    assets = TinyAssets(
        inside / "student",
        inside / "teacher",
        inside / "other-teacher",
        inside / "to-teacher.safetensors",
        inside / "to-other.safetensors",
    )
    spec = tiny_spec(
        assets, data.parent / "unused", data={"path": inside / "train.jsonl"}, output=Path("/runs/compose")
    )
    return dict(spec.model_dump(mode="json"))


def test_the_image_runs_as_an_ordinary_user_under_an_init(project: Project) -> None:
    wait_for("the control plane", STARTED_S, lambda: ready(project.url))
    found = container(project)
    assert docker("exec", found, "id", "-u").strip() == "10001"
    assert "init" in docker("exec", found, "cat", "/proc/1/comm")


def test_a_run_goes_from_a_request_to_a_model_and_the_project_leaves_nothing(project: Project, data: Path) -> None:
    wait_for("the control plane", STARTED_S, lambda: ready(project.url))
    token = docker("exec", container(project), "cat", "/cache/.config/xtoken/control.token").strip()
    http = httpx.Client(base_url=project.url, timeout=60, headers={"Authorization": f"Bearer {token}"})
    answer = http.post("/v1/runs", json=run_over_data(data))
    assert answer.is_success, answer.text
    run_id = answer.json()["id"]

    def ended() -> dict[str, Any] | None:
        state = dict(http.get(f"/v1/runs/{run_id}").json())
        return state if state["state"] in ("completed", "failed", "stopped") else None

    state = wait_for("the run", FINISHED_S, ended)
    assert state["state"] == "completed", state
    found = container(project)
    listed = docker("exec", found, "sh", "-c", "ls /runs/*/model /runs/*/*/model 2>/dev/null || true")
    assert "model.safetensors" in listed
    health = docker("inspect", "--format", "{{.State.Health.Status}}", found).strip()
    assert health in ("starting", "healthy")
    project("down", "-v", "--remove-orphans")
    assert not any(project.leftovers().values()), project.leftovers()
