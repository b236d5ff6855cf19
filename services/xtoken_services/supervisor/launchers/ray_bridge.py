"""The bridge between one run and a Ray cluster: a process that reads requests and writes responses as lines of JSON.

The first line holds the settings; every later one is a request with one response. At the end of its input the process
exits, and with `tied` so does everything that it has put into the cluster.

The node groups of a run are the bundles of one placement group, each strictly on a node of its own. When a node is
lost, Ray finds another one for its bundle, and a new agent is started there.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from typing import Any

from xtoken_core.errors import first_line
from xtoken_services.supervisor.launchers.ray_agent import NodeAgent

NAMESPACE = "xtoken"
CALL_S = 30.0
AGENT_SILENCE_S = 60.0
CLOSE_S = 5.0
CONNECT_S = 10.0
RETRY_S = 1.0

ray: Any = None


class UnfitNodeError(Exception):
    """A node of the cluster cannot run this."""


class Bundle:
    """One bundle of the placement group, with its agent while it has one.

    Attributes:
        generation: Number of agents that it has had.
        reason: Why it has none.
    """

    def __init__(self, settings: dict[str, Any], placement_group: Any, node: int) -> None:
        self._settings, self._placement_group, self.node = settings, placement_group, node
        self.generation = 0
        self.reason = ""
        self._agent: Any = None
        self._facts: dict[str, Any] | None = None
        self._facts_request: Any = None
        self._statuses: dict[str, int | None] = {}
        self._statuses_request: Any = None
        self._answered_at = 0.0
        self._not_before = 0.0
        self._look_up_agent = not settings["tied"]

    def poll(self) -> dict[str, Any]:
        """Return the agent's state; never wait."""
        if self._look_up_agent:
            self._attach_agent()
        if self._agent is None:
            if time.monotonic() >= self._not_before:
                self._start_agent()
        elif self._facts is None:
            self._receive_facts()
        else:
            self._receive_statuses()
        present = self._facts is not None
        return {
            "present": present,
            "generation": self.generation,
            "reason": self.reason,
            "facts": self._facts or {},
            "statuses": self._statuses,
            "known": present or not self._agent,
        }

    def call(self, method: str, arguments: list[Any]) -> Any:
        """Call a method of the agent.

        Raises:
            LookupError: The agent or its machine is gone.
        """
        if self._agent is None or self._facts is None:
            raise LookupError(self.reason or "its machine is gone")
        return ray.get(getattr(self._agent, method).remote(*arguments), timeout=CALL_S)

    def release(self) -> None:
        """Kill the agent and all that it has started."""
        if self._agent is not None:
            try:
                ray.get(self._agent.close.remote(), timeout=CLOSE_S)
            except Exception as error:  # the agent is killed whatever it answers
                sys.stderr.write(f"node group {self.node}: {first_line(error)}\n")
            ray.kill(self._agent)
            self._agent = None

    @property
    def _name(self) -> str:
        return f"{self._settings['name']}/{self.node}"

    def _attach_agent(self) -> None:
        """Attach to the agent that an earlier bridge has left."""
        self._look_up_agent = False
        try:
            self._agent = ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError:
            return
        self._facts_request = self._agent.describe.remote()

    def _start_agent(self) -> None:
        """Start an agent once the bundle has a living node."""
        table = ray.util.placement_group_table(self._placement_group)
        node_id = table["bundles_to_node_id"].get(self.node)
        node = next((n for n in ray.nodes() if n["NodeID"] == node_id and n["Alive"]), None)
        if table["state"] != "CREATED" or node is None:
            self.reason = f"the placement group is {table['state'].lower()}; the cluster has {describe_resources()}"
            return
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._placement_group, placement_group_bundle_index=self.node
        )
        settings = self._settings
        detached = {} if settings["tied"] else {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached"}
        remote = ray.remote(NodeAgent).options(
            num_cpus=settings["cpus"], num_gpus=settings["gpus"], scheduling_strategy=strategy, **detached
        )
        try:
            self._agent = remote.remote(
                node["NodeManagerAddress"], node_id, settings["keys"], settings["required_file"]
            )
        except ValueError as error:  # Ray has not freed the name of the agent that was lost yet
            self._lose(first_line(error))
            return
        self._facts_request = self._agent.describe.remote()

    def _receive_facts(self) -> None:
        facts = self._result(self._facts_request)
        if facts is None:
            return
        if not facts["sees_files"]:
            raise UnfitNodeError(
                f"{facts['host']} ({facts['address']}) does not see {self._settings['required_file']}: all nodes need "
                "the run's output, models and text at the same paths"
            )
        self.generation += 1
        self._facts, self.reason = facts, ""
        self._statuses, self._statuses_request, self._answered_at = {}, None, time.monotonic()
        # Waited for once: until an agent's statuses are known, its processes would count as unknown and be lost.
        self._receive_statuses(wait_s=CALL_S)

    def _receive_statuses(self, wait_s: float = 0.0) -> None:
        if self._statuses_request is None:
            self._statuses_request = self._agent.statuses.remote()
        statuses = self._result(self._statuses_request, wait_s)
        if statuses is not None:
            self._statuses, self._answered_at = statuses, time.monotonic()
            self._statuses_request = None if self._agent is None else self._agent.statuses.remote()
        elif self._agent is not None and time.monotonic() - self._answered_at > AGENT_SILENCE_S:
            ray.kill(self._agent)
            self._lose(f"its agent has not answered for {AGENT_SILENCE_S:g} s")

    def _result(self, request: Any, wait_s: float = 0.0) -> Any:
        """Return the result of a call; None if there is none yet, or if the agent is lost."""
        if not ray.wait([request], timeout=wait_s)[0]:
            return None
        try:
            return ray.get(request)
        except ray.exceptions.RayError as error:
            self._lose(first_line(error))
            return None

    def _lose(self, reason: str) -> None:
        self._agent, self._facts, self._statuses_request, self.reason = None, None, None, reason
        self._not_before = time.monotonic() + RETRY_S


class Bridge:
    """All node groups of a run."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._placement_group = self._find_or_create_placement_group()
        self._bundles = [Bundle(settings, self._placement_group, node) for node in range(settings["nodes"])]

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request."""
        try:
            if request["call"] == "poll":
                return {"result": [bundle.poll() for bundle in self._bundles]}
            if request["call"] == "release":
                self.release()
                return {"result": None}
            return {"result": self._bundles[request["node"]].call(request["call"], request["arguments"])}
        except (LookupError, ray.exceptions.RayError) as error:
            return {"error": first_line(error)}

    def release(self) -> None:
        """Remove everything from the cluster."""
        for bundle in self._bundles:
            bundle.release()
        ray.util.remove_placement_group(self._placement_group)

    def _find_or_create_placement_group(self) -> Any:
        settings, util = self._settings, ray.util
        bundle = {"CPU": settings["cpus"], **({"GPU": settings["gpus"]} if settings["gpus"] else {})}
        if not settings["tied"]:
            try:
                return util.get_placement_group(settings["name"])
            except ValueError:
                pass
        detached = {} if settings["tied"] else {"lifetime": "detached"}
        return util.placement_group(
            [bundle] * settings["nodes"], strategy="STRICT_SPREAD", name=settings["name"], **detached
        )


def describe_resources() -> str:
    """Describe the nodes of the cluster: `3 nodes with 8 CPUs, 1 node with 4 CPUs and 2 GPUs`."""
    counts: dict[str, int] = {}
    for node in ray.nodes():
        if node["Alive"]:
            cpus, gpus = (node["Resources"].get(name, 0) for name in ("CPU", "GPU"))
            text = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
            counts[text] = counts.get(text, 0) + 1
    parts = [f"{count} node{'s' if count > 1 else ''} with {text}" for text, count in counts.items()]
    return ", ".join(parts) or "no living node"


def connect(settings: dict[str, Any]) -> Bridge:
    """Join the cluster.

    Args:
        settings: `address` and `name` in the cluster; `nodes` with `cpus` and `gpus` each; `tied`; `keys`, the key
            files' contents by name; `required_file`, which every node must see.

    Raises:
        Exception: The cluster cannot be reached; Ray raises several types.
    """
    global ray
    host, _, port = settings["address"].rpartition(":")
    if host:  # tried first, because Ray itself retries for minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    ray = importlib.import_module("ray")
    importlib.import_module("ray.util.scheduling_strategies")
    ray.init(address=settings["address"], namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    return Bridge(settings)


def main() -> None:
    """Answer requests until the input ends."""
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints must not be read as a response

    def respond(response: dict[str, Any]) -> None:
        responses.write(json.dumps(response) + "\n")
        responses.flush()

    requests = map(json.loads, sys.stdin)
    settings = next(requests)
    bridge: Bridge | None = None
    for request in requests:
        try:
            bridge = bridge or connect(settings)
            respond(bridge.handle(request))
        except Exception as error:  # the launcher waits for a response, whatever has happened
            prefix = (
                ""
                if isinstance(error, UnfitNodeError)
                else f"the Ray cluster at {settings['address']} cannot be reached: "
            )
            respond({"error": prefix + first_line(error), "fatal": True})
            return
    if settings["tied"] and bridge is not None:
        bridge.release()


if __name__ == "__main__":
    main()
