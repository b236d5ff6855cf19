"""Which processes a run has, and with what commands and environments."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.supervisor.scripted_run import resolved_run
from xtoken_core.data_plane.address import Address
from xtoken_services.cli.app import app
from xtoken_services.common.http_engine.keys import VARIABLE as ENGINE_KEY
from xtoken_services.supervisor.environment import HUB_TOKEN, SECRETS, worker_environment
from xtoken_services.supervisor.process_spec import build_process_specs, threads_of_model_workers, writer_specs


def test_processes_of_two_ranks(tmp_path: Path) -> None:
    run = resolved_run(tmp_path, steps=2, ranks=2)
    members = build_process_specs(run, tmp_path / "resolved.json", [Address.parse("ipc:///private/queue")])
    assert [(m.name, m.group) for m in members] == [
        ("queue", "queue"), ("collator-0", "collator-0"), ("collator-1", "collator-1"),
        ("teacher-0-0", "teacher-0-0"), ("teacher-0-1", "teacher-0-1"),
        ("trainer-0", "trainers"), ("trainer-1", "trainers"),
    ]  # fmt: skip
    trainer = members[-1]
    assert (trainer.env["RANK"], trainer.env["WORLD_SIZE"], trainer.task) == ("1", "2", "train")
    assert trainer.command_line(7)[-6:] == ["--name", "trainer-1", "--rank", "1", "--incarnation", "7"]
    assert "--incarnation" not in members[0].command_line(7)


def test_single_rank_has_no_rendezvous(tmp_path: Path) -> None:
    members = build_process_specs(
        resolved_run(tmp_path, steps=2), tmp_path / "r.json", [Address.parse("ipc:///private/queue")]
    )
    assert not {"RANK", "WORLD_SIZE"} & set(members[-1].env)


def test_only_a_process_that_uses_a_key_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret of {name}")
    run = resolved_run(tmp_path, steps=2)
    spec = run.spec.model_copy(
        update={"teacher": (run.spec.teacher[0].model_copy(update={"url": ("http://h:1",)}),), "push_to": "a/b"}
    )
    run = run.model_copy(update={"spec": spec})
    members = build_process_specs(run, tmp_path / "r.json", [Address.parse("ipc:///private/queue")])
    given = {m.kind: {*worker_environment(m.env, m.secrets)} & {*SECRETS} for m in members}
    assert given == {"queue": set(), "collator": set(), "teacher": {ENGINE_KEY}, "trainer": {HUB_TOKEN}}
    (writer,) = writer_specs(run, tmp_path / "r.json", "store")
    assert writer.secrets == (ENGINE_KEY,)
    assert not {*worker_environment({})} & {*SECRETS}  # of the fork server


def test_commands_are_accepted_by_the_cli(tmp_path: Path) -> None:
    address = Address.parse("tcp://127.0.0.1:5000", tmp_path / "token")
    for member in build_process_specs(resolved_run(tmp_path, steps=2, ranks=2), tmp_path / "r.json", [address]):
        arguments = member.command_line(3)
        assert arguments[1:4] == ["-P", "-m", "xtoken_services.cli"], (
            "a folder `services` where it is started is not ours"
        )
        assert str(tmp_path / "token") in arguments
        shown = CliRunner().invoke(app, [*arguments[4:], "--help"])
        assert shown.exit_code == 0, shown.output


def test_threads_per_model_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    spec = resolved_run(tmp_path, steps=2, ranks=2).spec
    assert threads_of_model_workers(spec) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert threads_of_model_workers(spec) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_model_workers(spec) == 3
