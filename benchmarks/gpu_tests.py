"""Runs the `gpu` tests of ops, losses and the teacher's signal here and writes what came of them and a hash.

    python -m benchmarks.gpu_tests [--out benchmarks/results/gpu_tests.json]

The hash is of the kernels' sources: a result is only worth something for the sources it was seen with, and a test on
the CPU fails once they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_tests.json"
TESTS = (
    "tests/ops",
    "tests/unit/losses",
    "tests/unit/teacher",
    "tests/unit/test_completions.py",
    "tests/integration/test_signals.py",
)
KERNEL_FILES = ("kernels.py", "triton.py", "launch.py", "triton_support.py")
"""How the names of the files end that kernels and their launches are written in."""


def kernel_hash() -> str:
    """SHA-256 of every file that kernels or their launches are written in, by path."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "xtoken_core" / "ops").rglob("*.py")):
        if path.name.endswith(KERNEL_FILES):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def outcomes(junit: Path) -> dict[str, str]:
    """`file::test[id]` -> passed, skipped or failed."""
    found = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"] = outcome
    return found


def belongs_to(test: str, op: str, backend: str) -> bool:
    """Whether `file::test[id]` holds a backend to its op's contract: by the id, or in a file of the op's own."""
    file, _, name = test.partition("::")
    _, _, label = name.partition("[")
    parts = label.rstrip("]").split("-")
    by_label = label.startswith(f"{op}-") and f"-{backend}-cuda" in label
    return by_label or (file == f"test_{op}" and "cuda" in parts and backend in parts)


def backend_passes(report: dict, op: str, backend: str) -> bool:
    """Whether a backend's tests all passed, with the kernels as they are now."""
    own = [outcome for name, outcome in report["tests"].items() if belongs_to(name, op, backend)]
    return report["kernel_hash"] == kernel_hash() and "passed" in own and "failed" not in own


def main() -> int:
    """Run, count, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    import torch
    import triton

    if not torch.cuda.is_available():
        print("benchmarks/gpu_tests.py needs a CUDA GPU: torch sees none", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={junit}", *TESTS]
        subprocess.run(command, cwd=ROOT, check=False)
        tests = outcomes(junit)
    counts = Counter(tests.values())
    report = {
        **{outcome: counts[outcome] for outcome in ("passed", "skipped", "failed")},
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "paths": TESTS,
        "kernel_hash": kernel_hash(),
        "tests": dict(sorted(tests.items())),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
