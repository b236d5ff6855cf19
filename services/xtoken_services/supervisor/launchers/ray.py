"""Launcher for the nodes of a Ray cluster.

Ray itself is loaded by a child process only (`ray_bridge`), which exchanges lines of JSON
with this one. A cluster that goes away kills every process that is connected to it: that is the bridge, not the
supervisor; and one control plane can use several clusters at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import XtokenError
from xtoken_services.common.processes.supervised import MARK, PYTHON
from xtoken_services.supervisor.environment import SECRETS
from xtoken_services.supervisor.launchers.base import (
    NODE_LOST_EXIT,
    STATUS_FILE,
    UNKNOWN_EXIT,
    NodeLostError,
    read_status,
)
from xtoken_services.supervisor.run_directory import KEYS, KEYS_PLACEHOLDER, QUEUE_PLACEHOLDER

log = logging.getLogger("xtoken.supervisor")

POLL_EVERY_S = 0.3
CLOSE_S = 30.0
RAY_LOG = "ray.log"
FIRST_POLL_S = 120.0
RESPONSE_S = 180.0
"""Much longer than any request should take: Ray waits a minute for a cluster, then gives up."""


@dataclass
class Machine:
    """The machine of a node group, as last polled.

    Attributes:
        generation: Number of machines that the group has had; processes of an earlier one are lost.
        present: Whether it has one now.
        name: The present machine, or the last one, in words.
        since: Time since which `present` has not changed, by `time.monotonic`.
        reason: Why it has none, as far as that is known.
        facts: Values from its agent: `address`, `url`, `keys`.
        statuses: Exit statuses of the processes started there, by mark; None for those that run.
    """

    generation: int = 0
    present: bool = False
    name: str = ""
    since: float = field(default_factory=time.monotonic)
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    statuses: dict[str, int | None] = field(default_factory=dict)


class RayHandle:
    """A process on a node of a cluster.

    Attributes:
        pid: Process id on its machine.
    """

    def __init__(self, launcher: RayLauncher, node: int, generation: int, mark: str, status: Path, pid: int) -> None:
        self._launcher, self._node, self._generation = launcher, node, generation
        self._mark, self._status = mark, status
        self.pid = pid
        self._exit_code: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """Number of its node group, generation of its machine, and its process id there."""
        return {"node": self._node, "generation": self._generation, "process": self.pid}

    def poll(self) -> int | None:
        """Return the process's exit status; `NODE_LOST_EXIT` if its machine is gone and it has left none."""
        if self._exit_code is None:
            self._exit_code = self._launcher.exit_status(self._node, self._generation, self._mark)
            if self._exit_code == NODE_LOST_EXIT:
                left = read_status(self._status)  # on the shared file system, which may have outlived the machine
                self._exit_code = NODE_LOST_EXIT if left == UNKNOWN_EXIT else left
        return self._exit_code

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._launcher.signal(self._node, self._generation, "terminate", self._mark)

    def kill(self) -> None:
        """Kill it and everything that it started."""
        self._launcher.signal(self._node, self._generation, "kill", self._mark)


