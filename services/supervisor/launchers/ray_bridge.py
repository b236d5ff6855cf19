"""Bridge between one run and a Ray cluster: reads requests and writes responses as lines of JSON.

The first line says which cluster and what for; every later one is a request with one answer. When its input ends so
does this process, and with `tied` everything that it has put into the cluster.

The node groups of a run are the bundles of one placement group, each strictly on a node of its own. When a node goes,
Ray looks for another place for its bundle, and as soon as there is one a new agent is started there.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from services.supervisor.launchers.ray_agent import NodeAgent

NAMESPACE = "xtoken"
CALL_S = 30.0
SILENCE_S = 60.0
CLOSE_S = 5.0
KNOCK_S = 10.0
AGAIN_S = 1.0

ray: Any = None


class UnfitError(Exception):
    """The cluster cannot run this."""


class NodeGroup:
    """One bundle of the placement group: its agent while it has one.

    Attributes:
        times: How often it has had one.
        why: What keeps it from having one.
    """

    def __init__(self, order: dict[str, Any], bundles: Any, node: int) -> None:
        self._order, self._bundles, self.node = order, bundles, node
        self.times = 0
        self.why = ""
        self._agent: Any = None
        self._facts: dict[str, Any] | None = None
        self._facts_asked: Any = None
        self._statuses: dict[str, int | None] = {}
        self._asked: Any = None
        self._answered_at = 0.0
        self._not_before = 0.0
        self._search = not order["tied"]

    def look(self) -> dict[str, Any]:
        """What is known of it now; never waits."""
        if self._search:
            self._find()
        if self._agent is None:
            if time.monotonic() >= self._not_before:
                self._place()
        elif self._facts is None:
            self._meet()
        else:
            self._hear()
        here = self._facts is not None
        return {
            "here": here, "times": self.times, "why": self.why, "facts": self._facts or {},
            "statuses": self._statuses, "settled": here or not self._agent,
        }  # fmt: skip

    def call(self, what: str, arguments: list[Any]) -> Any:
        """Have the agent do something.

        Raises:
            LookupError: There is none.
        """
        if self._agent is None or self._facts is None:
            raise LookupError(self.why or "its machine has gone")
        return ray.get(getattr(self._agent, what).remote(*arguments), timeout=CALL_S)

    def give_back(self) -> None:
        """End the agent and all that it has started."""
        if self._agent is not None:
            try:
                ray.get(self._agent.close.remote(), timeout=CLOSE_S)
            except Exception as error:  # it may be gone, and whatever it is, it shall go
                sys.stderr.write(f"node group {self.node}: {_line(error)}\n")
            ray.kill(self._agent)
            self._agent = None

    @property
    def _name(self) -> str:
        return f"{self._order['name']}/{self.node}"

    def _find(self) -> None:
        """The agent that an earlier bridge has left."""
        self._search = False
        try:
            self._agent = ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError:
            return
        self._facts_asked = self._agent.describe.remote()

    def _place(self) -> None:
        """Start an agent once the bundle has a living node."""
        table = ray.util.placement_group_table(self._bundles)
        node_id = table["bundles_to_node_id"].get(self.node)
        node = next((n for n in ray.nodes() if n["NodeID"] == node_id and n["Alive"]), None)
        if table["state"] != "CREATED" or node is None:
            self.why = f"the placement group is {table['state'].lower()}; the cluster has {resources_in_words()}"
            return
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._bundles, placement_group_bundle_index=self.node
        )
        lasting = {} if self._order["tied"] else {"name": self._name, "namespace": NAMESPACE, "lifetime": "detached"}
        remote = ray.remote(NodeAgent).options(
            num_cpus=self._order["cpus"], num_gpus=self._order["gpus"], scheduling_strategy=strategy, **lasting
        )
        try:
            self._agent = remote.remote(node["NodeManagerAddress"], node_id, self._order["keys"], self._order["sees"])
        except ValueError as error:  # the name of one that was lost is not free yet
            self._lose(_line(error))
            return
        self._facts_asked = self._agent.describe.remote()

    def _meet(self) -> None:
        facts = self._answer(self._facts_asked)
        if facts is None:
            return
        if not facts["sees"]:
            raise UnfitError(
                f"{facts['host']} ({facts['address']}) does not see {self._order['sees']}: all nodes need the run's "
                "output, models and text at the same paths"
            )
        self.times += 1
        self._facts, self.why = facts, ""
        self._statuses, self._asked, self._answered_at = {}, None, time.monotonic()
        self._hear(wait_s=CALL_S)

    def _hear(self, wait_s: float = 0.0) -> None:
        if self._asked is None:
            self._asked = self._agent.statuses.remote()
        found = self._answer(self._asked, wait_s)
        if found is not None:
            self._statuses, self._answered_at = found, time.monotonic()
            self._asked = None if self._agent is None else self._agent.statuses.remote()
        elif self._agent is not None and time.monotonic() - self._answered_at > SILENCE_S:
            ray.kill(self._agent)
            self._lose(f"its agent has not answered for {SILENCE_S:g} s")

    def _answer(self, asked: Any, wait_s: float = 0.0) -> Any:
        """What the agent has answered by now; None if nothing yet, or if it is lost."""
        if not ray.wait([asked], timeout=wait_s)[0]:
            return None
        try:
            return ray.get(asked)
        except ray.exceptions.RayError as error:
            self._lose(_line(error))
            return None

    def _lose(self, why: str) -> None:
        self._agent, self._facts, self._asked, self.why = None, None, None, why
        self._not_before = time.monotonic() + AGAIN_S


class Bridge:
    """All node groups of a run."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        self._bundles = self._placement_group()
        self._groups = [NodeGroup(order, self._bundles, node) for node in range(order["nodes"])]

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """A request's answer."""
        try:
            if request["call"] == "look":
                return {"result": [group.look() for group in self._groups]}
            if request["call"] == "give_back":
                self.give_back()
                return {"result": None}
            return {"result": self._groups[request["node"]].call(request["call"], request["arguments"])}
        except (LookupError, ray.exceptions.RayError) as error:
            return {"error": _line(error)}

    def give_back(self) -> None:
        """Leave nothing in the cluster."""
        for group in self._groups:
            group.give_back()
        ray.util.remove_placement_group(self._bundles)

    def _placement_group(self) -> Any:
        order, util = self._order, ray.util
        bundle = {"CPU": order["cpus"], **({"GPU": order["gpus"]} if order["gpus"] else {})}
        if not order["tied"]:
            try:
                return util.get_placement_group(order["name"])
            except ValueError:
                pass
        lasting = {} if order["tied"] else {"lifetime": "detached"}
        return util.placement_group(
            [bundle] * order["nodes"], strategy="STRICT_SPREAD", name=order["name"], **lasting
        )  # fmt: skip


