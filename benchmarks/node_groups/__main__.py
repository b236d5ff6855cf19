"""Two node groups of one rank each beside one group of two ranks: `python -m benchmarks.node_groups`.

The groups are started by torchrun and by Ray, over NCCL with a GPU each, or over gloo with `--device cpu`. Small models
with random weights. In further runs a group's trainer, and then the whole group, gets SIGKILL in mid-run. Compares the
loss of every step with the one group's, checks that every position was trained once, and writes JSON after every run.
Ray binds more than loopback: run this by `tests/support/loopback.sh` unless the host has no other network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.node_groups.ray_nodes import RayNodes
from benchmarks.node_groups.torchrun import POLL_S, TorchrunGroups
from tests.support.tiny_run import TinyAssets, make_assets, steps_of, tiny_spec
from xtoken_core.atomic import atomic_write
from xtoken_core.config.spec import RunSpec
from xtoken_services.control.runs import Runs

RESULT = Path(__file__).parents[1] / "results" / "node_groups.json"
NODES = 2
LIMIT = 1e-3
ONE_HOST = {
    "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "RAY_worker_niceness": "0",
}  # fmt: skip
PARTS = ("one_group", "torchrun", "torchrun_trainer", "torchrun_group", "ray", "ray_trainer", "ray_group")
"""The runs; a name's end is what gets SIGKILL."""


