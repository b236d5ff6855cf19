"""The supervisor of one run: starts its processes, watches them, restarts them and shuts them down."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from xtoken_core.data_plane.address import Address
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.supervisor import os_process
from xtoken_services.supervisor.events import SupervisorEvents
from xtoken_services.supervisor.launchers.base import Launcher, NodeLostError
from xtoken_services.supervisor.node_groups import NodeGroup, NodeGroups
from xtoken_services.supervisor.process_group import (
    FIRST_DELAY_S,
    GroupState,
    ManagedProcess,
    ProcessGroup,
    RecoveredGroup,
    RestartPolicy,
    describe_exit,
    failure_during_shutdown,
    lost_progress,
    next_incarnation,
    shut_down_gracefully,
    stop_groups,
)
from xtoken_services.supervisor.process_spec import STOP_ORDER, ProcessSpec
from xtoken_services.supervisor.queue_monitor import loss_reason
from xtoken_services.supervisor.run_record import RunRecord, RunResult, write_record
from xtoken_services.supervisor.writer_progress import WriterProgress

log = logging.getLogger("xtoken.supervisor")

TICK_S = 0.1
POLL_S = 1.0
"""Seconds between two questions to the queues; a tick only looks at processes."""
QUEUE_SILENCE_S = 30.0
"""Silence after which a queue is killed: far longer than its slowest request."""
GRACE_S = 30.0
"""Time that workers have to exit at the end; `workers.stop_timeout_s` replaces it."""
QUEUE_GRACE_S = 5.0
"""The queues' time, behind the workers': nothing that they hold is needed any more."""
RESTART_GRACE_S = 5.0
"""The time of processes that are only restarted: what they were doing is done again."""
SUPERVISOR_FAILED = "its supervisor has failed: this is an error in xtoken, see the log"

OUT_OF_MEMORY = (
    "the machine, or its cgroup, ran out of memory: lower train.micro_batch_tokens, workers.slots or workers.ranks, "
    'use teacher.content = "hidden" or "topk", or give the run more memory'
)


class RunFailed(Exception):  # noqa: N818 - ends the loop, and reaches the caller as a RunResult
    """The run cannot continue.

    Attributes:
        exit_code: Exit code of a command that ran it.
    """

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Limits:
    """Limits of a supervisor; times are seconds."""

    max_restarts: int = 3
    hang_timeout_s: float = 600.0
    grace_s: float = GRACE_S
    first_delay_s: float = FIRST_DELAY_S


class Supervisor:
    """Runs the processes of one run until it completes, fails or is stopped.

    Queues are started first, and a worker once the queue of its node answers. A worker that exits with 0 has finished,
    with the status of a ConfigError or InputError it ends the run, with any other it is restarted, unless the kernel
    has killed it for lack of memory. The run is complete when all trainers, or writers of a store, have finished and
    every queue reports that all its positions are done.

    Args:
        status: The run before its processes exist: its id is in their marks, its output has logs and `run.json`, its
            `step` is what it resumes from, shown until a queue reports one.
        specs: The processes, a queue per node group among them.
        queues: Addresses of the queues, as planned.
        launcher: Starts the processes.
        limits: Restarts and timeouts.
        events: Observer of what another supervisor would need to take over.
        recovered: State in which an earlier supervisor has left each process group, by its name; others start fresh.
        writers: As of `NodeGroups`.
    """

    def __init__(
        self,
        status: RunStatus,
        specs: Sequence[ProcessSpec],
        queues: Sequence[Address],
        launcher: Launcher,
        limits: Limits,
        *,
        events: SupervisorEvents | None = None,
        recovered: Mapping[str, RecoveredGroup] | None = None,
        writers: WriterProgress | None = None,
    ) -> None:
        self._status = status.model_copy(update={"text_read": None, "checking": None})
        self._logs = status.output / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._run_id = status.id
        self._events = events or SupervisorEvents()
        self._limits = limits
        names = dict.fromkeys(spec.group for spec in specs)
        first = next_incarnation(self._logs)
        self._groups = [
            self._group([spec for spec in specs if spec.group == name], first, (recovered or {}).get(name))
            for name in names
        ]
        self._queues = [group for group in self._groups if group.kind == "queue"]
        self._workers = [group for group in self._groups if group.kind != "queue"]
        self._writers = writers
        self._nodes = NodeGroups(self._queues, queues, launcher, status.step or 0, writers)
        self._launcher = launcher
        self._polled_at = 0.0
        self._connect_tried_at: dict[int, float] = {}
        self._wake = threading.Event()
        self._stop_requested = False
        self._immediately = False
        self._detach_requested = False
        self._result: RunResult | None = None
        own = os_process.identify(os.getpid())
        self._record = RunRecord(
            state=status.state,
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            run=self._run_id,
            supervisor=own.to_document() if own else {},
        )
        self._written: RunRecord | None = None
        self.ticked_at = time.monotonic()
        self._update_status()

    # Called from any thread

    def stop(self, *, now: bool = False) -> None:
        """Request a graceful shutdown; with `now`, kill every process without waiting."""
        self._stop_requested = True
        self._immediately = self._immediately or now
        self._wake.set()

    def detach(self) -> None:
        """Return from `run` and let the processes continue, for another supervisor to take over."""
        self._detach_requested = True
        self._wake.set()

    def status(self) -> RunStatus:
        """Return the run's status as last polled, without asking another process; ages are seconds."""
        return self._status

    # The loop

    def run(self) -> RunResult | None:
        """Start everything and stay until the run has ended and no process of it is left.

        Returns:
            How it ended; None after `detach`.
        """
        result = RunResult(RunState.FAILED, SUPERVISOR_FAILED, 1)
        try:
            while not self._stop_requested:
                if self._detach_requested:
                    self._nodes.close()
                    return None
                self._tick()
                if self._complete():
                    result = RunResult(RunState.COMPLETED)
                    break
                self._wake.wait(TICK_S)
            else:
                result = RunResult(RunState.STOPPED, "", 130)
        except (RunFailed, XtokenError) as error:
            result = RunResult(RunState.FAILED, str(error), error.exit_code)
        except OSError as error:
            result = RunResult(RunState.FAILED, f"cannot continue the run: {error}", 1)
        except Exception:
            log.exception("the run's supervisor has failed")
        return self._end(result)

    def _tick(self) -> None:
        # Queues come first: trainers of one that has died wait for a restart before their exits are read as failures.
        for node in self._nodes:
            self._watch_queue(node)
        self._connect()
        for group in self._workers:
            if group.state == GroupState.RUNNING:
                failed = group.poll()
                if failed is not None:
                    self._fail(group, failed, self._exit_reason(failed))
        if time.monotonic() - self._polled_at >= POLL_S:
            self._poll_queues()
        # Starts come last, as all that is above may have made a group due.
        for group in self._workers:
            due = group.state == GroupState.WAITING and group.due <= time.monotonic()
            if due and self._nodes.connected(group.nodes):
                self._start(group)
        self._update_status()
        self.ticked_at = time.monotonic()

    def _complete(self) -> bool:
        last = [group for group in self._workers if group.kind in ("trainer", "writer")]
        if any(group.state != GroupState.FINISHED for group in last):
            return False
        # Asked anew: the last poll may be older than what the trainers have acknowledged before they exited.
        return len(self._nodes.poll()) == len(self._queues) and self._nodes.ended()

    # Queues

    def _watch_queue(self, node: NodeGroup) -> None:
        queue = node.queue
        if queue.state == GroupState.RUNNING and not queue.processes[0].alive:
            node.monitor.disconnect()  # no worker starts before the next queue answers
            self._fail(queue, queue.processes[0], self._exit_reason(queue.processes[0]))
            self._restart_trainers()
        if queue.state == GroupState.WAITING and queue.due <= time.monotonic():
            self._start(queue)

    def _connect(self) -> None:
        """Open a session on queues that have none, up to the first that does not answer.

        An attempt blocks for `queue_monitor.PATIENCE_S`, so at most one may fail in a tick; the one tried longest ago
        is next, or a queue that never answers would keep the others from being tried.
        """
        waiting = [n for n in self._nodes if n.queue.state == GroupState.RUNNING and not n.monitor.connected]
        waiting.sort(key=lambda node: self._connect_tried_at.get(node.node, 0.0))
        for node in waiting:
            self._connect_tried_at[node.node] = time.monotonic()
            if not node.monitor.connect():
                if time.monotonic() - node.queue.started_at > self._limits.hang_timeout_s:
                    node.queue.processes[0].kill()
                    why = f"did not answer within {self._limits.hang_timeout_s:g} s"
                    self._fail(node.queue, node.queue.processes[0], why)
                return
            log.info("%s answers", node.queue.name)
            self._polled_at = time.monotonic()  # it has just answered: no poll is due

    def _restart_trainers(self) -> None:
        """Restart the trainers after a queue was lost.

        A new queue is empty, and only a trainer that resumes from its checkpoint sets where it starts. Collators and
        teachers need no restart: they find their sessions gone and exit, and are restarted for that.
        """
        for group in self._workers:
            if group.kind == "trainer" and group.state in (GroupState.RUNNING, GroupState.FINISHED):
                stop_groups([group], self._grace)
                group.restart_at(time.monotonic())

    def _poll_queues(self) -> None:
        self._polled_at = time.monotonic()
        answered = self._nodes.poll()
        for node in self._nodes:
            if node.node not in answered and self._nodes.silent_for(node) > QUEUE_SILENCE_S:
                log.error("%s has not answered for %g s: killing it", node.queue.name, QUEUE_SILENCE_S)
                node.queue.processes[0].kill()  # the next tick finds it dead, and restarts it
        self._check_given_up()
        # Read on every poll, because a worker that fails gracefully has returned its leases before its exit is seen.
        tasks = {p.spec.task for group in self._workers for p in group.processes if p.spec.task}
        for number in answered:
            self._nodes[number].monitor.record_leases(tasks)
        for group in self._workers:
            if self._writers is not None:
                self._check_writer(group, self._writers)
            if not group.nodes <= answered:
                continue  # old statistics say nothing about a session
            if group.state == GroupState.RUNNING:
                self._check_sessions(group)
            elif group.state == GroupState.FINISHED and not self._nodes.ended(group.nodes):
                # It exited too early, or a trainer has since resumed from a checkpoint before the end.
                self._fail(group, group.processes[0], "exited before the end of the run")

    def _check_sessions(self, group: ProcessGroup) -> None:
        for process in group.processes:
            if not process.alive:
                continue  # its exit is the reason, which the next tick reads
            overdue = time.monotonic() - group.started_at > self._limits.hang_timeout_s
            stats = self._nodes[process.spec.node].monitor.stats
            why = loss_reason(stats, process.spec.name, group.incarnation, overdue=overdue)
            if why:
                process.kill()
                self._fail(group, process, f"was killed: {why}")
                return

    def _check_writer(self, group: ProcessGroup, writers: WriterProgress) -> None:
        """Restart a writer that adds no line: it has no session that could end by silence."""
        (writer,) = group.processes
        limit = self._limits.hang_timeout_s
        if writer.alive and writers.silent_for(writer.spec.name, group.started_at) > limit:
            writer.kill()
            self._fail(group, writer, f"was killed: it has written nothing for {limit:g} s")

    # Failures

    def _exit_reason(self, process: ManagedProcess) -> str:
        """Return a process's exit status in words, with its machine."""
        machine = self._nodes.machine(process.spec.node)
        return f"{describe_exit(process.exit_code)}{f' on {machine}' if machine else ''}"

    def _fail(self, group: ProcessGroup, process: ManagedProcess, why: str) -> None:
        """Restart a group after its policy's delay; wait up to `RESTART_GRACE_S` for its other processes to exit.

        Raises:
            RunFailed: A restart cannot help, a queue has given up the run, or the group has failed too often.
        """
        line = process.last_log_line()
        if process.exit_code == ConfigError.exit_code:
            raise RunFailed(f"{process.spec.name}: {line}", ConfigError.exit_code)
        if (killed := group.out_of_memory) is not None and not self._nodes.machine(killed.spec.node):
            raise RunFailed(f"{killed.spec.name} was killed: {OUT_OF_MEMORY}", ConfigError.exit_code)
        self._nodes.poll()  # a queue that has given up the run knows the reason better than its workers
        self._check_given_up()
        detail = f": {line}" if line else ""
        delay = group.policy.record_failure(self._nodes.step)
        if delay is None:
            count = group.policy.limit
            restarts = f"after {count} restart{'s' if count != 1 else ''} without progress"
            raise RunFailed(f"{process.spec.name} {why}, {restarts}{self._nodes.leases(process.spec)}{detail}")
        group.report_failures()
        self._events.message(f"{why}: restarting in {delay:.1f} s{detail}", worker=process.spec.name)
        log.warning("%s %s: restarting in %.1f s%s", process.spec.name, why, delay, detail)
        # The others of the group have lost a rank and can make no progress; they get a short grace to exit.
        stop_groups([group], lambda: min(self._grace(), RESTART_GRACE_S))
        group.restart_at(time.monotonic() + delay)

    def _check_given_up(self) -> None:
        if self._nodes.failure:
            raise RunFailed(self._nodes.failure)

    # Processes

    def _group(self, specs: Sequence[ProcessSpec], first: int, recovered: RecoveredGroup | None) -> ProcessGroup:
        policy = RestartPolicy(self._limits.max_restarts, first_delay_s=self._limits.first_delay_s)
        if recovered is None:
            return ProcessGroup(specs, policy, first, self._run_id, self._events)
        policy.failures, policy.highest_step = recovered.failures, recovered.highest_step
        group = ProcessGroup(specs, policy, recovered.incarnation + 1, self._run_id, self._events)
        group.attach(recovered.handles, recovered.restarts, self._logs)
        if recovered.waiting:
            group.restart_at(time.monotonic())
        return group

    def _start(self, group: ProcessGroup) -> None:
        if not all(self._launcher.ready(node, group.kind) for node in group.nodes):
            return  # it stays due: the next tick asks again
        try:
            group.start(self._launcher, self._logs)
        except NodeLostError as error:  # no failure of the group: its count of restarts stays
            log.warning("%s: %s", group.name, error)
            stop_groups([group], lambda: RESTART_GRACE_S)
            group.restart_at(time.monotonic() + POLL_S)
            return
        for process in group.processes:
            assert process.handle is not None
            log.info("%s started as process %d, log %s", process.spec.name, process.handle.pid, process.log)

    def _grace(self) -> float:
        # Polled while workers stop, which may take longer than the health check allows between two ticks.
        self.ticked_at = time.monotonic()
        return 0.0 if self._immediately else self._limits.grace_s

    def _end(self, result: RunResult) -> RunResult:
        """Stop the workers, then the queues they report to, then kill whatever still carries the run's mark."""
        if result.state == RunState.FAILED:
            self._nodes.give_up(result.error)
        if result.state == RunState.STOPPED:
            late, failed = shut_down_gracefully(self._workers, self._grace)
            lines = [lost_progress(late, self._limits.grace_s)] if late and not self._immediately else []
            lines += [failure_during_shutdown(process, self._exit_reason(process)) for process in failed]
            result = replace(result, error="; ".join(lines))
            if lines:
                log.warning("%s", result.error)
        else:
            stop_groups(sorted(self._workers, key=lambda group: STOP_ORDER.index(group.kind)), self._grace)
        self._nodes.poll()  # the last status counts what the workers have acknowledged while they stopped
        self._nodes.close()
        stop_groups(self._queues, lambda: QUEUE_GRACE_S)
        self._launcher.kill_marked(f"{self._run_id}/")  # children that have left their worker's process group
        for group in self._groups:
            group.state = GroupState.FINISHED if result.state == RunState.COMPLETED else GroupState.STOPPED
        self._result = result
        try:
            self._update_status()
        except OSError as error:
            log.error("cannot write the run's record: %s", error)
        return result

    # Status

    def _state(self) -> RunState:
        if self._result is not None:
            return self._result.state
        if self._stop_requested:
            return RunState.STOPPING
        started = any(group.state != GroupState.WAITING for group in self._workers)
        return RunState.RUNNING if started else RunState.STARTING

    def _update_status(self) -> None:
        """Update `status`, and `run.json` if it has changed.

        Raises:
            OSError: It cannot be written.
        """
        state = self._state()
        end = self._result or RunResult(state)
        workers = [self._nodes.worker_status(group, process) for group in self._groups for process in group.processes]
        common = {"state": state, "error": end.error}
        self._status = self._status.model_copy(update=common | self._nodes.totals() | {"workers": workers})
        if self._result is None:  # the end is reported by the caller, once nothing of the run is left
            self._events.state_changed(state)
            self._events.progressed(self._nodes.step, self._status.steps or 0)
        exit_code = end.exit_code if self._result else None
        attempts = {name: record for group in self._groups for name, record in group.records().items()}
        record = self._record.model_copy(update=common | {"exit_code": exit_code, "workers": attempts})
        if record != self._written:  # it has no progress: it changes with starts and exits, not with every tick
            write_record(self._status.output, record)
            self._written = record
