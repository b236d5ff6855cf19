"""Run each package's tests on mutants of it and write which are noticed.

    python -m tests.mutation.run [--packages plan wire] [--jobs N] [--count 100] [--seed 1] [--out FILE]
    python -m tests.mutation.run --since COMMIT [--without PATTERN ...] [--jobs N] [...]

A mutant that cannot be told from the original, changes cost only or is read by GPU code alone is listed in
`equivalent.toml` with the reason and not counted. The result file names every survivor. It is written as the work
proceeds, and a later call resumes from it: a package that is complete is run again only if its source has changed, or,
on the mutants that were not noticed, if its tests have. A mutant is noticed by a test that fails with it, fails with it
again and passes without it.

With `--since` the mutants are drawn from all product lines that have changed since a commit, and each is run on the
unit, contract and operator tests that concern its file: that call its function, or import its module or package.
"""

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
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.forks import run_in_fork
from tests.mutation.mutants import Mutant, draw
from tests.mutation.selection import Calls, Chosen, Recorder, concerning, function_around, ordered
from xtoken_core.atomic import atomic_write

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "mutation" / "results.json"
EQUIVALENT = ROOT / "tests" / "mutation" / "equivalent.toml"
PRODUCT = ("services", "xtoken", "xtoken_core")
COPIED = (*PRODUCT, "tests", "proto", "docs", "deploy", "benchmarks", "experiments", "pyproject.toml")
SETTINGS = tomllib.loads((ROOT / "tests" / "mutation" / "settings.toml").read_text(encoding="utf-8"))
PRELOADED = SETTINGS["preloaded"]
"""Imported once; each mutant's tests start in a fork of this process."""


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


PACKAGES = {name: Package(tuple(each["paths"]), tuple(each["tests"])) for name, each in SETTINGS["packages"].items()}


TESTS_OF_CHANGES = tuple(SETTINGS["tests_of_changes"])
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


def run_tests(folder: Path, tests: Sequence[str], plugin: object, *options: str) -> int:
    """Run tests of a copied tree with a pytest plugin, in a process that runs nothing else."""
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
    status = pytest.main([*quiet, *options, *tests], plugins=[plugin])
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)


class Work(NamedTuple):
    """A package's mutants, on a copy of the tree.

    Attributes:
        tree: The copy; every process that changes it makes one of its own.
        package: Paths and tests.
        calls: What the tests that pass without a mutant call.
    """

    tree: Path
    package: Package
    calls: Calls

    def trial(self, mutant: Mutant) -> tuple[bool, list[str]]:
        """Return whether a mutant is noticed, and the tests whose failures did not count."""
        source = (self.tree / mutant.path).read_text(encoding="utf-8")
        function = function_around(mutant.path, source, mutant.line)
        callers = ordered(self.calls, [node for node, test in self.calls.items() if function in test.functions])
        tree = self.tree.parent / f"worker-{os.getpid()}" / "tree"
        if not tree.exists():
            shutil.copytree(self.tree, tree)
        # Without the mutant the file is written in the same form, so that the form alone is not noticed.
        sources = (ast.unparse(ast.parse(source)), mutant.source)

        def run(nodes: Sequence[str], mutated: bool) -> str:
            (tree / mutant.path).write_text(sources[mutated], encoding="utf-8")
            return self._failing(tree, nodes)

        # Then all that may call it unseen: in processes that they start, in fixtures of other tests, on import.
        others = concerning(self.calls, self.tree, mutant.path) if self.package.lines else self.calls
        unsteady: list[str] = []
        try:
            for nodes in (callers, ordered(self.calls, [node for node in others if node not in callers])):
                while nodes and (failed := run(nodes, mutated=True)):
                    if run([failed], mutated=True) and not run([failed], mutated=False):
                        return True, unsteady
                    unsteady.append(failed)
                    nodes = nodes[nodes.index(failed) + 1 :]
        finally:
            (tree / mutant.path).write_text(source, encoding="utf-8")
        return False, unsteady

    def _failing(self, tree: Path, nodes: Sequence[str]) -> str:
        """Run tests until one fails; return that one, or nothing."""
        chosen = Chosen(nodes, self.calls, tree.parent / "running")
        chosen.running.write_text(nodes[0], encoding="utf-8")
        files = sorted({node.partition("::")[0] for node in nodes})
        seconds = 120 + 5 * sum(self.calls[node].seconds for node in nodes)
        passed = run_in_fork(partial(run_tests, tree, files, chosen, "-x"), tree.parent, seconds)
        return "" if passed else chosen.running.read_text(encoding="utf-8")


