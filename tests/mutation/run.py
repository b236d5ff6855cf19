"""Run each package's tests on mutants of it and write which are noticed.

    python -m tests.mutation.run [--packages plan wire] [--jobs N] [--seconds S] [--count 100] [--seed 1] [--out FILE]
    python -m tests.mutation.run --since COMMIT [--without PATTERN ...] [--jobs N] [--seconds S] [...]

A mutant that cannot be told from the original, changes cost only or is read by GPU code alone is listed in
`equivalent.toml` with the reason and not counted. The result file names every survivor. It is written as the work
proceeds, and a later call resumes from it: a package that is complete is run again only if its source has changed, or,
on the mutants that were not noticed, if its tests have. With `--seconds` the call ends after that time; its exit status
is 3 if there is more to do. A mutant is noticed by a test that fails with it, fails with it again and passes without
it.

With `--since` the mutants are drawn from all product lines that have changed since a commit, and each is run on the
unit, contract and operator tests that concern its file: that call a function of it, or import its module or package.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.forked import ForkedRuns
from tests.mutation.mutants import Mutant, draw
from tests.mutation.plugins import AbsentPackages, Limits
from tests.mutation.pool import CURRENT, Pool, Slots, fork
from tests.mutation.progress import NOTICED, SURVIVED, UNNOTICED, Event, Events, Progress, fold
from tests.mutation.selection import CallRecorder, Calls, Only, candidates, concerning, file_of, function_around
from tests.mutation.trials import Trials
from xtoken_core.atomic import atomic_write

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "mutation" / "results.json"
EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.toml"
PRODUCT = ("services", "xtoken", "xtoken_core")
COPIED = (*PRODUCT, "tests", "proto", "docs", "deploy", "benchmarks", "experiments", "pyproject.toml")
PRELOADED = (
    "beartype", "hypothesis", "jaxtyping", "msgspec", "numpy", "pydantic", "pytest", "tensordict", "tokenizers",
    "torch", "transformers", "zmq",
)  # fmt: skip
"""Imported once; each mutant's tests start in a fork of this process."""

NO_TESTS_COLLECTED = 5
"""Exit status of pytest."""

WRITTEN_EVERY_S = 3.0


class Package(NamedTuple):
    """A package to mutate and the tests that should notice.

    Attributes:
        paths: Files and folders.
        tests: Files and folders.
        lines: By file, the lines to mutate; None for all.
    """

    paths: tuple[str, ...]
    tests: tuple[str, ...]
    lines: Mapping[str, Collection[int]] | None = None


