"""`xtoken run` without `--control`: what it loads, and how it answers to a wrong run file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.supervisor.scripted_run import resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.cli.app import app
from xtoken_services.common.run.run_text import resolved_text
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.run_record import RunResult

WEB_AND_DATABASE = {"xtoken_services.control", "fastapi", "uvicorn", "starlette", "sqlalchemy", "alembic", "httpx"}
HEAVY = {"torch", "transformers", "tensordict", "numpy", "pyarrow", "tokenizers", "safetensors"}

RUN_AND_LIST_MODULES = """
import json, sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from xtoken_services.cli.app import app
if sys.argv[2] == "scripted":
    from tests.unit.supervisor.scripted_run import use_scripted_workers
    use_scripted_workers(Path(sys.argv[3]), 3)
try:
    status = app(["run", sys.argv[1], "--json"], standalone_mode=False)
except Exception as error:
    status = str(error)
print(json.dumps({"status": status, "modules": sorted(sys.modules)}))
"""


def run_and_list_modules(file: Path, state: Path, *, scripted: bool) -> tuple[object, set[str], list[dict]]:
    """Return the exit status or error of `xtoken run --json`, the modules that it has loaded, and its statuses."""
    command = [sys.executable, "-c", RUN_AND_LIST_MODULES, str(file), "scripted" if scripted else "", str(state)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    *statuses, last = [json.loads(line) for line in done.stdout.splitlines()]
    return last["status"], set(last["modules"]), statuses


def below(modules: set[str], packages: set[str]) -> set[str]:
    return {name for name in modules if any(name == p or name.startswith(f"{p}.") for p in packages)}


def run_file(directory: Path) -> Path:
    spec = resolved_run(directory / "out", 3).spec
    file = directory / "run.toml"
    file.write_text(
        f'output = "{spec.output}"\n[student]\nmodel = "/no/model"\ncontext_length = 8\n'
        '[teacher]\nmodel = "/no/model"\ncontext_length = 8\nprojection = "/no/projection"\n'
        '[data]\npath = "/no/data"\n[train]\nsamples_per_step = 4\nmicro_batch_tokens = 64\n'
        "[queue]\nmemory_limit = 1048576\n"
    )
    return file


def test_run_loads_no_web_server_and_no_database(tmp_path: Path) -> None:
    status, modules, statuses = run_and_list_modules(run_file(tmp_path), tmp_path, scripted=True)
    assert status == 0
    assert statuses[-1]["state"] == "completed"
    assert statuses[-1]["step"] == statuses[-1]["steps"] == 3
    assert not below(modules, WEB_AND_DATABASE)
    assert not below(modules, {"torch", "transformers", "tensordict"})


def test_missing_model_loads_nothing_heavy(tmp_path: Path) -> None:
    status, modules, statuses = run_and_list_modules(run_file(tmp_path), tmp_path, scripted=False)
    assert str(status).startswith("cannot read the student's model: /no/model/config.json: ")
    assert statuses == []
    assert not below(modules, WEB_AND_DATABASE | HEAVY)


def test_missing_projection_loads_nothing_heavy(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    file = run_file(tmp_path)
    file.write_text(file.read_text().replace("/no/model", str(model)))
    status, modules, _ = run_and_list_modules(file, tmp_path, scripted=False)
    assert str(status).startswith("there is no projection file /no/projection: ")
    assert not below(modules, WEB_AND_DATABASE | HEAVY)


def test_missing_field_loads_no_supervisor(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    file.write_text(file.read_text().replace('[data]\npath = "/no/data"\n', ""))
    status, modules, _ = run_and_list_modules(file, tmp_path, scripted=False)
    assert "data: field required" in str(status)
    assert not below(modules, WEB_AND_DATABASE | HEAVY | {"xtoken_services.supervisor"})


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss": {"kl_loss_weight_end": "none"}}, {"loss": {"mode": "p_kl", "vocab_topk": "none"}, "seed": 3}],
    ids=["defaults", "constant-weight", "whole-vocabulary"],
)
def test_the_printed_settings_are_a_run_file_of_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    document = tomllib.loads(run_file(tmp_path).read_text(encoding="utf-8"))
    spec = RunSpec.model_validate(document | settings)
    again = RunSpec.model_validate(tomllib.loads(resolved_text(spec, ["a note"])))
    assert again == spec


def test_a_baseline_that_there_is_not_is_refused_before_the_run(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    file.write_text(file.read_text() + "[rollout]\nmax_new_tokens = 4\n")
    for words in (["--baseline"], ["--baseline", "--dry-run"]):
        result = CliRunner().invoke(app, ["run", str(file), *words])
        assert isinstance(result.exception, ConfigError) and "rollout.fraction = 1" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_baseline_on_a_control_plane_is_compared_by_its_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs' files may be on another machine."""
    bits = {"run": 1.25, "baseline": 1.5}

    def run_at(url: str, spec: RunSpec, **_: Any) -> tuple[RunResult, RunStatus]:
        evaluation = {"step": 3, "bits_per_byte": bits["run" if spec.teacher else "baseline"]}
        status = RunStatus.starting(spec, spec.name).model_copy(update={"evaluation": evaluation})
        return RunResult(RunState.COMPLETED), status

    monkeypatch.setattr("xtoken_services.control.client.run_at", run_at)
    words = ["run", str(run_file(tmp_path)), "--baseline", "--control", "http://127.0.0.1:1"]
    printed = CliRunner().invoke(app, words).stdout
    assert "held-out text: 1.2500 bits per byte distilled, 1.5000 by cross-entropy only" in printed
    document = CliRunner().invoke(app, [*words, "--json"]).stdout
    assert json.loads(document)["comparison"]["baseline"] == 1.5
