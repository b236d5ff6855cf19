"""The one place that starts the processes of a run, watches them, restarts them and ends them in order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.supervisor import os_process
from services.supervisor.events import SupervisorEvents
from services.supervisor.launchers.local import Launcher, LostPlaceError
from services.supervisor.node_groups import Site, Sites
from services.supervisor.process_group import (
    Group,
    GroupState,
    TakenGroup,
    Worker,
    describe_exit,
    end_all,
    end_in_order,
    failed_leaving,
    lost_with,
    next_incarnation,
)
from services.supervisor.process_spec import STOP_ORDER, Member
from services.supervisor.queue_monitor import why_gone
from services.supervisor.restart_policy import FIRST_DELAY_S, RestartPolicy
from services.supervisor.run_record import RunState, write_record
from services.supervisor.status import attempts_of, status_of
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import ConfigError, XtokenError

log = logging.getLogger("xtoken.control")

TICK_S = 0.1
LOOK_S = 1.0
QUEUE_SILENCE_S = 30.0
GRACE_S = 30.0
QUEUE_GRACE_S = 5.0
RESTART_GRACE_S = 5.0


class GivenUp(Exception):  # noqa: N818 - how the loop ends, told to the caller as an RunResult
    """The run cannot go on.

    Attributes:
        exit_code: What a command that ran it exits with.
    """

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        error: Why, in one line, if it failed; if it was stopped, what that has lost and who failed meanwhile.
        exit_code: 0 if it completed, the fatal worker's status or 1 if it failed, 130 if it was stopped.
    """

    state: RunState
    error: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class Limits:
    """How patient a supervisor is; times are seconds."""

    max_restarts: int = 3
    load_timeout_s: float = 600.0
    grace_s: float = GRACE_S
    first_delay_s: float = FIRST_DELAY_S