def record(tree: Path, package: Package, paths: Collection[str]) -> tuple[Calls, list[str]]:
    """Return which functions of files the tests call, and the tests and files that fail without a mutant."""
    out = tree.parent / "calls.json"
    run_in_fork(partial(run_tests, tree, package.tests, Recorder(tree, paths, out)), tree.parent, 4 * 3600.0)
    if not out.exists():
        raise SystemExit(f"the tests cannot be collected: run pytest {' '.join(package.tests)}")
    return Recorder.read(out)


def mutate(name: str, package: Package, arguments: argparse.Namespace, root: Path = ROOT) -> None:
    """Run a package's mutants that no earlier call has run and bring its entry of the result file up to date."""
    mutants = draw(root, package.paths, arguments.count, arguments.seed, package.lines)
    drawn = {"seed": arguments.seed, "mutants": len(mutants), "mutated": source_hash(root, package.paths)}
    if package.lines is not None:
        drawn |= {"without": arguments.without}
    report = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    earlier, tests = report.get(name, {}), source_hash(root, package.tests)
    noticed: dict[int, bool] = {}
    if {field: earlier.get(field) for field in drawn} == drawn:
        # Noticed once is noticed for good; the others may be noticed by tests that are new.
        noticed = dict.fromkeys(set(range(len(mutants))) - {*earlier["unnoticed"], *earlier.get("waiting", ())}, True)
        noticed |= dict.fromkeys(earlier["unnoticed"] if earlier["tests"] == tests else (), False)
    waiting = [number for number in range(len(mutants)) if number not in noticed]
    if not waiting:
        return
    unsteady = set(earlier.get("unsteady", ()))
    reasons = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get(name, {})
    with tempfile.TemporaryDirectory(prefix="m-") as scratch:
        tree = workspace(root, Path(scratch).resolve() / "tree")
        calls, left_out = record(tree, package, {mutants[number].path for number in waiting})
        with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("fork")) as pool:
            trials = pool.map(Work(tree, package, calls).trial, [mutants[number] for number in waiting])
            for number, (found, nodes) in zip(waiting, trials, strict=True):
                noticed[number] = found
                unsteady.update(nodes)
                other = {"tests": tests, "left_out": left_out, "unsteady": sorted(unsteady)}
                report[name] = drawn | other | outcomes(mutants, noticed, reasons)
                atomic_write(arguments.out, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(f"{time.strftime('%H:%M:%S')} {name}: {report[name]['outcomes']}", flush=True)


def outcomes(mutants: Sequence[Mutant], noticed: Mapping[int, bool], reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return what an entry of the result file says of the mutants.

    Args:
        mutants: All of the package.
        noticed: By the number of those that were run.
        reasons: By change, why a mutant is equivalent to the original.
    """
    unnoticed = sorted(number for number, found in noticed.items() if not found)
    survivors = [mutants[number] for number in unnoticed if mutants[number].key not in reasons]
    counted = len(noticed) - len(unnoticed) + len(survivors)
    return {
        "outcomes": {"noticed": len(noticed) - len(unnoticed), "survived": len(unnoticed)},
        "waiting": [number for number in range(len(mutants)) if number not in noticed],
        "unnoticed": unnoticed,
        "equivalent": [mutants[number].key for number in unnoticed if mutants[number].key in reasons],
        "survivors": [{"line": mutant.line, "change": mutant.key} for mutant in survivors],
        "noticed": round((counted - len(survivors)) / max(counted, 1), 4),
    }


def main() -> int:
    """Run the packages that are asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    parser.add_argument("--since", metavar="COMMIT", help="mutate the lines changed since then, instead of packages")
    parser.add_argument("--without", nargs="+", default=[], metavar="PATTERN", help="paths that --since leaves out")
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in PRELOADED:
        import_module(name)
    if arguments.since:
        changed = changed_since(ROOT, arguments.since, arguments.without)
        mutate(f"since-{arguments.since}", changed, arguments)
    else:
        for name in arguments.packages:
            mutate(name, PACKAGES[name], arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
