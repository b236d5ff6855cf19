"""`xtoken runs`, against a control plane that is served: what it prints, as lines and as JSON, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import xtoken_services.cli.app as cli
from tests.unit.control.stored_runs import make_runs, put, spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.run.status import RunState
from xtoken_services.control.auth import Auth
from xtoken_services.control.client import ControlClient, RefusedError, run_at
from xtoken_services.control.runs import Runs
from xtoken_services.control.serve import HttpServer

TOKEN = "a-token-of-some-length"
Command = Callable[..., Result]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = make_runs(tmp_path)
    yield found
    found.close()


@pytest.fixture
def url(runs: Runs) -> Iterator[str]:
    server = HttpServer(runs, "127.0.0.1", 0, Auth(TOKEN))
    yield server.url
    server.close()


@pytest.fixture
def command(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    monkeypatch.setenv("XTOKEN_CONTROL", url)
    monkeypatch.setenv("XTOKEN_CONTROL_TOKEN_FILE", str(file))
    return lambda *words: CliRunner().invoke(cli.app, ["runs", *words], env={"COLUMNS": "200"})


def test_ls(command: Command, runs: Runs) -> None:
    put(runs, "first-1", error="it broke", exit_code=1)
    put(runs, "second-2", RunState.FAILED)
    said = command("ls").stdout.splitlines()
    assert said[0].split() == ["id", "state", "progress", "began", "error"]
    assert said[1].split()[:3] == ["second-2", "failed", "2/2"] and "it broke" in said[2]
    assert [run["id"] for run in json.loads(command("ls", "--json").stdout)] == ["second-2", "first-1"]
    assert [run["id"] for run in json.loads(command("ls", "--json", "--state", "failed").stdout)] == ["second-2"]
    assert len(json.loads(command("ls", "--json", "--limit", "1").stdout)) == 1


def test_show_by_the_beginning_of_the_id(command: Command, runs: Runs) -> None:
    put(runs, "first-1")
    put(runs, "first-2")
    assert json.loads(command("show", "first-1", "--json").stdout)["state"] == "completed"
    assert "trainer-0" in command("show", "first-1").stdout
    watched = command("show", "first-1", "--watch", "--json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in watched] == ["completed"]
    several = command("show", "first")
    assert "several runs begin with first" in str(several.exception)
    assert isinstance(command("show", "none").exception, RefusedError)


def test_show_without_a_finite_loss(command: Command, runs: Runs) -> None:
    with (put(runs, "first-1") / "steps.jsonl").open("a") as file:
        file.write('{"step":2,"loss":null,"ce_loss":1.5,"grad_norm":null,"nonfinite":true,"tokens_per_second":null}\n')
    assert "ce_loss 1.5000" in command("show", "first-1").stdout
    assert command("show", "first-1", "--watch").exit_code == 0
    assert json.loads(command("show", "first-1", "--json").stdout)["last"]["loss"] is None


def test_watch_exits_with_the_status_of_the_run(command: Command, runs: Runs) -> None:
    put(runs, "failed-1", RunState.FAILED, error="the model is gone", exit_code=2)
    put(runs, "stopped-1", RunState.STOPPED, error="the trainer was killed", exit_code=1)
    put(runs, "done-1")
    for words in ([], ["--json"]):
        failed = command("show", "failed-1", "--watch", *words)
        assert (failed.exit_code, failed.stderr) == (2, "error: the model is gone\n")
        assert command("show", "stopped-1", "--watch", *words).exit_code == 130
        assert command("show", "done-1", "--watch", *words).exit_code == 0
    assert command("show", "failed-1").exit_code == 0


def test_a_complete_run_is_not_started_again(url: str, runs: Runs, tmp_path: Path) -> None:
    output = put(runs, "done-1")
    settings = spec(tmp_path, output=str(output))
    result, last = run_at(url, RunSpec.model_validate(settings), token=TOKEN, show=False)
    assert last.output == output
    assert (result.state, result.error, result.exit_code) == (RunState.COMPLETED, "", 0)
    with pytest.raises(XtokenError, match="was started with other settings of seed"):
        run_at(url, RunSpec.model_validate(settings | {"seed": 7}), token=TOKEN, show=False)


def test_logs_and_get(command: Command, runs: Runs, tmp_path: Path) -> None:
    put(runs, "first-1")
    assert command("logs", "first-1", "--worker", "trainer-0", "--tail", "1").stdout.endswith("INFO three\n")
    lines = command("logs", "first-1", "-f", "--json").stdout.splitlines()
    assert len(lines) == 4 and json.loads(lines[0])["line"].startswith("trainer-0 | ")
    got = command("get", "first-1", "logs", "--to", str(tmp_path / "got"), "--json")
    assert len(json.loads(got.stdout)["files"]) == 2
    assert (tmp_path / "got" / "logs" / "queue.1.log").read_text().endswith("and more\n")
    one = command("get", "first-1", "steps.jsonl", "--to", str(tmp_path / "got"))
    assert one.stdout == f"{tmp_path / 'got' / 'steps.jsonl'}: 1 file\n"
    assert "has no file nothing" in str(command("get", "first-1", "nothing").exception)


def test_get_overwrites_nothing(command: Command, runs: Runs, tmp_path: Path) -> None:
    put(runs, "first-1")
    (tmp_path / "steps.jsonl").write_text("mine\n")
    (tmp_path / "logs").symlink_to("nowhere")
    for path in ("steps.jsonl", "logs"):
        error = command("get", "first-1", path, "--to", str(tmp_path)).exception
        said = f"{tmp_path / path} exists already: choose another directory with --to, or remove it"
        assert (str(error), getattr(error, "exit_code", None)) == (said, 2)
    assert (tmp_path / "steps.jsonl").read_text() == "mine\n"


def test_show_prints_an_error_in_one_line(command: Command, runs: Runs) -> None:
    error = "it broke " * 40 + "in the end"
    put(runs, "first-1", RunState.FAILED, error=error, exit_code=1)
    assert error in command("show", "first-1").stdout.splitlines()
    assert json.loads(command("show", "first-1", "--json").stdout)["checkpoint"] is None


def test_show_the_newest_checkpoint(command: Command, runs: Runs) -> None:
    output = put(runs, "first-1", RunState.STOPPED)
    for step in (8, 16):
        (output / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    assert json.loads(command("show", "first-1", "--json").stdout)["checkpoint"] == 16


def test_stop_resume_and_rm_of_a_completed_run(command: Command, runs: Runs) -> None:
    output = put(runs, "first-1")
    assert command("stop", "first-1", "--wait").stdout == "first-1: completed\n"
    assert "is complete" in str(command("resume", "first-1").exception)
    assert command("rm", "first-1", "--files").stdout == "first-1: removed\n"
    assert not output.exists() and json.loads(command("ls", "--json").stdout) == []


def test_refused_start(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    model = 'model = "/no/model"\ncontext_length = 8\n'
    file.write_text(f'output = "runs/x"\n[student]\n{model}[teacher]\n{model}[data]\npath = "d.txt"\n')
    for words in (["start", str(file)], ["start", str(file), "--dry-run", "--json"]):
        refused = command(*words)
        assert "student.model: /no/model lies under none of" in str(refused.exception)
        assert getattr(refused.exception, "exit_code", None) == 2


def test_wrong_token(url: str, tmp_path: Path) -> None:
    client = ControlClient(url, "another-token-of-some-length")
    with pytest.raises(XtokenError, match="bearer token required"):
        client.page()
    client.close()
    with pytest.raises(XtokenError, match=r"no control plane at http://\["):
        ControlClient("http://[").page()


def test_shell_completion_of_runs(command: Command, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    put(runs, "first-1")
    put(runs, "second-2")
    words = {"_XTOKEN_COMPLETE": "complete_bash", "COMP_WORDS": "xtoken runs show f", "COMP_CWORD": "3"}
    done = CliRunner().invoke(cli.app, [], env=words, prog_name="xtoken")
    assert done.stdout.split() == ["first-1"]
