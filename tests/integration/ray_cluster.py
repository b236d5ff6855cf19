"""Ray on several nodes of this machine, and a run there: `loopback.sh python -m tests.integration.ray_cluster NAME`.

Ray binds wildcard addresses whatever it is told, so this is for a network namespace with nothing but loopback. What the
run does, and what is done to its cluster, is the scenario's; what came of it is printed as one line of JSON.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from tests.support.tiny_run import make_assets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_services.control.runs import Runs
from xtoken_services.supervisor.run import Run

CPUS = 8
STORE_BYTES = 80 << 20
DEADLINE_S = 900.0


class ThreeNodes:
    """A cluster, and a run on it."""

    def __init__(self, directory: Path, *, nodes: int, wait_s: float, records: int, kept: bool = False) -> None:
        sizes = {"num_cpus": CPUS, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=sizes)
        self.workers = [
            self.cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES) for _ in range(2)
        ]  # the third is the head
        self.cluster.wait_for_nodes()
        assets = make_assets(directory / "assets")
        self.spec: RunSpec = tiny_spec(
            assets, directory, records=records,
            train={"samples_per_step": 12, "checkpoint_every": 4}, queue={"block_size": 2},
            workers={"launcher": "ray", "nodes": nodes, "collators": 1, "max_restarts": 3},
            ray={"address": self.cluster.address, "wait_s": wait_s},
        )  # fmt: skip
        atexit.register(self.cluster.shutdown)
        self.runs = Runs(directory / "runs", tied=not kept)
        found, _ = self.runs.start(self.spec)
        assert found is not None
        self.run: Run = found

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it; fails if the run ends before, or never comes to it."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if self.run.over.is_set():
                raise AssertionError(f"the run ended before: {self.run.result}")
            assert time.monotonic() < deadline, f"it never came: {self.run.status()}"
            time.sleep(0.1)

    def remove_used_node(self) -> str:
        """End a node that has processes of the run, without warning, but not the head; how Ray's name of it begins."""
        used = " ".join(worker.where for worker in self.run.status().workers)
        victim = next(node for node in self.workers if node.node_id[:8] in used)
        self.cluster.remove_node(victim, allow_graceful=False)
        return str(victim.node_id)[:8]

    def next_control_plane(self) -> None:
        """Leave the run to itself, and have another control plane find it."""
        self.runs.detach_all()
        self.runs.join()
        self.runs.close()
        self.runs = Runs(self.runs.directory)
        found = self.runs.get(self.run.id)
        assert found is not None
        self.run = found

    def end(self) -> dict[str, Any]:
        """Wait for the run's end and let the cluster go; what came of it."""
        over = self.run.over.wait(DEADLINE_S)
        ending, status = self.run.result, self.run.status()
        self.runs.stop_all(now=True)
        self.runs.join()
        self.runs.close()
        left = [command for command in map(command_of, psutil.process_iter()) if command]
        self.cluster.shutdown()
        lines = steps_of(self.spec.output)
        return {
            "over": over,
            "state": ending.state if ending else None,
            "error": ending.error if ending else "",
            "where": {w.name: w.where for w in status.workers},
            "restarts": {w.name: w.restarts for w in status.workers},
            "ids": [i for line in lines for i in line["ids"]],
            "left": left,
            "log": (self.spec.output / "logs" / "ray.log").read_text()[-2000:],
        }


def command_of(process: psutil.Process) -> str:
    """The command of a worker in this network namespace; empty for every other process."""
    try:
        here = Path(f"/proc/{process.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()
        command = " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""
    return command if here and ("xtoken_services.cli" in command or command.startswith("xtoken ")) else ""


def completes(directory: Path) -> dict[str, Any]:
    """A run over all three nodes."""
    three = ThreeNodes(directory, nodes=3, wait_s=120.0, records=60)
    return three.end()


def replaced(directory: Path) -> dict[str, Any]:
    """A run over two nodes loses one; the third is free."""
    three = ThreeNodes(directory, nodes=2, wait_s=300.0, records=600)
    three.until(lambda: len(steps_of(three.spec.output)) >= 4)
    removed = three.remove_used_node()
    return three.end() | {"removed": removed}


def reported(directory: Path) -> dict[str, Any]:
    """A run over three nodes loses one; there is no other."""
    three = ThreeNodes(directory, nodes=3, wait_s=30.0, records=12_000)
    three.until(lambda: len(steps_of(three.spec.output)) >= 2)
    removed = three.remove_used_node()
    return three.end() | {"removed": removed}


def adopted(directory: Path) -> dict[str, Any]:
    """A run over two nodes is found again by the next control plane."""
    three = ThreeNodes(directory, nodes=2, wait_s=120.0, records=240, kept=True)
    three.until(lambda: len(steps_of(three.spec.output)) >= 2)
    three.next_control_plane()
    return three.end()


SCENARIOS = {scenario.__name__: scenario for scenario in (completes, replaced, reported, adopted)}


def main() -> None:
    """Run the scenario that the command names, in a directory of its own."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    place = Path(tempfile.gettempdir())
    result = SCENARIOS[sys.argv[1]](place)
    result["private"] = [path.name for path in place.glob("xtoken-*")]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
