"""Starts a run's processes on the nodes of a Ray cluster. Ray itself is only ever loaded by a process beside this one.

That process (`services.supervisor.launchers.ray_bridge`) exchanges lines of JSON with it. A cluster that goes away
every process that was connected to it, but not the supervisor; and one supervisor can use several clusters at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.supervised import MARK
from services.supervisor.launchers.local import LOST_EXIT, STATUS_FILE, UNKNOWN_EXIT, LostPlaceError, read_status
from services.supervisor.run_directory import KEYS, KEYS_PLACE, QUEUE_PLACE
from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import XtokenError

log = logging.getLogger("xtoken.control")

LOOK_EVERY_S = 0.3
CLOSE_S = 30.0
NOISE = "ray.log"
FIRST_LOOK_S = 120.0
ANSWER_S = 180.0
"""Much longer than anything that is asked may take: Ray waits a minute for a cluster, then gives up."""


@dataclass
class Place:
    """What is known of a node group's machine.

    Attributes:
        times: How often it has had one; processes of an earlier one are lost.
        here: Whether it has one now.
        machine: That one, or the last, in words.
        since: When it was last known to have one, or the wait for one began, by `time.monotonic`.
        why: What keeps it from having one, as far as that is known.
        facts: What its agent has told: `address`, `url`, `keys`.
        statuses: Exit statuses of the processes started there by their marks; None for the living.
    """

    times: int = 0
    here: bool = False
    machine: str = ""
    since: float = field(default_factory=time.monotonic)
    why: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    statuses: dict[str, int | None] = field(default_factory=dict)


class RayHandle:
    """A process on a node of a cluster."""

    def __init__(self, launcher: RayLauncher, node: int, times: int, mark: str, status: Path, pid: int) -> None:
        self._launcher, self._node, self._times = launcher, node, times
        self._mark, self._status = mark, status
        self._pid = pid
        self._exit_code: int | None = None

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        return self._pid

    @property
    def identity(self) -> dict[str, Any]:
        """Its node group, which of that group's machines, and its process id there."""
        return {"node": self._node, "times": self._times, "process": self._pid}

    def poll(self) -> int | None:
        """Its exit status; `LOST_EXIT` if its machine has gone before it left one."""
        if self._exit_code is None:
            self._exit_code = self._launcher.status_of(self._node, self._times, self._mark)
            if self._exit_code == LOST_EXIT:
                left = read_status(self._status)
                self._exit_code = LOST_EXIT if left == UNKNOWN_EXIT else left
        return self._exit_code

    def terminate(self) -> None:
        """SIGTERM to the process itself."""
        self._launcher.tell(self._node, self._times, "terminate", self._mark)

    def kill(self) -> None:
        """SIGKILL to it and to everything that it started."""
        self._launcher.tell(self._node, self._times, "kill", self._mark)


