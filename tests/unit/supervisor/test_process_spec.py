"""Process specifications, interrupts and the policy of restarts."""

import os
import signal
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.runs import changed
from tests.unit.supervisor.scripted_run import resolved_run
from xtoken_core.data_plane.address import Address
from xtoken_services.cli.app import app
from xtoken_services.common.http_engine.keys import VARIABLE as ENGINE_KEY
from xtoken_services.supervisor.environment import HUB_TOKEN, SECRETS, worker_environment
from xtoken_services.supervisor.interrupts import Interrupts
from xtoken_services.supervisor.process_group import LONGEST_DELAY_S, RestartPolicy
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
    teacher = run.spec.teacher[0].model_copy(update={"url": ("http://h:1",)})
    run = changed(run, teacher=(teacher,), push_to="a/b")
    members = build_process_specs(run, tmp_path / "r.json", [Address.parse("ipc:///private/queue")])
    given = {m.kind: {*worker_environment(m.env, m.secrets)} & {*SECRETS} for m in members}
    assert given == {"queue": set(), "collator": set(), "teacher": {ENGINE_KEY}, "trainer": {HUB_TOKEN}}
    (writer,) = writer_specs(run, tmp_path / "r.json", "store")
    assert writer.secrets == (ENGINE_KEY,)
    assert not {*worker_environment({})} & {*SECRETS}  # of the fork server


def test_commands_are_accepted_by_the_cli(tmp_path: Path) -> None:
    address = Address.parse("tcp://10.0.0.5:5000", keys=tmp_path / "keys")
    for member in build_process_specs(resolved_run(tmp_path, steps=2, ranks=2), tmp_path / "r.json", [address]):
        arguments = member.command_line(3)
        assert arguments[1:4] == ["-P", "-m", "xtoken_services.cli"], (
            "a folder `services` where it is started is not ours"
        )
        assert str(tmp_path / "keys") in arguments
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


def test_signals_are_counted() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert not interrupts.wait(0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.wait(0)
    assert (interrupts.count, interrupts.status) == (2, 143)
    assert signal.getsignal(signal.SIGTERM) == before


def test_ignored_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.wait(0)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_handle_no_signals() -> None:
    seen = []

    def enter() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_wait_without_a_signal(seconds: float) -> None:
    with Interrupts() as interrupts:
        assert not interrupts.wait(seconds)


def test_delays_double_up_to_the_longest_and_the_limit() -> None:
    policy = RestartPolicy(9, first_delay_s=0.5)
    delays = [policy.record_failure(3) for _ in range(10)]
    assert delays == [0.5, 1, 2, 4, 8, 16, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S, None]


def test_progress_resets_the_count() -> None:
    policy = RestartPolicy(1, first_delay_s=1)
    assert [policy.record_failure(step) for step in (0, 1, 2, 3)] == [1, 1, 1, 1]
    assert policy.record_failure(3) is None


def test_repeated_steps_are_no_progress() -> None:
    policy = RestartPolicy(2, first_delay_s=1)
    assert [policy.record_failure(step) for step in (9, 4, 9)] == [1, 2, None]


@pytest.mark.parametrize("step", [0, 5])
def test_no_restarts(step: int) -> None:
    assert RestartPolicy(0).record_failure(step) is None
