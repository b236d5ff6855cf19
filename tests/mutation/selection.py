"""Which tests call which functions, so that a mutant meets the tests of its own function first, the cheapest first."""

import ast
import faulthandler
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest


class Test(NamedTuple):
    """What one test takes, in seconds, and the product's functions that it calls, each as `path:line`."""

    __test__ = False

    seconds: float
    functions: list[str]


Calls = Mapping[str, Test]
"""By node id."""


class Recorder:
    """A pytest plugin that records which functions of some files every test calls, its fixtures and threads included.

    Args:
        root: Root of the tree.
        paths: The files, relative to it.
        out: The file to write at the end.
    """

    def __init__(self, root: Path, paths: Iterable[str], out: Path) -> None:
        self._files = {str(root / path): path for path in paths}
        self._seen: set[str] = set()
        self._calls: dict[str, Test] = {}
        self._failed: list[str] = []
        self._out = out

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename in self._files:
            self._seen.add(f"{self._files[code.co_filename]}:{code.co_firstlineno}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record one test."""
        self._seen = set()
        began = time.monotonic()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # the stub knows no way to clear it
            self._calls[item.nodeid] = Test(time.monotonic() - began, sorted(self._seen))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note files that cannot be collected."""
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note tests that fail."""
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        self._out.write_text(json.dumps([self._calls, sorted(set(self._failed))]), encoding="utf-8")

    @staticmethod
    def read(out: Path) -> tuple[Calls, list[str]]:
        """Return the calls of the tests that pass, and the names of those and of the files that fail."""
        calls, failed = json.loads(out.read_text(encoding="utf-8"))
        return {node: Test(*test) for node, test in calls.items() if node not in failed}, failed


class Chosen:
    """A pytest plugin that runs some tests alone, in the order given, and ends the process if one takes far too long.

    Attributes:
        running: File with the node id of the test that is running or has failed.
    """

    def __init__(self, nodes: Sequence[str], calls: Calls, running: Path) -> None:
        self._rank, self._calls, self.running = {node: number for number, node in enumerate(nodes)}, calls, running

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop all other tests and sort the rest."""
        chosen = [item for item in items if item.nodeid in self._rank]
        items[:] = sorted(chosen, key=lambda item: self._rank[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Limit one test to five times what it takes without a mutant, and some seconds."""
        self.running.write_text(item.nodeid, encoding="utf-8")
        # A signal is of no use: pytest-timeout takes it for itself.
        faulthandler.dump_traceback_later(30 + 5 * self._calls[item.nodeid].seconds, exit=True, file=sys.__stderr__)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


def ordered(calls: Calls, nodes: Iterable[str]) -> list[str]:
    """Return tests file by file, since fixtures belong to a file, the cheapest file and the cheapest test first."""
    cost, chosen = defaultdict[str, float](float), list(nodes)
    for node in chosen:
        cost[node.partition("::")[0]] += calls[node].seconds

    def rank(node: str) -> tuple[float, str, float]:
        file = node.partition("::")[0]
        return cost[file], file, calls[node].seconds

    return sorted(chosen, key=rank)


def concerning(calls: Calls, root: Path, path: str) -> Collection[str]:
    """Return the tests that call a function of a file, and those of test files that import its module or package.

    If there is none, those of files that import anything from the same folder of the product.
    """
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = module.rpartition(".")[0]
    names = {module, package} if "." in package else {module}
    imports = {file: _imports(root / file) for file in {node.partition("::")[0] for node in calls}}
    found = [
        node
        for node, test in calls.items()
        if names & imports[node.partition("::")[0]] or any(name.startswith(f"{path}:") for name in test.functions)
    ]
    folder = ".".join([*module.split(".")[:2], ""])
    near = {file for file, modules in imports.items() if any(name.startswith(folder) for name in modules)}
    return found or [node for node in calls if node.partition("::")[0] in near]


def _imports(file: Path) -> set[str]:
    """Return the modules that a file imports, and with their module's name the names that it imports from them."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def function_around(path: str, source: str, line: int) -> str:
    """Return the innermost function in whose body a line is, as `path:line` of its code; empty outside of one."""
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body[0].lineno <= line <= (node.end_lineno or 0)
    ]
    # The line of a function's code object is that of its first decorator, if any.
    firsts = [min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) for node in around]
    return f"{path}:{max(firsts)}" if firsts else ""