class RayLauncher:
    """Starts processes on a cluster: every node group on a machine of its own, which it gets from Ray.

    Args:
        spec: The run.
        private: Its private directory here, whose name is also the group's name in the cluster; it holds the keys.
        tied: Should this process die in any way, everything it started dies with it.
    """

    def __init__(self, spec: RunSpec, private: Path, *, tied: bool) -> None:
        self._spec, self._private = spec, private
        self._places = [Place() for _ in range(spec.workers.nodes)]
        self._over = False
        self._failed = ""
        self._bridge = Bridge(_order(spec, private, tied=tied), spec.output / "logs" / NOISE)
        self._looked = threading.Event()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"ray {private.name}", daemon=True)
        self._watcher.start()

    # As `Launcher`

    def ready(self, node: int) -> bool:
        """Whether its machine is there.

        Raises:
            XtokenError: The cluster is gone, or has had no machine for it for `ray.wait_s`.
        """
        if self._failed:
            raise XtokenError(self._failed)
        place = self._places[node]
        if not place.here and time.monotonic() - place.since > self._spec.ray.wait_s:
            raise XtokenError(self._no_place(node, place))
        return place.here

    def where(self, node: int) -> str:
        """Its machine, or the last one."""
        return self._places[node].machine

    def queue(self, node: int, planned: Address) -> Address | None:
        """Where its machine serves the queue, with this side's keys."""
        place = self._places[node]
        return Address(place.facts["url"], None, self._private / KEYS) if place.here else None

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, node: int = 0) -> RayHandle:
        """Start a command on its machine; what stands for the queue's place in it is filled in."""
        place, mark = self._places[node], env[MARK]
        times = place.times
        filled = [place.facts["url"] if part == QUEUE_PLACE else part for part in command] if place.here else []
        filled = [place.facts["keys"] if part == KEYS_PLACE else part for part in filled]
        pid = self._call(node, "start", mark, filled, dict(env), str(log))
        if isinstance(pid, str):
            raise OSError(pid)
        return RayHandle(self, node, times, mark, Path(env[STATUS_FILE]), int(pid))

    def find(self, identity: dict[str, Any] | None, mark: str, status: Path, *, node: int = 0) -> RayHandle:
        """A process that an earlier launcher has started: its agent knows it, if its machine is still there."""
        self._looked.wait(FIRST_LOOK_S)
        place = self._places[node]
        known = place.here and mark in place.statuses
        pid = int((identity or {}).get("process", 0))
        return RayHandle(self, node, place.times if known else -1, mark, status, pid)

    def rendezvous(self, node: int = 0) -> Mapping[str, str]:
        """A free port of its machine."""
        port = self._call(node, "free_port")
        return {"MASTER_ADDR": str(self._places[node].facts["address"]), "MASTER_PORT": str(port)}

    def sweep(self, prefix: str) -> None:
        """SIGKILL to every process with such a mark, on all machines. The run is over then."""
        self._over = True
        for node, place in enumerate(self._places):
            if place.here:
                self.tell(node, place.times, "sweep", prefix)

    def close(self) -> None:
        """Leave the cluster, and give its machines back if the run is over."""
        self._closing.set()
        self._bridge.close(give_back=self._over)
        self._watcher.join()

    # For its handles

    def status_of(self, node: int, times: int, mark: str) -> int | None:
        """A process's exit status; None while it lives, `LOST_EXIT` if its machine has gone."""
        place = self._places[node]
        if self._failed or not place.here or place.times != times:
            return LOST_EXIT
        return place.statuses.get(mark)

    def tell(self, node: int, times: int, what: str, *arguments: Any) -> None:
        """Have a machine's agent do something, if it is still there."""
        if self._places[node].times == times:
            try:
                self._call(node, what, *arguments)
            except LostPlaceError as error:
                log.info("%s", error)

    # Within

    def _call(self, node: int, what: str, *arguments: Any) -> Any:
        place = self._places[node]
        if self._failed or not place.here:
            raise LostPlaceError(f"node group {node} has no machine at present")
        answer = self._bridge.ask({"call": what, "node": node, "arguments": arguments})
        if "error" in answer:
            raise LostPlaceError(f"{place.machine or f'node group {node}'}: {answer['error']}")
        return answer["result"]

    def _watch(self) -> None:
        """Ask for news again and again: the body of the thread."""
        while not self._closing.wait(LOOK_EVERY_S):
            answer = self._bridge.ask({"call": "look"})
            if "error" in answer:
                self._failed = answer["error"]
                log.error("%s", self._failed)
                self._looked.set()
                return
            for node, told in enumerate(answer["result"]):
                self._note(node, self._places[node], told)
            if all(told["settled"] for told in answer["result"]):
                self._looked.set()

    def _note(self, node: int, place: Place, told: Mapping[str, Any]) -> None:
        gone = place.here and place.times != told["times"]
        if gone or (place.here and not told["here"]):
            place.here, place.since = False, time.monotonic()
            log.error("node group %d has lost %s: %s", node, place.machine, told["why"] or "it is gone")
        place.why = told["why"]
        if told["here"]:
            place.facts, place.statuses, place.times = told["facts"], told["statuses"], told["times"]
            if not place.here:
                place.machine = f"node {told['facts']['address']} ({told['facts']['host']}, {told['facts']['id'][:8]})"
                log.info("node group %d is on %s", node, place.machine)
                place.here, place.since = True, time.monotonic()

    def _no_place(self, node: int, place: Place) -> str:
        wait = f"{self._spec.ray.wait_s:g} s (ray.wait_s)"
        needs = f"{cpus_of(self._spec):g} CPUs and {gpus_of(self._spec)} GPUs on a node of its own"
        if place.machine:
            what = f"{place.machine} was lost and nothing in the Ray cluster took its place within {wait}"
            return f"{what}; it takes {needs}: add a node and resume the run"
        if not self._looked.is_set():
            return f"the Ray cluster at {self._spec.ray.address} has not answered within {wait}"
        return f"node group {node} got no machine of the Ray cluster within {wait}: it takes {needs}; {place.why}"


class Bridge:
    """This side of the process that talks to Ray.

    Args:
        order: What it is told first.
        noise: Where whatever Ray prints goes.
    """

    def __init__(self, order: dict[str, Any], noise: Path) -> None:
        noise.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name != MARK}
        with noise.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.supervisor.launchers.ray_bridge"], env=inherited,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, start_new_session=True, text=True,
            )  # fmt: skip
        self._noise = noise
        self._lock = threading.Lock()
        self._gone = ""
        self.ask(order, wait=False)

    def ask(self, request: dict[str, Any], *, wait: bool = True) -> dict[str, Any]:
        """Its answer: `result`, or `error` in one line."""
        with self._lock:
            if self._gone:
                return {"error": self._gone}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            patience = threading.Timer(ANSWER_S, self._process.kill)
            patience.start()
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                if not wait:
                    return {}
                answer: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
            except (OSError, ValueError):
                answer = {}
            finally:
                patience.cancel()
            if not answer or answer.get("fatal"):
                self._gone = answer.get(
                    "error", f"the process that talks to the Ray cluster has ended or was stuck, see {self._noise}"
                )
                return {"error": self._gone}
            return answer

    def close(self, *, give_back: bool) -> None:
        """Let it go; with `give_back` it removes from the cluster what it put there. One that is stuck is killed."""
        patience = threading.Timer(CLOSE_S, self._process.kill)
        patience.start()
        if give_back:
            self.ask({"call": "give_back"})
        with self._lock:
            self._gone = "it was left"
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()
        patience.cancel()


def cpus_of(spec: RunSpec) -> float:
    """Ray's CPUs of a node group."""
    workers = spec.workers
    return spec.ray.cpus or 1 + workers.collators + workers.ranks * (1 + len(spec.teacher))


def gpus_of(spec: RunSpec) -> int:
    """GPUs of a node group."""
    if spec.ray.gpus is not None:
        return spec.ray.gpus
    return spec.workers.ranks if spec.workers.device == "cuda" else 0


def _order(spec: RunSpec, private: Path, *, tied: bool) -> dict[str, Any]:
    keys = private / KEYS
    return {
        "address": spec.ray.address,
        "name": private.name,
        "nodes": spec.workers.nodes,
        "cpus": cpus_of(spec),
        "gpus": gpus_of(spec),
        "tied": tied,
        "keys": {str(file.relative_to(keys)): file.read_text() for file in sorted(keys.rglob("*.key*"))},
        "sees": str(spec.output / "resolved.json"),
    }