PACKAGES = {
    "alignment": Package(("xtoken_core/alignment",), ("tests/unit/alignment", "tests/unit/core/test_collate.py")),
    "losses": Package(
        ("xtoken_core/losses",),
        ("tests/unit/losses", "tests/unit/chain", "tests/ops/test_losses_from_hidden_states.py"),
    ),
    "plan": Package(("xtoken_core/plan.py",), ("tests/unit/core/test_plan.py",)),
    "projection": Package(
        ("xtoken_core/projection",),
        ("tests/unit/projection", "tests/unit/common/tables/test_pair_files.py", "tests/unit/losses/test_utilities.py"),
    ),
    "queue": Package(
        ("xtoken_core/queue",),
        (
            "tests/unit/queue", "tests/contract/test_tasks.py", "tests/contract/test_samples.py",
            "tests/contract/test_sessions.py", "tests/contract/test_run_calls.py",
            "tests/contract/test_signal_columns.py", "tests/contract/test_unfinished.py",
            "tests/contract/test_stateful.py", "tests/contract/test_stateful_run.py", "tests/contract/test_budget.py",
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


TESTS_OF_CHANGES = (
    *(f"tests/unit/{name}" for name in (
        "alignment", "api", "chain", "cli", "common", "config", "control", "core", "data_plane", "dataset", "demo",
        "losses", "projection", "queue", "rollout", "supervisor", "teacher", "teacher_store", "trainer",
    )),
    "tests/contract", "tests/ops",
)  # fmt: skip
STARTS_THREADS = "tests/unit/control/test_openapi.py"
"""Starts threads when it is imported, which the forks lack."""


def changed_since(root: Path, commit: str, without: Sequence[str]) -> Package:
    """Return the product lines that differ from a commit's, as a package.

    Args:
        root: Root of the tree.
        commit: The commit.
        without: Patterns of paths to leave out.
    """
    command = ["git", "diff", "--unified=0", "--find-renames", "--no-color", "--no-ext-diff", commit, "--", *PRODUCT]
    diff = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    lines: dict[str, set[int]] = {}
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line[4:].removeprefix("b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(path, set()).update(range(first, first + count))
    chosen = {p: n for p, n in lines.items() if p.endswith(".py") and n and not any(fnmatch(p, w) for w in without)}
    return Package(tuple(sorted(chosen)), TESTS_OF_CHANGES, chosen)


def source_hash(root: Path, paths: Sequence[str]) -> str:
    """Return the SHA-256 of files and of what folders hold."""
    digest = hashlib.sha256()
    for path in paths:
        whole = root / path
        for file in [whole] if whole.is_file() else sorted(whole.rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def workspace(root: Path, folder: Path) -> Path:
    """Copy what the tests read, and compile it."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name)
        elif source.exists():
            folder.mkdir(exist_ok=True)
            shutil.copy2(source, folder / name)
    compileall.compile_dir(folder, quiet=2, workers=1)
    return folder


def run_tests(folder: Path, tests: Sequence[str], plugins: Sequence[object], *options: str) -> int:
    """Run tests of a copied tree with pytest plugins, in a process that runs nothing else."""
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder / "services")]
    sys.dont_write_bytecode = True
    # Processes that the tests start read the copy, and packages where this process has them.
    others = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and not Path(path).is_relative_to(ROOT)
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder / "services"), *others])
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    own = ("tests", "xtoken", "xtoken_core", "xtoken_services")
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    # A failure is all that counts: a smaller example of it is not searched for.
    slow = list(HealthCheck)  # a busy machine is no failure
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", database=None, phases=phases, deadline=None, suppress_health_check=slow)
    settings.load_profile("mutants")
    quiet = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
    quiet += [f"--ignore={STARTS_THREADS}"]
    return int(pytest.main([*quiet, *options, *tests], plugins=list(plugins)))


@dataclass(frozen=True)
class Work:
    """A package's mutants and what is known of them.

    Attributes:
        name: The package.
        root: Root of the tree.
        package: Its paths and tests.
        drawn: What identifies the mutants: seed, number, hash of the source.
        mutants: The mutants.
        events: What was done and is done.
    """

    name: str
    root: Path
    package: Package
    drawn: dict[str, Any]
    mutants: list[Mutant]
    events: Events

    def waiting(self, progress: Progress) -> list[int]:
        """Return the numbers of the mutants whose outcome is not final."""
        return [n for n in range(len(self.mutants)) if progress.outcomes.get(n, UNNOTICED) == UNNOTICED]

    def run(self, slots: Slots, deadline: float, scratch: Path) -> int:
        """Run the package's tests on its mutants until the deadline."""
        tree = workspace(self.root, scratch / "tree")
        pool = Pool(slots, deadline, scratch)
        child = fork(lambda: self._exchange(tree, pool))
        os.waitpid(child, 0)
        progress = fold(self.events.read())
        if progress.collected is None:
            print(f"{self.name}: its tests cannot be collected: run pytest {' '.join(self.package.tests)}", flush=True)
            return 1
        if time.monotonic() >= deadline:
            return 0
        nodes = {}
        for number in self.waiting(progress):
            mutant = self.mutants[number]
            source = (self.root / mutant.path).read_text(encoding="utf-8")
            function = function_around(mutant.path, source, mutant.line)
            calls = progress.calls
            if self.package.lines is not None:
                calls = concerning(calls, tree, mutant.path)
            nodes[number] = candidates(calls, function, progress.collected)
            if not nodes[number]:
                self.events.add(number=number, outcome=SURVIVED)
                del nodes[number]
        trials = Trials(pool, progress.calls, self.events, partial(self._run_mutant, tree, progress.calls), start_s=60)
        for number, noticed in trials.run(nodes):
            self.events.add(number=number, outcome=NOTICED if noticed else SURVIVED)
        return 0

    def _exchange(self, tree: Path, pool: Pool) -> int:
        silent = os.open(os.devnull, os.O_RDWR)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        progress = fold(self.events.read())
        recorder, absent = CallRecorder(tree, {mutant.path for mutant in self.mutants}), AbsentPackages()
        mutants = {number: self.mutants[number] for number in self.waiting(progress)}
        forked = ForkedRuns(tree, mutants, self.events, pool, recorder, absent)
        return run_tests(tree, self.package.tests, [recorder, absent, forked])

    def _run_mutant(
        self, tree: Path, calls: Calls, number: int, nodes: Sequence[str], mutated: bool, folder: Path
    ) -> int:
        own = folder / "tree"
        shutil.copytree(tree, own)
        file = own / self.mutants[number].path
        # Without the mutant the file is written in the same form, so that the form alone is not noticed.
        original = ast.unparse(ast.parse(file.read_text(encoding="utf-8")))
        file.write_text(self.mutants[number].source if mutated else original, encoding="utf-8")
        plugins = [Only(nodes), Limits(calls, folder / CURRENT), AbsentPackages()]
        status = run_tests(own, sorted({file_of(node) for node in nodes}), plugins, "-x")
        return 0 if status == NO_TESTS_COLLECTED else status

    def report(self, reasons: Mapping[str, str]) -> dict[str, Any]:
        """Return the entry of the result file.

        Args:
            reasons: By change, why a mutant is equivalent to the original.
        """
        events = self.events.read()
        progress = fold(events)
        waiting = self.waiting(progress)
        counts = Counter(SURVIVED if progress.outcomes.get(n) == SURVIVED else NOTICED for n in progress.outcomes)
        tests = source_hash(self.root, self.package.tests)
        entry = self.drawn | {"tests": tests, "left_out": progress.left_out, "unsteady": sorted(progress.unsteady)}
        if waiting:
            done = len(self.mutants) - len(waiting)
            return entry | {"outcomes": {"done": done, "waiting": len(waiting)}, "progress": events}
        unnoticed = [n for n in range(len(self.mutants)) if progress.outcomes[n] == SURVIVED]
        survivors = [self.mutants[n] for n in unnoticed if self.mutants[n].key not in reasons]
        total = len(self.mutants) - len(unnoticed) + len(survivors)
        return entry | {
            "outcomes": dict(sorted(counts.items())),
            "unnoticed": unnoticed,
            "equivalent": [self.mutants[n].key for n in unnoticed if self.mutants[n].key in reasons],
            "survivors": [{"line": mutant.line, "change": mutant.key} for mutant in survivors],
            "noticed": round((total - len(survivors)) / total, 4),
        }


def start_of(drawn: dict[str, Any], tests: str, earlier: Mapping[str, Any]) -> list[Event]:
    """Return what an earlier entry of the result file says of the same mutants, as events."""
    if {field: earlier.get(field) for field in drawn} != drawn:
        return []
    if "progress" in earlier:
        events = earlier["progress"]
        same = earlier["tests"] == tests
        return [event for event in events if same or event.get("outcome") == NOTICED]
    unnoticed = set(earlier.get("unnoticed", range(drawn["mutants"])))
    final = earlier["tests"] == tests
    # Noticed once is noticed for good; the others may be noticed by tests that are new.
    known: list[Event] = [{"left_out": earlier["left_out"]}] if final else []
    known += [{"unsteady": test} for test in earlier.get("unsteady", [])]
    return known + [
        {"number": number, "outcome": SURVIVED if number in unnoticed else NOTICED}
        for number in range(drawn["mutants"])
        if final or number not in unnoticed
    ]


def prepare(root: Path, name: str, package: Package, arguments: argparse.Namespace, scratch: Path) -> Work:
    """Draw a package's mutants and take over what the result file has of them."""
    mutants = draw(root, package.paths, arguments.count, arguments.seed, package.lines)
    drawn = {"seed": arguments.seed, "mutants": len(mutants), "mutated": source_hash(root, package.paths)}
    if package.lines is not None:
        drawn |= {"without": arguments.without}
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    start = start_of(drawn, source_hash(root, package.tests), report.get(name, {}))
    return Work(name, root, package, drawn, mutants, Events(scratch / f"{name}.jsonl", start))


def run_all(works: Sequence[Work], out: Path, jobs: int, deadline: float, scratch: Path) -> bool:
    """Run packages side by side and write the result file as they proceed; returns whether all are complete."""
    slots: Any = multiprocessing.get_context("fork").BoundedSemaphore(jobs)
    children = {}
    for work in works:
        if work.waiting(fold(work.events.read())):
            own = scratch / work.name
            own.mkdir()
            children[fork(partial(work.run, slots, deadline, own))] = work
    while True:
        write_report(works, out)
        if not children:
            break
        time.sleep(WRITTEN_EVERY_S)
        for child in [child for child in children if os.waitpid(child, os.WNOHANG)[0]]:
            del children[child]
    return not any(work.waiting(fold(work.events.read())) for work in works)


def write_report(works: Sequence[Work], out: Path) -> None:
    """Bring the packages' entries of the result file up to date."""
    report = json.loads(out.read_text()) if out.exists() else {}
    reasons = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))
    changed = {work.name: work.report(reasons.get(work.name, {})) for work in works}
    if {name: report.get(name) for name in changed} == changed:
        return
    for name, entry in changed.items():
        if entry["outcomes"] != report.get(name, {}).get("outcomes"):
            rate = f", {entry['noticed']:.1%} noticed" if "noticed" in entry else ""
            print(f"{time.strftime('%H:%M:%S')} {name}: {entry['outcomes']}{rate}", flush=True)
    atomic_write(out, json.dumps(report | changed, indent=2, ensure_ascii=False) + "\n")


def main() -> int:
    """Run the packages that are asked for and add them to the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    parser.add_argument("--since", metavar="COMMIT", help="mutate the lines changed since then, instead of packages")
    parser.add_argument("--without", nargs="+", default=[], metavar="PATTERN", help="paths that --since leaves out")
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side, over all packages")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time, to resume later")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    arguments.out = arguments.out.resolve()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in PRELOADED:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="m-") as scratch:
        folder = Path(scratch).resolve()
        packages = {name: PACKAGES[name] for name in arguments.packages}
        if arguments.since:
            packages = {f"since-{arguments.since}": changed_since(ROOT, arguments.since, arguments.without)}
        works = [prepare(ROOT, name, package, arguments, folder) for name, package in packages.items()]
        return 0 if run_all(works, arguments.out, arguments.jobs, deadline, folder) else 3


if __name__ == "__main__":
    raise SystemExit(main())
