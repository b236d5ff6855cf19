"""The commands: what they refuse, what they print, what they load, and a run by them."""

import errno
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import xtoken_services.cli.app as cli
from tests.support.cases import cases
from tests.support.evaluations import measured
from tests.unit.supervisor.scripted_run import resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError, StaleSessionError, XtokenError
from xtoken_core.wire import QueueError
from xtoken_services.cli.app import app
from xtoken_services.common.run.run_text import resolved_text
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor.run_record import RunResult

HEAVY = ("torch", "transformers", "fastapi", "pydantic", "numpy", "zmq", "rich")


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit status of `xtoken` in this process."""
    monkeypatch.setattr(sys, "argv", ["xtoken", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", broken)
    return status_of(monkeypatch, "--help")


@cases(
    "error, status, line",
    (XtokenError("it is so"), 1, "error: it is so"),
    (InputError("no such file"), 2, "error: no such file"),
    (StaleSessionError("ended"), 75, "error: ended"),
    (QueueError("run_failed", "too many dead letters"), 1, "error: too many dead letters"),
    (OSError(errno.ENOSPC, "No space left on device", "/runs/x"), 1,
     "error: no space is left on the device while writing /runs/x: free some and start again"),
    (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 1, "error: /root/x: Permission denied"),
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)  # fmt: skip
def test_expected_failure_is_one_line(
    error: Exception, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    assert fail_with(error, monkeypatch) == status
    assert capsys.readouterr().err.splitlines() == [line]


def test_memory_that_cannot_be_had_is_one_line_and_no_reason_to_restart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(1 << 50, dtype=torch.uint8)
    of_gpu = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. Including non-PyTorch memory, …"
    for error, begin in (
        (host.value, "error: DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 bytes"),
        (torch.OutOfMemoryError(of_gpu), "error: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (MemoryError(), "error: no memory is left on this machine."),
    ):
        assert fail_with(error, monkeypatch) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(begin) and "Lower train.micro_batch_tokens or workers.slots" in line


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "")
    CliRunner().invoke(cli.app, ["--debug", "init", "--help"])
    assert fail_with(InputError("no such file"), monkeypatch) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("Traceback") and said[-1] == "error: no such file"


def test_unexpected_failure_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    assert fail_with(KeyError("x"), monkeypatch) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "KeyError: 'x'"


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fail_with(KeyboardInterrupt(), monkeypatch) == 130


def xtoken(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "xtoken_services.cli", *arguments], capture_output=True, text=True, check=False
    )


def test_help_loads_nothing_heavy() -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); import xtoken_services.cli.app as c; "
    program = block + "sys.argv = ['xtoken', '--help']; c.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    commands = "demo run runs queue collator teacher trainer control align projection chain"
    for command in commands.split():
        assert f"\n  {command} " in done.stdout


def test_help_lists_the_processes_of_a_run_apart() -> None:
    listed = xtoken("--help").stdout.partition("\nCommands:\n")[2]
    first, title, second = listed.partition("Processes of a run, which `xtoken run` starts by itself:\n")
    names = [{line.split()[0] for line in part.splitlines() if line.strip()} for part in (first, second)]
    assert title and names == [{*cli.COMMANDS, *cli.GROUPS} - {*cli.PROCESSES}, {*cli.PROCESSES}]


def commands_below(group: Any, *words: str) -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        if getattr(command, "commands", None):
            yield from commands_below(command, *words, name)
        else:
            yield " ".join((*words, name)), command


def test_json_option() -> None:
    """But for those that serve or work until they are stopped, print nothing else, or show something."""
    found = dict(commands_below(typer.main.get_command(cli.app)))
    without = {name for name, command in found.items() if not any("--json" in p.opts for p in command.params)}
    serving, nothing_else, showing = (
        {"collator", "rollout", "teacher", "trainer", "control", "store write"},
        {"queue stats", "queue peek"},
        {"demo", "queue top"},
    )  # fmt: skip
    assert without == serving | nothing_else | showing


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "xtoken", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == xtoken("--version").stdout


def test_usage_error() -> None:
    done = xtoken("teacher", "--rank", "-1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "--rank" in done.stderr


def test_bad_run_file_loads_nothing_heavy(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('output = "out"\nstuden = 3\n')
    block = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'fastapi', 'zmq'))); "
    program = block + f"import xtoken_services.cli.app as c; sys.argv = ['xtoken', 'run', {str(file)!r}]; c.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert (
        len(lines) == 1
        and "studen: there is no such field; did you mean student?" in lines[0]
        and "student: field required" in lines[0]
    )


def test_no_control_plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(monkeypatch, "run", str(run_file(tmp_path)), "--control", "http://127.0.0.1:9") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no control plane at http://127.0.0.1:9: ")


@pytest.mark.parametrize("how", ["port", "root", "host"])
def test_control_plane_that_cannot_start_leaves_no_files(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        root = ["--port", "0", "--root", str(tmp_path / "none")]
        wrong = {"port": ["--port", port], "root": root, "host": ["--host", "0.0.0.0"]}[how]
        status = status_of(monkeypatch, "control", "--runs-dir", str(tmp_path / "runs"), *wrong)
    said = {
        "port": (1, f"error: cannot serve at 127.0.0.1:{port}: Address already in use: choose another --port"),
        "root": (2, f"error: --root {tmp_path / 'none'} is not a directory"),
        "host": (2, "error: host 0.0.0.0 is reachable from other machines: a token is required (--token-file)"),
    }[how]
    assert (status, capsys.readouterr().err.splitlines()[-1]) == said
    assert not (tmp_path / "runs").exists()


@cases(
    "server, number",
    ("queue", signal.SIGINT),
    ("control", signal.SIGTERM),
    pytest.param("queue", signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param("control", signal.SIGINT, marks=pytest.mark.slow),
)
def test_servers_exit_with_0_on_a_signal(server: str, number: signal.Signals, tmp_path: Path) -> None:
    words = {
        "queue": ["queue", "--bind", f"ipc://{tmp_path / 'private' / 'queue'}"],
        "control": ["control", "--port", "0", "--runs-dir", str(tmp_path / "runs")],
    }[server]
    (tmp_path / "private").mkdir(mode=0o700)
    started = subprocess.Popen([sys.executable, "-m", "xtoken_services.cli", *words], stderr=subprocess.PIPE, text=True)
    with started:
        said = next(line for line in started.stderr if "serving at" in line)
        started.send_signal(number)
        assert (started.wait(30), "serving" in said) == (0, True)


@cases(
    "queue, token, said",
    ("tcp://127.0.0.1:5000", "open", "error: the token file "),
    ("tcp://10.0.0.1:5000", "none", "error: tcp://10.0.0.1:5000: a token would cross the network in clear"),
    ("here", "none", "error: 'here' is not a queue address"),
)
def test_wrong_queue_address_loads_nothing_heavy(queue: str, token: str, said: str, tmp_path: Path) -> None:
    block = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers'))); "
        "import xtoken_services.cli.app as c; "
    )
    (tmp_path / "open").write_text("a token that all may read")
    arguments = ["xtoken", "trainer", "--queue", queue, "--token-file", str(tmp_path / token)]
    program = block + f"sys.argv = {arguments!r}; c.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(said), done.stderr


def test_a_user_id_without_a_name_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 17)
    with pytest.raises((KeyError, OSError)):
        getpass.getuser()
    cli.name_user()
    assert getpass.getuser() == f"uid-{2**31 - 17}"


WEB_AND_DATABASE = {"xtoken_services.control", "fastapi", "uvicorn", "starlette", "sqlalchemy", "alembic", "httpx"}
HEAVY_IN_A_RUN = {"torch", "transformers", "tensordict", "numpy", "pyarrow", "tokenizers", "safetensors"}

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
    assert not below(modules, WEB_AND_DATABASE | HEAVY_IN_A_RUN)


def test_missing_projection_loads_nothing_heavy(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    file = run_file(tmp_path)
    file.write_text(file.read_text().replace("/no/model", str(model)))
    status, modules, _ = run_and_list_modules(file, tmp_path, scripted=False)
    assert str(status).startswith("there is no projection file /no/projection: ")
    assert not below(modules, WEB_AND_DATABASE | HEAVY_IN_A_RUN)


def test_missing_field_loads_no_supervisor(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    file.write_text(file.read_text().replace('[data]\npath = "/no/data"\n', ""))
    status, modules, _ = run_and_list_modules(file, tmp_path, scripted=False)
    assert "data: field required" in str(status)
    assert not below(modules, WEB_AND_DATABASE | HEAVY_IN_A_RUN | {"xtoken_services.supervisor.run"})


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss": {"kl_loss_weight_end": "none"}}, {"loss": {"mode": "p_kl", "vocab_topk": "none"}, "seed": 3}],
    ids=["defaults", "constant-weight", "whole-vocabulary"],
)
def test_the_printed_settings_are_a_run_file_of_the_same_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    document = tomllib.loads(run_file(tmp_path).read_text(encoding="utf-8"))
    spec = RunSpec.model_validate(document | settings)
    text = resolved_text(spec, ["a note"])
    assert RunSpec.model_validate(tomllib.loads(text)) == spec
    assert "= []" not in text and "[hub]" not in text, "what is empty by default"


def test_a_baseline_that_there_is_not_is_refused_before_the_run(tmp_path: Path) -> None:
    file = run_file(tmp_path)
    for table, reason in (
        ("", "this run has none: name eval.path"),
        ("[rollout]\nmax_new_tokens = 4\n", "rollout.fraction = 1"),
    ):
        file.write_text(file.read_text() + table)
        for words in (["--baseline"], ["--baseline", "--dry-run"]):
            result = CliRunner().invoke(app, ["run", str(file), *words])
            assert isinstance(result.exception, ConfigError) and re.search(reason, str(result.exception))
    assert not (tmp_path / "out").exists()


def test_a_baseline_on_a_control_plane_is_compared_by_its_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs' files may be on another machine."""
    bits = {"run": 1.25, "baseline": 1.5}

    def run_at(url: str, spec: RunSpec, **_: Any) -> tuple[RunResult, RunStatus]:
        evaluation = measured(bits["run" if spec.teacher else "baseline"], 3)
        status = RunStatus.starting(spec, spec.name).model_copy(update={"evaluation": evaluation})
        return RunResult(RunState.COMPLETED), status

    monkeypatch.setattr("xtoken_services.control.client.run_at", run_at)
    words = [
        "run",
        str(run_file(tmp_path)),
        "--set=eval.path=/no/text",
        "--baseline",
        "--control",
        "http://127.0.0.1:1",
    ]
    printed = CliRunner().invoke(app, words).stdout
    assert "held-out text: 1.2500 bits per byte distilled, 1.5000 by cross-entropy only: better by 0.2500 ±" in printed
    document = CliRunner().invoke(app, [*words, "--json"]).stdout
    assert json.loads(document)["comparison"]["baseline"] == 1.5