def resources_in_words() -> str:
    """What the cluster's nodes have: `3 nodes with 8 CPUs, 1 with 4 CPUs and 2 GPUs`."""
    counted: dict[str, int] = {}
    for node in ray.nodes():
        if node["Alive"]:
            cpus, gpus = (node["Resources"].get(name, 0) for name in ("CPU", "GPU"))
            text = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
            counted[text] = counted.get(text, 0) + 1
    parts = [f"{count} node{'s' if count > 1 else ''} with {text}" for text, count in counted.items()]
    return ", ".join(parts) or "no living node"


def connected(order: dict[str, Any]) -> Bridge:
    """Join the cluster.

    Raises:
        Exception: There is none; Ray has many ways to say so.
    """
    global ray
    host, _, port = order["address"].rpartition(":")
    if host:  # Ray itself tries for minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
    ray = importlib.import_module("ray")
    importlib.import_module("ray.util.scheduling_strategies")
    ray.init(address=order["address"], namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    return Bridge(order)


def requests() -> Iterator[dict[str, Any]]:
    """What is asked, until the input ends."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Answer until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    asked = requests()
    order = next(asked)
    bridge: Bridge | None = None
    for request in asked:
        try:
            bridge = bridge or connected(order)
            say(bridge.answer(request))
        except Exception as error:  # whatever it is, it is the end of this process, and somebody waits
            said = "" if isinstance(error, UnfitError) else f"the Ray cluster at {order['address']} is not there: "
            say({"error": said + _line(error), "fatal": True})
            return
    if order["tied"] and bridge is not None:
        bridge.give_back()


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    main()