class Supervisor:
    """Runs the processes of one run until it is complete, fails or is stopped.

    The queues come first; the workers once theirs answers. A worker that exits with 0 has finished, with the status of
    a ConfigError or InputError it is fatal, with any other it is restarted. The run is complete when all trainers have
    finished and every queue says that all its positions are done.

    Args:
        members: The processes, a queue per node group among them.
        queues: Their addresses, as planned.
        output: The run's directory; logs and `run.json` are written there.
        run_id: Name of the run in the marks of its processes; the output directory if left out.
        step: Where the run goes on, for `status` until a queue knows.
        steps: Optimiser steps of the whole run, likewise.
        events: Observer of what another supervisor would need to take over.
        taken: Where an earlier supervisor has left each group, by the group's name; a group it lacks starts anew.
    """

    def __init__(
        self, members: Sequence[Member], queues: Sequence[Address], output: Path, launcher: Launcher, limits: Limits, *,
        run_id: str | None = None, step: int = 0, steps: int = 0, events: SupervisorEvents | None = None,
        taken: Mapping[str, TakenGroup] | None = None,
    ) -> None:  # fmt: skip
        self._logs = output / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._run_id = run_id or str(output)
        self._events = events or SupervisorEvents()
        self._limits = limits
        names = dict.fromkeys(member.group for member in members)
        first = next_incarnation(self._logs)
        self._groups = [self._group([m for m in members if m.group == name], first, taken or {}) for name in names]
        self._queues = [group for group in self._groups if group.kind == "queue"]
        self._workers = [group for group in self._groups if group.kind != "queue"]
        self._sites = Sites(self._queues, queues, launcher, step)
        self._output = output
        self._launcher = launcher
        self._steps = steps
        self._looked_at = 0.0
        self._tried: dict[int, float] = {}
        self._wake = threading.Event()
        self._stop_asked = False
        self._hurry = False
        self._leave_asked = False
        self._ending: RunResult | None = None
        self._identity = {
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self._run_id,
            "supervisor": _own_identity(),
        }
        self._recorded: dict[str, Any] = {}
        self._status: dict[str, Any] = {}
        self.ticked_at = time.monotonic()
        self._tell()

    # What others may call, from any thread

    def stop(self, *, now: bool = False) -> None:
        """End the run in order; `now` leaves nobody any time to do so."""
        self._stop_asked = True
        self._hurry = self._hurry or now
        self._wake.set()

    def leave(self) -> None:
        """Go, and let the run's processes go on: another supervisor will take this one's place."""
        self._leave_asked = True
        self._wake.set()

    def status(self) -> dict[str, Any]:
        """Where the run stands, as last looked at; asks no other process. Ages are seconds."""
        return self._status

    # The loop

    def run(self) -> RunResult | None:
        """Start everything and stay until the run has ended; nothing of it is left then.

        Returns:
            How it ended; None if this supervisor was told to leave it.
        """
        ending = RunResult(RunState.FAILED, "its supervisor has failed: this is an error in xtoken, see the log", 1)
        try:
            while not self._stop_asked:
                if self._leave_asked:
                    self._sites.close()
                    return None
                self._tick()
                if self._complete():
                    ending = RunResult(RunState.COMPLETED)
                    break
                self._wake.wait(TICK_S)
            else:
                ending = RunResult(RunState.STOPPED, "", 130)
        except (GivenUp, XtokenError) as error:
            ending = RunResult(RunState.FAILED, str(error), error.exit_code)
        except OSError as error:
            ending = RunResult(RunState.FAILED, f"cannot keep the run going: {error}", 1)
        except Exception:
            log.exception("the run's supervisor has failed")
        return self._end(ending)

    def _tick(self) -> None:
        for site in self._sites:
            self._watch_queue(site)
        self._connect()
        for group in self._workers:
            if group.state == GroupState.RUNNING:
                failed = group.settle()
                if failed is not None:
                    self._fail(group, failed, self._how(failed))
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._look()
        for group in self._workers:
            waits = group.state == GroupState.WAITING and group.due <= time.monotonic()
            if waits and self._sites.connected(group.nodes):
                self._start(group)
        self._tell()
        self.ticked_at = time.monotonic()

    def _complete(self) -> bool:
        trainers = [group for group in self._workers if group.kind == "trainer"]
        if any(group.state != GroupState.FINISHED for group in trainers):
            return False
        return len(self._sites.look()) == len(self._queues) and self._sites.ended()

    # The queues

    def _watch_queue(self, site: Site) -> None:
        queue = site.queue
        if queue.state == GroupState.RUNNING and not queue.workers[0].alive:
            site.observer.disconnect()
            self._fail(queue, queue.workers[0], self._how(queue.workers[0]))
            self._restart_trainers_after_queue()
        if queue.state == GroupState.WAITING and queue.due <= time.monotonic():
            self._start(queue)

    def _connect(self) -> None:
        """Open a session on the next queue that has none; at most one of them lets the others wait in a round."""
        waiting = [s for s in self._sites if s.queue.state == GroupState.RUNNING and not s.observer.connected]
        waiting.sort(key=lambda site: self._tried.get(site.node, 0.0))
        for site in waiting:
            self._tried[site.node] = time.monotonic()
            if not site.observer.connect():
                if time.monotonic() - site.queue.started_at > self._limits.load_timeout_s:
                    site.queue.workers[0].kill()
                    why = f"did not answer within {self._limits.load_timeout_s:g} s"
                    self._fail(site.queue, site.queue.workers[0], why)
                return
            log.info("%s answers", site.queue.name)
            self._looked_at = time.monotonic()

    def _restart_trainers_after_queue(self) -> None:
        # What the new queue knows comes from a trainer's rewind; the other workers find their sessions gone.
        for group in self._workers:
            if group.kind == "trainer" and group.state in (GroupState.RUNNING, GroupState.FINISHED):
                end_all([group], self._grace)
                group.wait_until(time.monotonic())

    # Looking at the run through the queue

    def _look(self) -> None:
        self._looked_at = time.monotonic()
        answered = self._sites.look()
        for site in self._sites:
            if site.node not in answered and self._sites.silent_for(site) > QUEUE_SILENCE_S:
                log.error("%s has not answered for %g s: it is killed", site.queue.name, QUEUE_SILENCE_S)
                site.queue.workers[0].kill()
        self._check_given_up()
        tasks = {w.member.task for group in self._workers for w in group.workers if w.member.task}
        for node in answered:
            self._sites[node].observer.note_leases(tasks)
        for group in self._workers:
            if not group.nodes <= answered:
                continue
            if group.state == GroupState.RUNNING:
                self._check_sessions(group)
            elif group.state == GroupState.FINISHED and not self._sites.ended(group.nodes):
                # It left too early, or a trainer went back behind the end for its checkpoint's sake.
                self._fail(group, group.workers[0], "left before the end of the run")

    def _check_sessions(self, group: Group) -> None:
        for worker in group.workers:
            if not worker.alive:
                continue
            waited = time.monotonic() - group.started_at
            unseen = waited > self._limits.load_timeout_s
            stats = self._sites[worker.member.node].observer.stats
            why = why_gone(stats, worker.member.name, group.incarnation, unseen_for_long=unseen)
            if why:
                worker.kill()
                self._fail(group, worker, f"was killed: {why}")
                return

    # Failures

    def _how(self, worker: Worker) -> str:
        """How a worker has ended, and where."""
        where = self._sites.where(worker.member.node)
        return f"{describe_exit(worker.exit_code)}{f' on {where}' if where else ''}"

    def _fail(self, group: Group, worker: Worker, why: str) -> None:
        """Restart a group after its policy's delay.

        Raises:
            GivenUp: Starting again cannot mend it, the queue has ended the run, or it has failed too often.
        """
        line = worker.last_line()
        if worker.exit_code == ConfigError.exit_code:
            raise GivenUp(f"{worker.member.name}: {line}", ConfigError.exit_code)
        self._sites.look()
        self._check_given_up()
        said = f": {line}" if line else ""
        delay = group.policy.failed(self._sites.step)
        if delay is None:
            count = group.policy.limit
            restarts = f"after {count} restart{'s' if count != 1 else ''} without progress"
            raise GivenUp(f"{worker.member.name} {why}, {restarts}{self._sites.leased(worker.member)}{said}")
        group.count()
        self._events.message(f"{why}: starting it again in {delay:.1f} s{said}", worker=worker.member.name)
        log.warning("%s %s: starting it again in %.1f s%s", worker.member.name, why, delay, said)
        end_all([group], lambda: min(self._grace(), RESTART_GRACE_S))
        group.wait_until(time.monotonic() + delay)

    def _check_given_up(self) -> None:
        if self._sites.failed:
            raise GivenUp(self._sites.failed)

    # Processes

    def _group(self, members: Sequence[Member], first: int, taken: Mapping[str, TakenGroup]) -> Group:
        limits, found = self._limits, taken.get(members[0].group)
        if found is None:
            policy = RestartPolicy(limits.max_restarts, first_delay_s=limits.first_delay_s)
            return Group(members, policy, first, self._run_id, self._events)
        policy = RestartPolicy(
            limits.max_restarts, first_delay_s=limits.first_delay_s, failures=found.failures, highest=found.highest_step
        )
        group = Group(members, policy, found.incarnation + 1, self._run_id, self._events)
        group.take_over(found.handles, found.incarnation, found.restarts, self._logs)
        if found.waiting:
            group.wait_until(time.monotonic())
        return group

    def _start(self, group: Group) -> None:
        if not all(self._launcher.ready(node) for node in group.nodes):
            return
        try:
            group.start(self._launcher, self._logs)
        except LostPlaceError as error:
            log.warning("%s: %s", group.name, error)
            end_all([group], lambda: RESTART_GRACE_S)
            group.wait_until(time.monotonic() + LOOK_S)
            return
        for worker in group.workers:
            assert worker.handle is not None
            log.info("%s started as process %d, log %s", worker.member.name, worker.handle.pid, worker.log)

    def _grace(self) -> float:
        self.ticked_at = time.monotonic()  # it is asked again and again while workers leave
        return 0.0 if self._hurry else self._limits.grace_s

    def _end(self, ending: RunResult) -> RunResult:
        """End every process: workers first, in order, then the queue, then whatever still carries the run's mark."""
        if ending.state == RunState.FAILED:
            self._sites.give_up(ending.error)
        if ending.state == RunState.STOPPED:
            late, failed = end_in_order(self._workers, self._grace)
            told = [lost_with(late, self._limits.grace_s)] if late and not self._hurry else []
            told += [failed_leaving(worker, self._how(worker)) for worker in failed]
            ending = replace(ending, error="; ".join(told))
            if told:
                log.warning("%s", ending.error)
        else:
            end_all(sorted(self._workers, key=lambda group: STOP_ORDER.index(group.kind)), self._grace)
        self._sites.look()
        self._sites.close()
        end_all(self._queues, lambda: QUEUE_GRACE_S)
        self._launcher.sweep(f"{self._run_id}/")
        for group in self._groups:
            group.state = GroupState.FINISHED if ending.state == RunState.COMPLETED else GroupState.STOPPED
        self._ending = ending
        try:
            self._tell()
        except OSError as error:
            log.error("the run's record cannot be written: %s", error)
        return ending

    # Telling

    def _state(self) -> RunState:
        if self._ending is not None:
            return self._ending.state
        if self._stop_asked:
            return RunState.STOPPING
        started = any(group.state != GroupState.WAITING for group in self._workers)
        return RunState.RUNNING if started else RunState.STARTING

    def _tell(self) -> None:
        """Renew `status`, and `run.json` if it would say something new.

        Raises:
            OSError: It cannot be written.
        """
        state = self._state()
        common = {"state": state, "error": self._ending.error if self._ending else ""}
        self._status = common | status_of(self._groups, self._sites, self._steps)
        exit_code = self._ending.exit_code if self._ending else None
        if self._ending is None:  # whoever started this supervisor writes down how it ends
            self._events.state_changed(state)
            self._events.progressed(self._status["step"], self._steps)
        record = common | {"exit_code": exit_code, **self._identity, "workers": attempts_of(self._groups)}
        if record != self._recorded:
            write_record(self._output, record)
            self._recorded = record


def _own_identity() -> dict[str, Any]:
    own = os_process.identify(os.getpid())
    return own.document() if own else {}
