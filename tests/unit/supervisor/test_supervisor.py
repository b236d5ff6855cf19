"""The supervisor, over a real queue and real processes that misbehave."""

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.cases import cases
from tests.support.waiting import until
from tests.unit.supervisor.scripted_run import ScriptedRun, alive
from xtoken_core.data_plane.address import Address, create_token
from xtoken_services.common.run import machine
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.launchers.local import LocalLauncher
from xtoken_services.supervisor.process_group import RecoveredGroup
from xtoken_services.supervisor.process_spec import ProcessSpec
from xtoken_services.supervisor.supervisor import Limits, Supervisor
from xtoken_services.supervisor.writer_progress import WriterProgress

HELD_UNTIL_RESTARTED = "step5:await a file that never comes"
"""Keeps a trainer's first process from completing its run before the test has killed another process."""


def attempts(run: ScriptedRun, name: str) -> int:
    return len(list((run.output / "logs").glob(f"{name}.*.log")))


def record(run: ScriptedRun) -> dict:
    return json.loads((run.output / "run.json").read_text())


def test_run_completes_and_its_incarnations_continue_after_existing_logs(scripted: ScriptedRun) -> None:
    (scripted.output / "logs").mkdir()
    (scripted.output / "logs" / "collator-0.7.log").write_text("older\n")
    scripted.start(steps=6)
    ending = scripted.wait()
    assert (ending.state, ending.error, ending.exit_code) == (RunState.COMPLETED, "", 0)
    assert scripted.steps_done() == list(range(6))
    written = record(scripted)
    assert written["state"] == "completed"
    assert {name: (w["pid"], w["attempt"]) for name, w in written["workers"].items()} == dict.fromkeys(
        ("queue", "collator-0", "teacher-0-0", "trainer-0"), (None, 8)
    )
    assert (scripted.output / "logs" / "collator-0.7.log").read_text() == "older\n"
    status = scripted.supervisor.status()
    assert (status.step, status.steps, status.skipped) == (6, 6, 24)


@pytest.mark.slow
def test_resumed_run_shows_the_step_of_its_checkpoint(scripted: ScriptedRun) -> None:
    supervisor = scripted.start(steps=6, step=3, trainer_0=["start:kill"])
    steps = [supervisor.status().step]
    scripted.until(lambda status: steps.append(status.step) or status.workers[-1].restarts == 1)
    assert set(steps) == {3}, "its trainer has said nothing yet"
    assert scripted.wait().state == RunState.COMPLETED
    assert scripted.steps_done() == list(range(6)), "the trainer has gone back to the beginning"


def test_killed_workers_are_restarted(scripted: ScriptedRun) -> None:
    scripted.start(
        steps=8, collator_0=["work:kill"], teacher_0_0=["work:kill"], trainer_0=["work:kill"],
    )  # fmt: skip
    assert scripted.wait().state == RunState.COMPLETED
    assert scripted.steps_done() == list(range(8))
    for name in ("collator-0", "teacher-0-0", "trainer-0"):
        assert attempts(scripted, name) == 2, name
        assert record(scripted)["workers"][name]["attempt"] == 2


