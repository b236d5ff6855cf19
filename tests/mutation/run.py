"""Run each package's tests on mutants of it and write which are noticed.

    python -m tests.mutation.run [--packages plan wire] [--count 100] [--seed 1] [--out FILE]

A mutant that cannot be told from the original is listed in `equivalent.toml` with the reason and not counted. The
result file names every survivor. A package that the result file holds is run again only where it was mutated otherwise
or where a mutant was not noticed.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.forked import ForkedRuns
from tests.mutation.mutants import Mutant, draw
from tests.mutation.selection import CallRecorder, Calls, Reorder, callers

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "mutation" / "results.json"
EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.toml"
COPIED = ("xtoken_core", "services", "tests", "proto", "docs", "deploy", "benchmarks", "experiments", "pyproject.toml")
PRELOADED = (
    "beartype", "hypothesis", "jaxtyping", "msgspec", "numpy", "pydantic", "pytest", "tensordict", "tokenizers",
    "torch", "transformers", "zmq",
)  # fmt: skip
"""Imported once; each mutant's tests start in a fork of this process."""
SLOWEST_S = 10.0
"""CPU seconds that every mutant may take."""
WAITING_S = 1800.0
"""Seconds of the clock after which a run of tests is ended that waits for something."""


class Package(NamedTuple):
    """A package to mutate and the tests that should notice."""

    paths: tuple[str, ...]
    tests: tuple[str, ...]


PACKAGES = {
    "alignment": Package(("xtoken_core/alignment",), ("tests/unit/alignment", "tests/unit/test_collate.py")),
    "losses": Package(
        ("xtoken_core/losses",), ("tests/unit/losses", "tests/ops/test_losses_from_hidden_states.py")
    ),
    "plan": Package(("xtoken_core/plan.py",), ("tests/unit/test_plan.py",)),
    "projection": Package(
        ("xtoken_core/projection",), ("tests/unit/projection", "tests/unit/losses/test_utilities.py")
    ),
    "queue": Package(
        ("xtoken_core/queue",),
        (
            "tests/unit/queue", "tests/contract/test_tasks.py", "tests/contract/test_samples.py",
            "tests/contract/test_sessions.py", "tests/contract/test_run_calls.py",
            "tests/contract/test_signal_columns.py", "tests/contract/test_unfinished.py",
            "tests/contract/test_stateful.py", "tests/contract/test_stateful_run.py",
        ),
    ),
    "wire": Package(
        ("xtoken_core/wire",),
        (
            "tests/contract/test_columns.py", "tests/contract/test_golden.py", "tests/unit/data_plane",
            "tests/contract/test_samples.py", "tests/contract/test_security.py",
        ),
    ),
}  # fmt: skip


