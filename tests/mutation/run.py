"""Run each package's tests on mutants of it and write which are noticed.

    python -m tests.mutation.run [--packages plan wire] [--count 100] [--seed 1] [--jobs 2] [--out FILE]

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
import queue
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

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
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        else:
            shutil.copy2(source, folder / name)
    shutil.copytree(ROOT / "benchmarks" / "results", folder / "benchmarks" / "results", dirs_exist_ok=True)
    compileall.compile_dir(folder, quiet=2, workers=1)
    return folder


def run_tests(folder: Path, tests: tuple[str, ...], plugin: object, limit_s: float) -> tuple[str, float]:
    """Run tests in a fork; returns `passed`, `failed` or `timeout`, and the CPU seconds it took.

    Args:
        folder: Root of the copied tree.
        tests: Files and folders.
        plugin: A pytest plugin.
        limit_s: CPU seconds; a fork that waits for something is ended after `WAITING_S` of the clock.
    """
    began = time.monotonic()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
        _run_in_child(folder, tests, plugin)
    try:
        while time.monotonic() - began < WAITING_S:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                seconds = usage.ru_utime + usage.ru_stime
                if os.WIFSIGNALED(status) and seconds >= limit_s:
                    return "timeout", seconds
                return "passed" if status == 0 else "failed", seconds
            time.sleep(0.05)
        return "timeout", limit_s
    finally:
        _end_group(child)


def _run_in_child(folder: Path, tests: tuple[str, ...], plugin: object) -> None:
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    os.environ["PYTHONPATH"] = str(folder)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "xtoken_core", "services")]:
        del sys.modules[name]
    silent = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silent, descriptor)
    status = 70
    try:
        import pytest
        from hypothesis import Phase, settings

        # A failure is all that counts: a smaller example of it is not searched for.
        settings.register_profile("mutants", database=None, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
        status = int(pytest.main([*options, *tests], plugins=[plugin]))
    finally:
        os._exit(status)


def _end_group(leader: int) -> None:
    """End what a test run has left; its leader may be gone already."""
    for step in (lambda: os.killpg(leader, signal.SIGKILL), lambda: os.waitpid(leader, 0)):
        with contextlib.suppress(ProcessLookupError, ChildProcessError, PermissionError):
            step()


def run_mutant(folder: Path, mutant: Mutant, tests: tuple[str, ...], calls: Calls, limit_s: float) -> str:
    """Run the tests on one mutant, those that call the mutated function first."""
    file = folder / mutant.path
    original = file.read_text(encoding="utf-8")
    first = callers(calls, mutant.path, original, mutant.line)
    file.write_text(mutant.source, encoding="utf-8")
    try:
        return run_tests(folder, tests, Reorder(first), limit_s)[0]
    finally:
        file.write_text(original, encoding="utf-8")


def run_mutants(name: str, mutants: Sequence[Mutant], jobs: int) -> dict[Mutant, str]:
    """Run a package's tests on mutants; returns the outcome of each.

    Raises:
        RuntimeError: The tests fail without a mutant.
    """
    package = PACKAGES[name]
    waiting: queue.Queue[Mutant] = queue.Queue()
    for mutant in mutants:
        waiting.put(mutant)
    results: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as top:
        folders = [workspace(Path(top) / str(number)) for number in range(jobs)]
        record = Path(top) / "calls.json"
        outcome, seconds = run_tests(folders[0], package.tests, CallRecorder(folders[0], package.paths, record), 1800.0)
        if outcome != "passed":
            raise RuntimeError(f"{name}: its tests do not pass without a mutant: run pytest {' '.join(package.tests)}")
        calls: Calls = json.loads(record.read_text(encoding="utf-8"))
        limit_s = max(SLOWEST_S, 2 * seconds)
        print(f"{name}: {len(mutants)} mutants, {seconds:.0f} CPU s for a whole run of its tests", flush=True)

        def work(folder: Path) -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    mutant = waiting.get_nowait()
                    results[mutant] = run_mutant(folder, mutant, package.tests, calls, limit_s)
                    print(f"{results[mutant]:8} {mutant.path}:{mutant.line} {mutant.after!r:.90}", flush=True)

        threads = [threading.Thread(target=work, args=(folder,)) for folder in folders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def run_package(name: str, count: int, seed: int, jobs: int, earlier: dict[str, Any]) -> dict[str, Any]:
    """Draw a package's mutants and run its tests on each.

    Args:
        name: The package.
        count: Number of mutants.
        seed: Seed of the draw.
        jobs: Test runs at a time.
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
    results = dict.fromkeys(mutants, "failed") | run_mutants(name, again, jobs)
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
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in PRELOADED:
        import_module(name)
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    for name in arguments.packages:
        found = run_package(name, arguments.count, arguments.seed, arguments.jobs, report.get(name, {}))
        report[name] = {"commit": commit.stdout.strip(), **found}
        arguments.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        print(f"{name}: {report[name]['noticed']:.1%} noticed", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
