"""Two node groups of one rank each beside one group of two ranks: `python -m benchmarks.node_groups`.

The groups are started by this machine's launcher, by torchrun and by Ray, over NCCL with a GPU each, or over gloo with
`--device cpu`. Small models with random weights. In further runs a group's trainer, and then the whole group, gets
SIGKILL in mid-run. Compares the loss of every step with the one group's, checks that every position was trained once,
and writes JSON after every run.
Ray binds more than loopback: run this by `tests/support/loopback.sh` unless the host has no other network.

Node groups whose processes run without a supervisor: trainers by torchrun, all restarted if they fail.

A Ray cluster on this host: a head without resources, and a node per GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import torch

from benchmarks.harness import command_line, machine, write_result
from tests.support.tiny_run import TinyAssets, make_assets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.control.runs import Runs
from xtoken_services.supervisor.launchers.local import LOOPBACK, free_port

NODES = 2
LIMIT = 1e-3
ONE_HOST = {
    "NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "RAY_worker_niceness": "0",
}  # fmt: skip
PARTS = (
    "one_group", "local", "local_trainer", "local_group", "torchrun", "torchrun_trainer", "torchrun_group", "ray",
    "ray_trainer", "ray_group",
)  # fmt: skip
"""The runs; a name's end is what gets SIGKILL."""
ROOT = Path(__file__).parents[2]
RESTART_DELAY_S = 0.5
MAX_RESTARTS = 40
POLL_S = 0.05
CANNOT_HELP = 2
"""Exit status of a process that a restart cannot help."""
CPUS = 8
STORE_BYTES = 80 << 20


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
                with closing(RayNodes(NODES, gpus=self._arguments.device == "cuda")) as cluster:
                    own = {"address": cluster.address, "wait_s": 120.0}
                    spec = RunSpec.model_validate({**spec.model_dump(), "ray": own})
                    how = self._supervised(spec, victim, cluster)
            else:
                how = self._supervised(spec, victim if launcher == "local" else "", None)
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
        runs = Runs(self._work / "control", tied=True)
        killed: dict[str, Any] = {"killed": None} if victim else {}
        try:
            run, reason = runs.start(spec)
            if run is None:
                raise RuntimeError(str(reason))
            while not run.over.wait(POLL_S):
                self._check_time(spec.output.parent.name)
                if victim and not killed["killed"] and self._is_midway(spec):
                    workers = run.status().workers
                    killed = {"killed": f"node1-{victim}", "at_step": len(steps_of(spec.output))}
                    if cluster is not None and victim == "group":
                        cluster.replace(next(each.where for each in workers if each.name == "node1-trainer-0"))
                    else:
                        name = "node1-trainer-0" if victim == "trainer" else "node1-"
                        for pid in [each.pid for each in workers if each.name.startswith(name)]:
                            with suppress(psutil.NoSuchProcess):
                                psutil.Process(pid).kill()
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