class Harness:
    """All runs of the benchmark.

    Args:
        arguments: The command line.
        work: Directory for the models and the runs.
    """

    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self._arguments, self._work = arguments, work
        self._deadline = self._end = time.monotonic() + arguments.seconds
        self._assets: TinyAssets = make_assets(work / "assets", layers=2)
        self.reference: list[dict[str, Any]] = []

    def run(self, part: str) -> dict[str, Any]:
        """Run one part and return its result; an error is in the result."""
        launcher, _, victim = part.partition("_")
        began = time.monotonic()
        self._deadline = min(self._end, began + self._arguments.part_seconds)
        spec = self._spec(part, launcher)
        try:
            if launcher == "torchrun":
                how = self._by_torchrun(spec, part, victim)
            elif launcher == "ray":
                with RayNodes(NODES, gpus=self._arguments.device == "cuda") as cluster:
                    own = {"address": cluster.address, "wait_s": 120.0, "cpus": 5}
                    spec = RunSpec.model_validate({**spec.model_dump(), "ray": own})
                    how = self._supervised(spec, victim, cluster)
            else:
                how = self._supervised(spec, "", None)
        except Exception as error:  # the other parts are still worth running
            how = {"error": f"{type(error).__name__}: {error}"}
        lines = steps_of(spec.output)
        if part == "one_group":
            self.reference = lines
        return how | self._compared(spec, lines) | {"seconds": round(time.monotonic() - began, 1)}

    def _spec(self, part: str, launcher: str) -> RunSpec:
        """Return the run; all vocabulary columns are compared, since chosen ones would depend on micro-batches."""
        workers: dict[str, Any] = {"collators": 1, "device": self._arguments.device}
        workers |= {"ranks": NODES} if launcher == "one" else {"nodes": NODES}
        workers |= {"launcher": "ray"} if launcher == "ray" else {}
        return tiny_spec(
            self._assets, self._work / part, records=self._arguments.records, workers=workers,
            queue={"block_size": 2}, loss={"vocab_topk": None}, train={"checkpoint_every": 10},
        )  # fmt: skip

    def _by_torchrun(self, spec: RunSpec, part: str, victim: str) -> dict[str, Any]:
        groups = TorchrunGroups(spec, self._work / part / "processes")
        killed: dict[str, Any] = {"killed": None} if victim else {}
        try:
            while not groups.poll():
                self._check_time(part)
                if victim and not killed["killed"] and self._is_midway(spec):
                    killed = {"killed": f"node1-{victim}", "at_step": len(steps_of(spec.output))}
                    groups.kill(1, victim)
                time.sleep(POLL_S)
            return {"state": "completed", "restarts": groups.restarts} | killed
        finally:
            groups.close()

    def _supervised(self, spec: RunSpec, victim: str, cluster: RayNodes | None) -> dict[str, Any]:
        runs = Runs(None, tied=True)
        killed: dict[str, Any] = {"killed": None} if victim else {}
        try:
            run, reason = runs.start(spec)
            if run is None:
                raise RuntimeError(str(reason))
            while not run.over.wait(POLL_S):
                self._check_time(spec.output.parent.name)
                if victim and cluster is not None and not killed["killed"] and self._is_midway(spec):
                    workers = {worker.name: worker for worker in run.status().workers}
                    killed = {"killed": f"node1-{victim}", "at_step": len(steps_of(spec.output))}
                    if victim == "trainer":
                        psutil.Process(workers["node1-trainer-0"].pid).kill()
                    else:
                        cluster.replace(workers["node1-trainer-0"].where)
            restarts = {worker.name: worker.restarts for worker in run.status().workers}
            assert run.result is not None
            return {"state": str(run.result.state), "error": run.result.error, "restarts": restarts} | killed
        finally:
            runs.stop_all(now=True)
            runs.join()
            runs.close()

    def _is_midway(self, spec: RunSpec) -> bool:
        steps = self._arguments.records // spec.train.samples_per_step
        return steps // 4 <= len(steps_of(spec.output)) < steps

    def _check_time(self, part: str) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{part} is not done in its time: see --seconds and --part-seconds")

    def _compared(self, spec: RunSpec, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Compare the run's own files with the reference's."""
        summary = spec.output / "summary.json"
        pairs = list(zip(lines, self.reference, strict=False))
        deviations = {
            name: max((abs(own[name] - one[name]) / abs(one[name]) for own, one in pairs), default=None)
            for name in ("loss", "grad_norm")
        }
        return {
            "steps": len(lines),
            "expected_steps": -(-self._arguments.records // spec.train.samples_per_step),
            "ids_exact": sorted(i for line in lines for i in line["ids"]) == list(range(self._arguments.records)),
            "same_ids_in_every_step": all(sorted(own["ids"]) == sorted(one["ids"]) for own, one in pairs),
            "account": json.loads(summary.read_text()) if summary.exists() else None,
            "deviation": deviations,
            "losses": [line["loss"] for line in lines],
        }


def holds(result: dict[str, Any]) -> bool:
    """Return whether a run completed with exact ids and the reference's losses, after a kill if there was to be one."""
    if result.get("error") or result.get("state") != "completed" or result["steps"] != result["expected_steps"]:
        return False
    loss = result["deviation"]["loss"]
    if not (result["ids_exact"] and result["same_ids_in_every_step"] and loss is not None and loss <= LIMIT):
        return False
    restarts = sum(count for name, count in result["restarts"].items() if name.startswith("node1-trainer"))
    return "killed" not in result or (result["killed"] is not None and restarts > 0)


def machine() -> dict[str, Any]:
    """Return the hardware and the versions of a result file."""
    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
    if cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        versions["ray"] = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        versions["ray"] = "not installed"
    return {"device": names or platform.machine(), "backend": "nccl" if cuda else "gloo", "versions": versions}


def main(report: Callable[[str], None] = print) -> int:
    """Run all parts; return 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--work", type=Path, help="directory for models, runs and logs; a temporary one if left out")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--records", type=int, default=1600, help="of every run, in steps of 8")
    parser.add_argument("--seconds", type=float, default=1800.0, help="a part that is not done by then is given up")
    parser.add_argument("--part-seconds", type=float, default=300.0, help="likewise, of each part")
    arguments = parser.parse_args()
    os.environ.update(ONE_HOST)
    with tempfile.TemporaryDirectory(prefix="xtoken-nodes-") as temporary:
        harness = Harness(arguments, (arguments.work or Path(temporary)).absolute())
        results: dict[str, dict[str, Any]] = {}
        for part in ("one_group", *(part for part in arguments.parts if part != "one_group")):
            results[part] = harness.run(part)
            results[part]["holds"] = holds(results[part])
            known = {**machine(), "records": arguments.records, "limit": LIMIT, "parts": results}
            atomic_write(arguments.out, json.dumps(known, indent=1) + "\n")
            shown = {name: value for name, value in results[part].items() if name not in ("losses", "account")}
            report(f"{part}: {json.dumps(shown)}")
    return 0 if all(result["holds"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