class RayLauncher:
    """Starts processes on a cluster, each node group on a machine of its own that Ray chooses.

    Args:
        spec: The run.
        private: The run's private directory here. It holds the keys, and its name is the group's name in the cluster.
        tied: If this process dies in any way, kill everything it started.
    """

    def __init__(self, spec: RunSpec, private: Path, *, tied: bool) -> None:
        self._spec, self._private = spec, private
        self._machines = [Machine() for _ in range(spec.workers.nodes)]
        self._run_is_over = False
        self._failure = ""
        self._bridge = Bridge(_settings(spec, private, tied=tied), spec.output / "logs" / RAY_LOG)
        self._polled = threading.Event()
        self._closing = threading.Event()
        self._poller = threading.Thread(target=self._poll_until_closed, name=f"ray {private.name}", daemon=True)
        self._poller.start()

    # The interface of `Launcher`

    def ready(self, node: int, kind: str) -> bool:
        """Return whether a node group has a machine.

        Raises:
            XtokenError: The cluster is gone, or has had no machine for it for `ray.wait_s`.
        """
        if self._failure:
            raise XtokenError(self._failure)
        machine = self._machines[node]
        if not machine.present and time.monotonic() - machine.since > self._spec.ray.wait_s:
            raise XtokenError(self._no_machine(node, machine))
        return machine.present

    def machine(self, node: int) -> str:
        """Return the machine of a node group, or its last one, in words."""
        return self._machines[node].name

    def queue_address(self, node: int, planned: Address) -> Address | None:
        """Return the queue address chosen by the node, with this client's CURVE keys."""
        machine = self._machines[node]
        return Address(machine.facts["url"], None, self._private / KEYS) if machine.present else None

    def start(self, command: Sequence[str], env: Mapping[str, str], log: Path, *, node: int = 0) -> RayHandle:
        """Start a command on its machine, with the placeholders of its queue filled in."""
        machine, mark = self._machines[node], env[MARK]
        # Read before the call: a machine that is replaced meanwhile raises the generation, and the process is lost.
        generation = machine.generation
        filled: list[str] = []
        if machine.present:
            values = {QUEUE_PLACEHOLDER: machine.facts["url"], KEYS_PLACEHOLDER: machine.facts["keys"]}
            filled = [values.get(part, part) for part in command]
        pid = self._call(node, "start", mark, filled, dict(env), str(log))
        if isinstance(pid, str):
            raise OSError(pid)
        return RayHandle(self, node, generation, mark, Path(env[STATUS_FILE]), int(pid))

    def attach(self, identity: dict[str, Any] | None, mark: str, status: Path, *, node: int = 0) -> RayHandle:
        """Return a handle of a process that an earlier launcher has started; its agent knows it, if it still runs."""
        self._polled.wait(FIRST_POLL_S)
        machine = self._machines[node]
        known = machine.present and mark in machine.statuses
        pid = int((identity or {}).get("process", 0))
        return RayHandle(self, node, machine.generation if known else -1, mark, status, pid)

    def rendezvous(self, node: int = 0) -> Mapping[str, str]:
        """Return the address of the node's machine and a free port there, for torch.distributed."""
        port = self._call(node, "free_port")
        return {"MASTER_ADDR": str(self._machines[node].facts["address"]), "MASTER_PORT": str(port)}

    def kill_marked(self, prefix: str) -> None:
        """Kill every process with such a mark on all machines; the run is over then."""
        self._run_is_over = True
        for node, machine in enumerate(self._machines):
            if machine.present:
                self.signal(node, machine.generation, "kill_marked", prefix)

    def close(self) -> None:
        """Leave the cluster, and release its machines if the run is over."""
        self._closing.set()
        self._bridge.close(release=self._run_is_over)
        self._poller.join()

    # For its handles

    def exit_status(self, node: int, generation: int, mark: str) -> int | None:
        """Return a process's exit status; None while it runs, `NODE_LOST_EXIT` if its machine is gone."""
        machine = self._machines[node]
        if self._failure or not machine.present or machine.generation != generation:
            return NODE_LOST_EXIT
        return machine.statuses.get(mark)

    def signal(self, node: int, generation: int, method: str, argument: str) -> None:
        """Call a method of a machine's agent, if the machine is still there."""
        if self._machines[node].generation == generation:
            try:
                self._call(node, method, argument)
            except NodeLostError as error:
                log.info("%s", error)

    # Within

    def _call(self, node: int, method: str, *arguments: Any) -> Any:
        machine = self._machines[node]
        if self._failure or not machine.present:
            raise NodeLostError(f"node group {node} has no machine at present")
        response = self._bridge.request({"call": method, "node": node, "arguments": arguments})
        if "error" in response:
            raise NodeLostError(f"{machine.name or f'node group {node}'}: {response['error']}")
        return response["result"]

    def _poll_until_closed(self) -> None:
        """Poll the cluster: the body of the thread."""
        while not self._closing.wait(POLL_EVERY_S):
            response = self._bridge.request({"call": "poll"})
            if "error" in response:
                self._failure = response["error"]
                log.error("%s", self._failure)
                self._polled.set()
                return
            for node, update in enumerate(response["result"]):
                self._update(node, self._machines[node], update)
            if all(update["known"] for update in response["result"]):
                self._polled.set()

    def _update(self, node: int, machine: Machine, update: Mapping[str, Any]) -> None:
        replaced = machine.present and machine.generation != update["generation"]
        if replaced or (machine.present and not update["present"]):
            machine.present, machine.since = False, time.monotonic()
            log.error("node group %d has lost %s: %s", node, machine.name, update["reason"] or "it is gone")
        machine.reason = update["reason"]
        if update["present"]:
            facts = update["facts"]
            machine.facts, machine.statuses, machine.generation = facts, update["statuses"], update["generation"]
            if not machine.present:
                machine.name = f"node {facts['address']} ({facts['host']}, {facts['id'][:8]})"
                log.info("node group %d is on %s", node, machine.name)
                machine.present, machine.since = True, time.monotonic()

    def _no_machine(self, node: int, machine: Machine) -> str:
        wait = f"{self._spec.ray.wait_s:g} s (ray.wait_s)"
        needs = f"{cpus_of(self._spec)} CPUs and {gpus_of(self._spec)} GPUs on a node of its own"
        if machine.name:
            what = f"{machine.name} was lost and nothing in the Ray cluster took its place within {wait}"
            return f"{what}; it takes {needs}: add a node and resume the run"
        if not self._polled.is_set():
            return f"the Ray cluster at {self._spec.ray.address} has not answered within {wait}"
        return f"node group {node} got no machine of the Ray cluster within {wait}: it takes {needs}; {machine.reason}"