def described() -> dict[str, Any]:
    """Return the hardware and the versions of a result file."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    ray = importlib.metadata.version("ray") if importlib.util.find_spec("ray") else None
    return {**machine(), "backend": "nccl" if nccl else "gloo", "nccl": nccl, "ray": ray}


def main(report: Callable[[str], None] = print) -> int:
    """Run all parts; return 1 if one does not hold."""
    parser = command_line(__doc__, "node_groups")
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
            known = {**described(), "records": arguments.records, "limit": LIMIT, "parts": results}
            write_result(arguments.out, known)
            shown = {name: value for name, value in results[part].items() if name not in ("losses", "account")}
            report(f"{part}: {json.dumps(shown)}")
    return 0 if all(result["holds"] for result in results.values()) else 1


@dataclass
class KeptProcess:
    """One process that is started again when it fails, as an init system would do it."""

    name: str
    command: Sequence[str]
    env: dict[str, str]
    log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    due: float = 0.0
    statuses: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True once it has exited with 0."""
        return self.process is None and self.statuses[-1:] == [0]

    def poll(self) -> None:
        """Start it, also again after a failure.

        Raises:
            RuntimeError: It has failed too often, or a restart cannot help.
        """
        if self.process is not None:
            status = self.process.poll()
            if status is None:
                return
            self.process, self.due = None, time.monotonic() + RESTART_DELAY_S
            self.statuses.append(status)
            if status == CANNOT_HELP or self.starts > MAX_RESTARTS:
                raise RuntimeError(f"{self.name} exited with {self.statuses}, see {self.log.name}")
        if not self.finished and time.monotonic() >= self.due:
            self.process = subprocess.Popen(
                self.command, env=self.env, cwd=ROOT, stdout=self.log, stderr=self.log, start_new_session=True
            )
            self.starts += 1

    def kill(self, *, only_children: bool = False) -> None:
        """Send SIGKILL to the process and everything that it has started, or to the latter only."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for each in [process, *process.children(recursive=True)][only_children:]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()


class TorchrunGroups:
    """The processes of all node groups of a run, one GPU each.

    Args:
        spec: The run.
        directory: Directory of the logs and of the queues' tokens.
    """

    def __init__(self, spec: RunSpec, directory: Path) -> None:
        directory.mkdir(parents=True)
        file = spec.output / "resolved.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(resolve_run(spec).model_dump_json(), encoding="utf-8")
        self.groups: list[dict[str, KeptProcess]] = []
        nodes, port = spec.workers.nodes, free_port(LOOPBACK)
        for node in range(nodes):
            address = [f"tcp://{LOOPBACK}:{free_port(LOOPBACK)}", "--token-file", str(directory / f"token-{node}")]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            if spec.workers.device == "cuda":
                env["CUDA_VISIBLE_DEVICES"] = str(node)
            program = [sys.executable, "-m", "xtoken_services.cli"]
            meeting = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", "1"]
            meeting += ["--master-addr", LOOPBACK, "--master-port", str(port), "--max-restarts", "0"]
            commands = {
                "queue": [*program, "queue", "--bind", *address, "--run", str(file), "--group", str(node)],
                "collator": [*program, "collator", "--queue", *address],
                "teacher": [*program, "teacher", "--queue", *address],
                "trainer": [
                    sys.executable, "-m", "torch.distributed.run", *meeting,
                    "-m", "xtoken_services.cli", "trainer", "--queue", *address,
                ],
            }  # fmt: skip
            group = {}
            for kind, command in commands.items():
                name = f"node{node}-{kind}"
                group[kind] = KeptProcess(name, command, env, (directory / f"{name}.log").open("wb"))
            self.groups.append(group)

    def poll(self) -> bool:
        """Start what has to be started; return whether all trainers have finished.

        Raises:
            RuntimeError: A process has failed too often.
        """
        for process in self._processes():
            process.poll()
        return all(group["trainer"].finished for group in self.groups)

    def kill(self, node: int, victim: str) -> None:
        """Send SIGKILL to a group's trainer, or to all of the group with the process that started the trainer."""
        if victim == "trainer":
            self.groups[node]["trainer"].kill(only_children=True)
        else:
            for process in self.groups[node].values():
                process.kill()

    @property
    def restarts(self) -> dict[str, int]:
        """Starts beyond the first, by process."""
        return {process.name: process.starts - 1 for process in self._processes()}

    def _processes(self) -> list[KeptProcess]:
        return [process for group in self.groups for process in group.values()]

    def close(self) -> None:
        """End what is left."""
        for process in self._processes():
            process.kill()
            if process.process is not None:
                process.process.wait()
            process.log.close()


class RayNodes:
    """The cluster.

    Args:
        nodes: Number of nodes beside the head.
        gpus: Whether node `n` has GPU `n`.
    """

    def __init__(self, nodes: int, *, gpus: bool) -> None:
        from ray.cluster_utils import Cluster

        self._gpus = gpus
        head = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = [self._add(number) for number in range(nodes)]
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        """Address of the head."""
        return str(self._cluster.address)

    def replace(self, used: str) -> str:
        """End a node without warning and add another one with its GPU.

        Args:
            used: Text with the ids of the nodes that the run uses, by their first 8 characters.

        Returns:
            The first 8 characters of the ended node's id.
        """
        number = max(number for number, node in enumerate(self._nodes) if node.node_id[:8] in used)
        ended = str(self._nodes[number].node_id)[:8]
        self._cluster.remove_node(self._nodes[number], allow_graceful=False)
        self._nodes[number] = self._add(number)
        return ended

    def _add(self, number: int) -> Any:
        sees = {"env_vars": {"CUDA_VISIBLE_DEVICES": str(number)}} if self._gpus else {}
        return self._cluster.add_node(num_cpus=CPUS, num_gpus=int(self._gpus), object_store_memory=STORE_BYTES, **sees)

    def close(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