@pytest.mark.slow
def test_a_worker_killed_for_lack_of_memory_ends_the_run(
    scripted: ScriptedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 12\noom_kill 3\n")
    monkeypatch.setattr(machine, "PROC", tmp_path)
    scripted.start(steps=12, trainer_0=[HELD_UNTIL_RESTARTED])
    scripted.until_step(3)
    counts.write_text("pgfault 13\noom_kill 4\n")
    os.kill(scripted.pid("trainer-0"), signal.SIGKILL)
    ending = scripted.wait()
    assert (ending.state, ending.exit_code) == (RunState.FAILED, 2)
    assert ending.error.startswith("trainer-0 was killed: the machine, or its cgroup, ran out of memory: lower train")
    assert attempts(scripted, "trainer-0") == 1


def test_killed_queue_is_restarted_and_rewound(scripted: ScriptedRun) -> None:
    scripted.start(steps=12, trainer_0=[HELD_UNTIL_RESTARTED])
    scripted.until_step(3)
    before = scripted.pid("trainer-0")
    os.kill(scripted.pid("queue"), signal.SIGKILL)
    assert scripted.wait().state == RunState.COMPLETED
    assert attempts(scripted, "queue") == 2
    assert attempts(scripted, "trainer-0") >= 2
    assert scripted.pid("trainer-0") != before
    assert sorted(set(scripted.steps_done())) == list(range(12))


TWICE = "after 2 restarts without progress"


@cases(
    "worker, deed, error, status, started",
    pytest.param(
        *("trainer-0", "step2:always exit 7", f"trainer-0 exited with status 7, {TWICE}: told to leave", 1, 3),
        marks=pytest.mark.slow,
    ),
    ("teacher-0-0", "hold:always kill", f"teacher-0-0 was killed by signal 9, {TWICE} (leased: 0, 1, 2, 3)", 1, 3),
    pytest.param(
        "teacher-0-0",
        "hold:always exit 7",
        f"teacher-0-0 exited with status 7, {TWICE} (leased: 0, 1, 2, 3): told to leave",
        1,
        3,
        marks=pytest.mark.slow,
    ),
    ("trainer-0", "work:exit 2", "trainer-0: told to leave", 2, 1),
    ("collator-0", "work:always give_up too much is dead", "too much is dead", 1, 1),
)
def test_what_ends_a_run_is_named(
    scripted: ScriptedRun, worker: str, deed: str, error: str, status: int, started: int
) -> None:
    scripted.start(steps=6, rows=worker == "teacher-0-0", **{worker.replace("-", "_"): [deed]})
    ending = scripted.wait()
    assert (ending.state, ending.error, ending.exit_code) == (RunState.FAILED, error, status)
    assert attempts(scripted, worker) == started
    assert record(scripted)["error"] == ending.error


@pytest.mark.slow
def test_progress_resets_failures(scripted: ScriptedRun) -> None:
    scripted.start(steps=12, trainer_0=[f"step{step}:kill {step}" for step in (2, 4, 6, 8)])
    assert scripted.wait().state == RunState.COMPLETED
    assert attempts(scripted, "trainer-0") == 5
    assert scripted.steps_done() == list(range(12))


@pytest.mark.slow
def test_frozen_workers_with_and_without_a_session_are_restarted(scripted: ScriptedRun) -> None:
    limits = Limits(max_restarts=1, hang_timeout_s=10, grace_s=1, first_delay_s=0.05)
    deeds = {"collator_0": ["work:freeze"], "teacher_0_0": ["start:freeze"], "trainer_0": ["step5:await go"]}
    scripted.start(steps=6, limits=limits, **deeds)
    scripted.until(lambda _: attempts(scripted, "teacher-0-0") == 2)
    (scripted.state / "go").touch()
    assert scripted.wait().state == RunState.COMPLETED
    assert [attempts(scripted, name) for name in ("collator-0", "teacher-0-0")] == [2, 2]


def test_a_writer_that_writes_nothing_is_restarted(scripted: ScriptedRun) -> None:
    lines, writers = scripted.output / "steps.jsonl", WriterProgress(scripted.output, {0: 2})
    program = f"import time; open({str(lines)!r}, 'a').write('{{\"rank\": 0, \"left\": 1}}\\n'); time.sleep(60)"
    writer = ProcessSpec("writer", "writer-0", "writer-0", (sys.executable, "-c", program), {})
    limits = Limits(max_restarts=1, hang_timeout_s=0.5, grace_s=1, first_delay_s=0.05)
    supervisor = Supervisor(scripted.status(2), [writer], (), LocalLauncher(), limits, writers=writers)
    scripted.run_supervisor(supervisor)
    ending = scripted.wait()
    assert ending.state == RunState.FAILED
    assert "writer-0 was killed: it has written nothing for 0.5 s, after 1 restart" in ending.error
    assert (supervisor.status().step, supervisor.status().workers[0].phase) == (1, "run")


@pytest.mark.slow
def test_dead_rank_restarts_all_trainers(scripted: ScriptedRun) -> None:
    scripted.start(steps=12, ranks=2, trainer_0=[HELD_UNTIL_RESTARTED])
    scripted.until_step(2)
    os.kill(scripted.pid("trainer-1"), signal.SIGKILL)
    assert scripted.wait().state == RunState.COMPLETED
    assert [attempts(scripted, f"trainer-{rank}") for rank in (0, 1)] == [2, 2]
    assert scripted.steps_done() == list(range(12))
    environments = [
        dict(
            line.split("=", 1)
            for line in (scripted.state / f"trainer-{rank}.2.env").read_text().splitlines()
            if "=" in line
        )
        for rank in (0, 1)
    ]
    assert {env["MASTER_ADDR"] for env in environments} == {"127.0.0.1"}
    assert len({env["MASTER_PORT"] for env in environments}) == 1


@pytest.mark.slow
def test_early_exit_is_restarted(scripted: ScriptedRun) -> None:
    scripted.start(steps=20, collator_0=["work:exit 0"])
    assert scripted.wait().state == RunState.COMPLETED
    assert attempts(scripted, "collator-0") == 2


def test_graceful_shutdown_and_sigterm_before_the_handler_are_clean(scripted: ScriptedRun) -> None:
    supervisor = scripted.start(steps=1000)  # a scripted worker never listens: the signal ends it
    scripted.until_step(2)
    supervisor.stop()
    ending = scripted.wait()
    assert (ending.state, ending.error, ending.exit_code) == (RunState.STOPPED, "", 130)
    left = {name: worker["exit_code"] for name, worker in record(scripted)["workers"].items() if name != "queue"}
    assert set(left.values()) == {-signal.SIGTERM}
    assert all(worker.pid is None for worker in supervisor.status().workers)
    assert record(scripted)["state"] == "stopped"


def test_stop_kills_deaf_workers_and_all_children(scripted: ScriptedRun) -> None:
    deeds = ["start:deaf", "start:child group", "start:child own"]
    supervisor = scripted.start(steps=1000, teacher_0_0=deeds, collator_0=["start:child group"])
    scripted.until_step(2)
    assert len(scripted.left_behind()) > 4, "the run's processes and their children live"
    supervisor.stop()
    assert scripted.wait().state == RunState.STOPPED


@pytest.mark.slow
def test_stop_now_does_not_wait(scripted: ScriptedRun) -> None:
    limits = Limits(grace_s=3600)
    supervisor = scripted.start(steps=1000, trainer_0=["start:deaf"], limits=limits)
    scripted.until_step(1)
    supervisor.stop()
    supervisor.stop(now=True)
    ending = scripted.wait()
    assert (ending.state, ending.error) == (RunState.STOPPED, ""), "nobody wanted it to wait"


def moment(run: ScriptedRun, name: str) -> float:
    return float((run.state / name).read_text())


@pytest.mark.slow
def test_trainers_exit_before_the_others_are_signalled(scripted: ScriptedRun) -> None:
    others = {"teacher_0_0": ["start:linger 0"], "collator_0": ["start:linger 0"]}
    limits = Limits(grace_s=60)
    supervisor = scripted.start(steps=1000, ranks=2, trainer_1=["start:linger 0.5"], limits=limits, **others)
    scripted.until_step(2)
    supervisor.stop()
    ending = scripted.wait()
    assert (ending.state, ending.error) == (RunState.STOPPED, "")
    left = moment(scripted, "trainer-1.left")
    assert all(moment(scripted, f"{name}.asked") >= left for name in ("teacher-0-0", "collator-0"))


def test_a_trainer_that_uses_up_the_grace_and_one_that_failed_are_named(
    scripted: ScriptedRun, caplog: pytest.LogCaptureFixture
) -> None:
    deeds = {"trainer_0": ["start:deaf"], "trainer_1": ["start:stumble 2"], "teacher_0_0": ["start:linger 1"]}
    supervisor = scripted.start(steps=1000, ranks=2, limits=Limits(grace_s=2), **deeds)
    scripted.until_step(2)
    supervisor.stop()
    ending = scripted.wait()
    said = (
        "trainer-0 did not exit within 2 s (workers.stop_timeout_s): progress since the last checkpoint is "
        "lost; trainer-1 exited with status 2 while the run was stopped: told to leave"
    )
    assert (ending.state, ending.exit_code, ending.error) == (RunState.STOPPED, 130, said)
    assert (record(scripted)["state"], record(scripted)["error"]) == ("stopped", said)
    assert supervisor.status().error == said
    assert said in caplog.messages
    assert not (scripted.state / "teacher-0-0.left").exists(), "there is one grace in all"


@pytest.mark.slow
def test_failures_during_shutdown_are_named(scripted: ScriptedRun, caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(grace_s=60)
    supervisor = scripted.start(
        steps=1000, trainer_0=["start:stumble 2"], teacher_0_0=["start:stumble 7"], limits=limits
    )  # fmt: skip
    scripted.until_step(2)
    supervisor.stop()
    ending = scripted.wait()
    said = (
        "trainer-0 exited with status 2 while the run was stopped: told to leave; "
        "teacher-0-0 exited with status 7 while the run was stopped: told to leave"
    )
    assert (ending.state, ending.exit_code, ending.error) == (RunState.STOPPED, 130, said)
    assert (record(scripted)["state"], record(scripted)["error"]) == ("stopped", said)
    assert said in caplog.messages
    assert attempts(scripted, "trainer-0") == 1


@pytest.mark.slow
def test_failure_before_stop_now_is_named(scripted: ScriptedRun) -> None:
    limits = Limits(grace_s=3600)
    supervisor = scripted.start(
        steps=1000, trainer_0=["start:stumble 2"], collator_0=["start:deaf"], limits=limits
    )  # fmt: skip
    scripted.until_step(2)
    pid = scripted.pid("trainer-0")
    supervisor.stop()
    until(lambda: not alive(pid))
    supervisor.stop(now=True)
    ending = scripted.wait()
    assert ending.error == "trainer-0 exited with status 2 while the run was stopped: told to leave"


@pytest.mark.slow
def test_worker_waiting_for_a_restart_has_not_failed_during_shutdown(scripted: ScriptedRun) -> None:
    limits = Limits(max_restarts=2, hang_timeout_s=20, grace_s=3, first_delay_s=600)
    supervisor = scripted.start(steps=1000, collator_0=["work:exit 7"], limits=limits)
    scripted.until(lambda s: any(w.state == "waiting" and w.exit_code == 7 for w in s.workers))
    supervisor.stop()
    assert scripted.wait().error == "", "its failure was told when it failed"


def test_address_in_use_ends_the_run(scripted: ScriptedRun) -> None:
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        scripted.address = Address.parse(f"tcp://127.0.0.1:{occupied.getsockname()[1]}", scripted.output / "token")
        create_token(scripted.output / "token")
        scripted.start(steps=3, limits=Limits(max_restarts=0))
        ending = scripted.wait()
    assert (ending.state, ending.exit_code) == (RunState.FAILED, 1)
    assert ending.error.startswith(
        "queue exited with status 1, after 0 restarts without progress: cannot serve at tcp://"
    )


def test_a_queue_that_never_answers_ends_the_run(scripted: ScriptedRun) -> None:
    queue, *workers = scripted.members(steps=3)
    silent = replace(queue, command=(sys.executable, "-c", "import time; time.sleep(600)"))
    limits = Limits(max_restarts=0, hang_timeout_s=1, grace_s=1)
    scripted.run_supervisor(
        Supervisor(scripted.status(3), [silent, *workers], [scripted.address], LocalLauncher(), limits)
    )
    ending = scripted.wait()
    assert (ending.state, ending.error[:31]) == (RunState.FAILED, "queue did not answer within 1 s")


@pytest.mark.parametrize("waiting", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["running", "failed"])
def test_recovered_group_continues_its_incarnation(scripted: ScriptedRun, waiting: bool) -> None:
    """The next start of a recovered group has the next number, or its log would be another start's."""
    recovered = {"collator-0": RecoveredGroup(incarnation=4, handles={}, waiting=waiting, restarts=2)}
    supervisor = Supervisor(
        scripted.status(2),
        scripted.members(steps=2),
        [scripted.address],
        LocalLauncher(),
        Limits(),
        recovered=recovered,
    )
    worker = record(scripted)["workers"]["collator-0"]
    assert (worker["attempt"], worker["restarts"]) == (4, 2)
    assert Path(worker["log"]).name == "collator-0.4.log"
    scripted.run_supervisor(supervisor)
    assert scripted.wait().state == RunState.COMPLETED
    assert record(scripted)["workers"]["collator-0"]["attempt"] == 5
    assert [path.name for path in (scripted.output / "logs").glob("collator-0.*.log")] == ["collator-0.5.log"]