class Bridge:
    """This process's end of the pipe to the bridge process, see `xtoken_services.supervisor.launchers.ray_bridge`.

    Args:
        settings: First line to send, see `ray_bridge.connect`.
        log_file: File for everything that Ray prints.
    """

    def __init__(self, settings: dict[str, Any], log_file: Path) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in (MARK, *SECRETS)}
        with log_file.open("ab") as file:
            self._process = subprocess.Popen(
                [*PYTHON, "xtoken_services.supervisor.launchers.ray_bridge"],
                env=inherited,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                text=True,
            )
        self._log_file = log_file
        self._lock = threading.Lock()
        self._failure = ""
        self.request(settings, wait=False)

    def request(self, request: dict[str, Any], *, wait: bool = True) -> dict[str, Any]:
        """Send a request; return its response: `result`, or `error` in one line."""
        with self._lock:
            if self._failure:
                return {"error": self._failure}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            # Reading a pipe has no timeout; killing the process at its other end closes it.
            timeout = threading.Timer(RESPONSE_S, self._process.kill)
            timeout.start()
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                if not wait:
                    return {}
                response: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
            except (OSError, ValueError):
                response = {}
            finally:
                timeout.cancel()
            if not response or response.get("fatal"):
                self._failure = response.get(
                    "error", f"the process that talks to the Ray cluster has ended or was stuck, see {self._log_file}"
                )
                return {"error": self._failure}
            return response

    def close(self, *, release: bool) -> None:
        """Stop the process, by SIGKILL if it does not exit.

        Args:
            release: Whether it first removes from the cluster what it has put there.
        """
        timeout = threading.Timer(CLOSE_S, self._process.kill)
        timeout.start()
        if release:
            self.request({"call": "release"})
        with self._lock:
            self._failure = "the launcher is closed"
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._process.wait()
        timeout.cancel()


def cpus_of(spec: RunSpec) -> int:
    """Return the CPUs of a node group, in Ray's count: one per process."""
    return 1 + spec.workers.collators + spec.workers.ranks + spec.teacher_processes


def gpus_of(spec: RunSpec) -> int:
    """Return the number of GPUs of a node group."""
    return spec.gpus_needed if spec.workers.device == "cuda" else 0


def _settings(spec: RunSpec, private: Path, *, tied: bool) -> dict[str, Any]:
    keys = private / KEYS
    return {
        "address": spec.ray.address,
        "name": private.name,
        "nodes": spec.workers.nodes,
        "cpus": cpus_of(spec),
        "gpus": gpus_of(spec),
        "tied": tied,
        "keys": {str(file.relative_to(keys)): file.read_text() for file in sorted(keys.rglob("*.key*"))},
        "required_file": str(spec.output / "resolved.json"),
    }
