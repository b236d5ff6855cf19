"""Run the `gpu` tests of ops, losses, signals and whole runs; write the outcomes and the hash of the kernels.

    python -m benchmarks.gpu_tests [--parts ops memory runs two_gpus] [--out benchmarks/results/gpu_tests.json]

Without `--parts` everything runs that the machine has GPUs for. A part of its own is added to what the result file
holds of the same sources, GPU and versions; of other ones nothing is kept.

The hash is of the kernels' computation (`benchmarks.kernel_hash`): a result is valid only for the kernels it was
measured with, and a test on the CPU fails once they differ.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness import command_line, write_result
from benchmarks.kernel_hash import kernel_hash

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_tests.json"
SIDE_BY_SIDE = (
    "tests/ops",
    "tests/unit/chain",
    "tests/unit/losses",
    "tests/unit/common/processes/test_event_callbacks.py",
    "tests/unit/common/models/test_packed_attention.py",
)
"""Tests that share a GPU; where pytest-xdist is installed, several run at a time."""
ALONE = (
    "tests/unit/common/generation",
    "tests/unit/teacher",
    "tests/unit/trainer",
    "tests/unit/common/run/test_memory_estimate.py",
    "tests/unit/control/test_gpus.py",
    "tests/unit/data_plane/test_codec.py",
    "tests/unit/rollout",
    "tests/contract/test_samples.py",
)
"""Tests that compare the GPU's memory before and after, and others that are few."""
WHOLE_RUNS = (
    "tests/integration/test_rollouts.py",
    "tests/integration/test_signals.py",
    "tests/integration/test_store.py",
    "tests/integration/test_training.py",
    "tests/integration/test_worker_kills.py",
)
"""Tests that start whole runs, each alone on its GPU too."""
TWO_GPUS = "another_gpu or share_a_student or is_divided"
"""Of those, the ones that need two, as pytest's `-k` has it."""
PARTS = ("ops", "memory", "runs", "two_gpus")
MOST_AT_A_TIME = 6
LOSS_TESTS = "test_losses_on_backends::"


def outcomes(junit: Path) -> dict[str, str]:
    """Return passed, skipped or failed for each `file::test[id]`."""
    found = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"] = outcome
    return found


def machine() -> dict[str, str | None]:
    """Return the GPU and the versions that every result file names."""
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def belongs_to(test: str, op: str, backend: str) -> bool:
    """Return whether `file::test[id]` tests a backend of an op, by its id or by its file.

    A test of the op's own file that names no backend counts for each of them.
    """
    file, _, name = test.partition("::")
    function, _, label = name.partition("[")
    label = label.rstrip("]")
    if label.startswith(f"{op}-"):
        return f"-{backend}-cuda" in label
    if file == f"test_{op}":
        return not ({"reference", "triton"} - {backend}) & set(label.split("-"))
    named = function == f"test_{op}" or function.startswith(f"test_{op}_at_")
    return file == "test_several_blocks" and backend == "triton" and named


def backend_passes(report: dict, op: str, backend: str) -> bool:
    """Return whether a backend's tests all passed, with the kernels as they are now."""
    return passed(report, lambda name: belongs_to(name, op, backend))


def losses_pass(report: dict, backend: str) -> bool:
    """Return whether the loss vectors passed with every op on a backend, with the kernels as they are now."""
    return passed(report, lambda name: name.startswith(LOSS_TESTS) and name.endswith(f"-{backend}]"))


def passed(report: dict, wanted: Callable[[str], bool]) -> bool:
    """Return whether the wanted tests all passed, with the kernels as they are now."""
    own = [outcome for name, outcome in report["tests"].items() if wanted(name)]
    return report["kernel_hash"] == kernel_hash() and "passed" in own and "failed" not in own


def _at_a_time() -> int:
    """Return the number of tests that may run at once: 1 without pytest-xdist."""
    cores = len(os.sched_getaffinity(0))
    return min(MOST_AT_A_TIME, cores // 2) if find_spec("xdist") else 1


def run_part(part: str, folder: Path) -> dict[str, str]:
    """Run one of `PARTS` and return its outcomes; `folder` takes pytest's report."""
    paths = {"ops": SIDE_BY_SIDE, "memory": ALONE}.get(part, WHOLE_RUNS)
    chosen = {"runs": ["-k", f"not ({TWO_GPUS})"], "two_gpus": ["-k", TWO_GPUS]}.get(part, [])
    at_a_time = _at_a_time() if part == "ops" else 1
    workers = ["-n", str(at_a_time), "--dist", "worksteal"] if at_a_time > 1 else []
    junit = folder / f"{part}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}", *chosen, *workers, *paths]
    subprocess.run(command, cwd=ROOT, check=False)
    return outcomes(junit)


def joined(before: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the tests that an earlier one has besides, if sources, GPU and versions are the same."""
    merged = ("parts", "tests", "passed", "skipped", "failed")
    of_what = {name: value for name, value in report.items() if name not in merged}
    if of_what != {name: value for name, value in before.items() if name not in merged}:
        before = {}
    tests = {**before.get("tests", {}), **report["tests"]}
    counts = Counter(tests.values())
    return {
        **{outcome: counts[outcome] for outcome in ("passed", "skipped", "failed")},
        **of_what,
        "parts": [part for part in PARTS if part in (*before.get("parts", ()), *report["parts"])],
        "tests": dict(sorted(tests.items())),
    }


def main() -> int:
    """Run, count, write."""
    parser = command_line(__doc__, "gpu_tests")
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU: torch sees none")
    parts = arguments.parts or [part for part in PARTS if part != "two_gpus" or torch.cuda.device_count() > 1]
    report = json.loads(arguments.out.read_text()) if arguments.parts and arguments.out.exists() else {}
    seen: Counter[str] = Counter()
    for part in parts:  # each is kept as soon as it is done
        with tempfile.TemporaryDirectory() as folder:
            tests = run_part(part, Path(folder))
        seen.update(tests.values())
        report = joined(report, {**machine(), "kernel_hash": kernel_hash(), "parts": [part], "tests": tests})
        write_result(arguments.out, report)
    return 1 if seen["failed"] or not seen["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