def source_hash(paths: Sequence[str]) -> str:
    """Return the SHA-256 of files and of what folders hold."""
    digest = hashlib.sha256()
    for path in paths:
        whole = ROOT / path
        for file in [whole] if whole.is_file() else sorted(whole.rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def workspace(folder: Path) -> Path:
    """Copy what the tests read, and compile it."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("results"))
        else:
            shutil.copy2(source, folder / name)
    shutil.copytree(ROOT / "benchmarks" / "results", folder / "benchmarks" / "results", dirs_exist_ok=True)
    for name in ("xtoken_core", "tests"):
        compileall.compile_dir(folder / name, quiet=2, workers=1)
    return folder


def run_in_fork(action: Callable[[], int], limit_s: float) -> tuple[str, float]:
    """Run an action in a fork; returns `passed` (it returned 0), `failed` or `timeout`, and the CPU seconds it took.

    Args:
        action: What to run.
        limit_s: CPU seconds; a fork that waits for something is ended after `WAITING_S` of the clock.
    """
    began = time.monotonic()
    child = os.fork()
    if not child:
        status = 70
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
            silent = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(silent, descriptor)
            status = action()
        finally:
            os._exit(status)
    try:
        while time.monotonic() - began < WAITING_S:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                seconds = usage.ru_utime + usage.ru_stime
                if os.WIFSIGNALED(status) and seconds >= limit_s:
                    return "timeout", seconds
                return "passed" if status == 0 else "failed", seconds
            time.sleep(0.01)
        return "timeout", limit_s
    finally:
        _end_group(child)


def _end_group(leader: int) -> None:
    """End what a test run has left; its leader may be gone already."""
    for step in (lambda: os.killpg(leader, signal.SIGKILL), lambda: os.waitpid(leader, 0)):
        with contextlib.suppress(ProcessLookupError, ChildProcessError, PermissionError):
            step()


def run_tests(folder: Path, tests: tuple[str, ...], plugin: object) -> int:
    """Run the tests of a copied tree with a pytest plugin, in a process that runs nothing else."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "xtoken_core", "services")]:
        del sys.modules[name]
    import pytest
    from hypothesis import Phase, settings

    # A failure is all that counts: a smaller example of it is not searched for.
    settings.register_profile("mutants", database=None, phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
    options = ["-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*options, "--hypothesis-seed=0", *tests], plugins=[plugin]))


def run_mutants(name: str, mutants: Sequence[Mutant]) -> dict[Mutant, str]:
    """Run a package's tests on mutants; returns the outcome of each.

    Raises:
        RuntimeError: The tests fail without a mutant.
    """
    package = PACKAGES[name]
    results: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        folder, record, out = workspace(Path(top) / "tree"), Path(top) / "calls.json", Path(top) / "noticed.json"
        out.write_text("[]")
        print(f"{name}: {len(mutants)} mutants", flush=True)
        recorder = CallRecorder(folder, package.paths, record)
        forked = ForkedRuns(folder, recorder, record, mutants, out, run_in_fork)
        run_in_fork(lambda: run_tests(folder, package.tests, forked), 36000.0)
        if not record.exists():
            raise RuntimeError(f"{name}: its tests do not pass without a mutant: run pytest {' '.join(package.tests)}")
        calls: Calls = json.loads(record.read_text(encoding="utf-8"))
        noticed = set(json.loads(out.read_text(encoding="utf-8")))
        limit_s = max(SLOWEST_S, 2 * sum(seconds for seconds, _ in calls.values()))
        for number, mutant in enumerate(mutants):
            results[mutant] = (
                "failed" if number in noticed else run_mutant(folder, mutant, package.tests, calls, limit_s)
            )
            print(f"{results[mutant]:8} {mutant.path}:{mutant.line} {mutant.after!r:.90}", flush=True)
    return results


def run_mutant(folder: Path, mutant: Mutant, tests: tuple[str, ...], calls: Calls, limit_s: float) -> str:
    """Run the tests on one mutant in a process of its own, those that call the mutated function first."""
    file = folder / mutant.path
    original = file.read_text(encoding="utf-8")
    first = Reorder(callers(calls, mutant.path, original, mutant.line))
    file.write_text(mutant.source, encoding="utf-8")
    try:
        return run_in_fork(lambda: run_tests(folder, tests, first), limit_s)[0]
    finally:
        file.write_text(original, encoding="utf-8")


def run_package(name: str, count: int, seed: int, earlier: dict[str, Any]) -> dict[str, Any]:
    """Draw a package's mutants and run its tests on each.

    Args:
        name: The package.
        count: Number of mutants.
        seed: Seed of the draw.
        earlier: What the result file has. If that is of the same mutants and tests have been added since, only those
            that were not noticed are run again.
    """
    package = PACKAGES[name]
    mutants = draw(ROOT, package.paths, count, seed)
    drawn = {"seed": seed, "mutants": len(mutants), "mutated": source_hash(package.paths)}
    again = mutants
    if {field: earlier.get(field) for field in drawn} == drawn:
        unnoticed = {entry["change"] for entry in earlier["survivors"]} | set(earlier["equivalent"])
        again = [mutant for mutant in mutants if mutant.key in unnoticed]
    results = dict.fromkeys(mutants, "failed") | run_mutants(name, again)
    reasons = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get(name, {}) if EQUIVALENT.exists() else {}
    survivors = [mutant for mutant in mutants if results[mutant] == "passed"]
    counted = [mutant for mutant in survivors if mutant.key not in reasons]
    total = len(mutants) - (len(survivors) - len(counted))
    return drawn | {
        "tests": source_hash(package.tests),
        "outcomes": dict(Counter("survived" if outcome == "passed" else "noticed" for outcome in results.values())),
        "equivalent": [mutant.key for mutant in survivors if mutant.key in reasons],
        "survivors": [{"line": mutant.line, "change": mutant.key} for mutant in counted],
        "noticed": round((total - len(counted)) / total, 4),
    }


def main() -> int:
    """Run the packages that are asked for and add them to the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in PRELOADED:
        import_module(name)
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.packages:
        found = run_package(name, arguments.count, arguments.seed, report.get(name, {}))
        report[name] = found
        arguments.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        print(f"{name}: {report[name]['noticed']:.1%} noticed", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
