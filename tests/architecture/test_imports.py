"""What importing a part of the house brings with it, and which processes live without torch."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx

from tests.architecture.conftest import ROOT, run_code, run_without, started_without
from tests.support.control_token import bearer
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_services.common.text.training_text import open_index

HEAVY = ["torch", "numpy", "zmq", "transformers", "tensordict", "triton", "pyarrow", "tokenizers", "fastapi"]
MODELS = ["torch", "transformers", "tensordict", "triton"]

IMPORT_ALL = """
import importlib, json, pkgutil, sys
for name in sys.argv[1].split(","):
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded_by(*modules: str) -> set[str]:
    """The top-level packages in memory after importing these modules and all their submodules."""
    return set(json.loads(run_code(IMPORT_ALL, ",".join(modules))))


def test_importing_the_library_imports_nothing_but_itself() -> None:
    """Not one package from site-packages, be it heavy or light."""
    loaded = set(json.loads(run_code("import json, sys, xtoken_core; print(json.dumps(sorted(sys.modules)))")))
    bare = set(json.loads(run_code("import json, sys; print(json.dumps(sorted(sys.modules)))")))
    assert loaded - bare == {"xtoken_core"}


def test_the_rules_of_the_queue_stand_on_no_sockets_and_no_tensors() -> None:
    parts = (f"xtoken_core.{part}" for part in ("queue", "wire", "config", "plan", "schema", "errors"))
    assert not loaded_by(*parts) & {"torch", "numpy", "zmq", "transformers", "tensordict"}


def test_a_process_without_models_has_no_torch_in_any_of_its_modules() -> None:
    packages = (f"xtoken_services.{package}" for package in ("queue", "supervisor", "control"))
    assert not loaded_by(*packages) & set(MODELS)


def test_the_supervisor_needs_no_web_server_and_no_database() -> None:
    loaded = {name.partition(".")[0] for name in loaded_by("xtoken_services.supervisor")}
    assert not loaded & {"fastapi", "uvicorn", "starlette", "sqlalchemy", "alembic", "httpx"}


def test_fingerprints_signals_and_text_are_reached_without_torch() -> None:
    """The queue and the control plane need these, so the packages load what stands on torch only when it is used."""
    packages = "xtoken_core.dataset, xtoken_core.projection, xtoken_core.transports"
    loaded = run_code(f"import json, sys, {packages}; print(json.dumps(list(sys.modules)))")
    assert not set(json.loads(loaded)) & set(MODELS)


HELP_OF_ALL = """
import sys
from tests.architecture.without import Blocked
sys.meta_path.insert(0, Blocked(set(sys.argv[1].split(","))))
import typer
from xtoken_services.cli.app import app

def show(command, path):
    print("::", *path)
    print(command.get_help(typer.Context(command, info_name=" ".join(path))))
    for name, child in getattr(command, "commands", {}).items():
        show(child, [*path, name])

show(typer.main.get_command(app), ["xtoken"])
"""


def test_the_help_of_every_command_needs_nothing_heavy() -> None:
    printed = run_code(HELP_OF_ALL, ",".join(HEAVY))
    for command in ("queue", "collator", "teacher", "trainer", "control", "run", "demo"):
        assert f":: xtoken {command}\n" in printed


def test_a_mistake_in_a_run_file_is_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('output = "out"\n[student]\nmodel = "m"\ncontext_length = 1\n', encoding="utf-8")
    done = run_without(HEAVY, "xtoken_services.cli", "run", str(file))
    assert done.returncode == 2
    assert "student.context_length: input should be greater than or equal to 2" in done.stderr
    assert "Traceback" not in done.stderr


def resolved_run(directory: Path) -> ResolvedRun:
    """A run over three lines of text, as if its models had been looked at."""
    text = directory / "train.txt"
    text.write_text("one\ntwo\nthree\n", encoding="utf-8")
    spec = RunSpec.model_validate(
        {
            "output": directory / "out",
            "student": {"model": directory / "student", "context_length": 16},
            "teacher": {"model": directory / "teacher", "context_length": 16},
            "data": {"path": text},
        }
    )
    index = open_index(spec, spec.data.paths, spec.data.field)
    model = ResolvedModel(vocab_size=8, head_width=8, tokenizer_fingerprint="")
    return ResolvedRun(
        spec=spec,
        student=model,
        teachers=(model,),
        projection_fingerprints=("",),
        data_fingerprint=index.fingerprint,
        records=len(index),
        positions=len(index),
    )


def test_the_queue_serves_a_run_without_torch(tmp_path: Path) -> None:
    run = resolved_run(tmp_path)
    file = tmp_path / "resolved.json"
    file.write_text(run.model_dump_json(), encoding="utf-8")
    private = tmp_path / "q"
    private.mkdir(mode=0o700)
    address = f"ipc://{private}/s"
    with started_without(MODELS, "xtoken_services.cli", "queue", "--bind", address, "--run", str(file)):
        client = TaskClient(ZmqTransport(Address.parse(address), patience_s=60))
        try:
            assert client.hello("collator-0", "collator", incarnation=1, silence_s=30, needs_run=True, wait_s=5)
            assert ResolvedRun.model_validate_json(client.run_document) == run
            client.bye()
        finally:
            client.close()


def test_the_control_plane_serves_without_torch(tmp_path: Path) -> None:
    arguments = ("control", "--port", "0", "--runs-dir", str(tmp_path / "runs"))
    with started_without(MODELS, "xtoken_services.cli", *arguments) as process:
        lines = iter(process.stdout.readline, "")
        said = next((line for line in lines if "serving at" in line), None)
        assert said is not None
        url = re.search(r"http://[0-9.]+:\d+", said)
        assert httpx.get(f"{url[0]}/readyz", timeout=30).json()["ready"] is True
        assert httpx.get(f"{url[0]}/v1/runs", timeout=30, headers=bearer()).json() == {"runs": [], "next": None}


def test_the_name_proto_is_left_to_other_packages(tmp_path: Path) -> None:
    """It belongs to proto-plus, which other packages of an environment install: the tree's folder never wins."""
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "__init__.py").touch()
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import xtoken_services, proto; print(proto.__file__)"
    isolated = [sys.executable, "-I", "-c", code]
    done = subprocess.run(isolated, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "proto" / "__init__.py")
    assert not list((ROOT / "proto").rglob("__init__.py"))


def test_the_distribution_installs_the_library_and_the_services_only() -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]
    packages = [Path(folder) for folder in targets["wheel"]["packages"]]
    assert {folder.name for folder in packages} == {"xtoken", "xtoken_core", "xtoken_services"}
    assert all((ROOT / folder / "py.typed").is_file() for folder in packages)
