"""Which tests call which functions, so that a mutant meets the tests of its own function alone, cheapest first."""

from __future__ import annotations

import ast
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

MONITORING: Any = getattr(sys, "monitoring", None)
DISABLE = MONITORING.DISABLE if MONITORING is not None else None


class Test(NamedTuple):
    """What one test does.

    Attributes:
        cpu_s: CPU seconds of its process.
        wall_s: Seconds of the clock.
        functions: The package's functions that it calls, each as `path:line`.
        starts_processes: Whether it starts processes, which call functions unseen.
    """

    __test__ = False

    cpu_s: float
    wall_s: float
    functions: list[str]
    starts_processes: bool


Calls = dict[str, Test]
"""By node id."""


class CallRecorder:
    """A pytest plugin that records the functions of a package that every test calls.

    Attributes:
        root: Root of the tree.
        paths: Files and folders of the package, relative to it.
    """

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self._prefixes = tuple(str(root / path) for path in paths)
        self._root = root
        self._seen: set[tuple[str, int]] = set()
        self._processes = 0
        self._audited = False
        self.calls: Calls = {}
        self.collected: list[str] = []
        self.failed: list[str] = []

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        self._called(frame.f_code)

    def _called(self, code: CodeType, *_: Any) -> Any:
        if code.co_filename.startswith(self._prefixes):
            self._seen.add((code.co_filename, code.co_firstlineno))
        return DISABLE

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        self._seen = set()
        if MONITORING is not None:  # from Python 3.12 on: each function is reported once, so nothing is slowed down
            started = MONITORING.events.PY_START
            MONITORING.use_tool_id(MONITORING.PROFILER_ID, "calls")
            MONITORING.register_callback(MONITORING.PROFILER_ID, started, self._called)
            MONITORING.set_events(MONITORING.PROFILER_ID, started)
            MONITORING.restart_events()
        else:
            sys.settrace(self._trace)
            threading.settrace(self._trace)
        try:
            yield
        finally:
            if MONITORING is not None:
                MONITORING.set_events(MONITORING.PROFILER_ID, 0)
                MONITORING.free_tool_id(MONITORING.PROFILER_ID)
            else:
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]  # the stub knows no way to clear it

    def _functions(self) -> list[str]:
        return [f"{Path(path).relative_to(self._root).as_posix()}:{line}" for path, line in sorted(self._seen)]

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        """Record the calls of the collection, imports included."""
        with self._tracing():
            result = yield
        self.collected = self._functions()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record the calls of one test, of its fixtures and of the threads that it starts."""
        self._audit()
        began, clock, processes = time.process_time(), time.monotonic(), self._processes
        with self._tracing():
            result = yield
        seconds = time.process_time() - began, time.monotonic() - clock
        self.calls[item.nodeid] = Test(*seconds, self._functions(), self._processes > processes)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note tests that fail."""
        if report.failed:
            self.failed.append(report.nodeid)

    def _audit(self) -> None:
        """Count the processes that are started from here on; a process is audited until its end."""
        if self._audited:
            return
        self._audited = True
        import _posixsubprocess

        spawn = _posixsubprocess.fork_exec  # what multiprocessing calls: without an audit event

        def counted(*arguments: Any) -> int:
            self._processes += 1
            return spawn(*arguments)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
                self._processes += 1

        _posixsubprocess.fork_exec = counted
        sys.addaudithook(hook)


class Only:
    """A pytest plugin that runs some tests alone, in the order given."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self._rank = {node: number for number, node in enumerate(nodes)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop all other tests and sort the rest."""
        chosen = [item for item in items if item.nodeid in self._rank]
        items[:] = sorted(chosen, key=lambda item: self._rank[item.nodeid])


def ordered(calls: Mapping[str, Test], nodes: Iterable[str]) -> list[str]:
    """Return tests file by file, since fixtures belong to a file, the cheapest file and the cheapest test first."""
    files = defaultdict(list)
    for node in nodes:
        files[file_of(node)].append(node)
    cost = {file: sum(calls[node].cpu_s for node in inside) for file, inside in files.items()}
    return [
        node for file in sorted(files, key=lambda f: cost[f]) for node in sorted(files[file], key=lambda n: calls[n][0])
    ]


def file_of(node: str) -> str:
    """Return the test file of a node id."""
    return node.partition("::")[0]


def callers(calls: Mapping[str, Test], function: str) -> list[str]:
    """Return the node ids of the tests that call a function, in the order to run them."""
    return ordered(calls, [node for node, test in calls.items() if function in test.functions])


def candidates(calls: Mapping[str, Test], function: str, collected: Iterable[str]) -> list[str]:
    """Return the node ids of all tests that may notice a change of a function, in the order to run them.

    Args:
        calls: What was recorded.
        function: The innermost function around the change, as `path:line`; empty for code that an import runs.
        collected: The functions that the collection of the tests calls.
    """
    if not function or function in collected:
        return ordered(calls, calls)
    # Whole files: a fixture of a module may call the function in its first test alone and serve all others.
    files = {file_of(node) for node, test in calls.items() if test.starts_processes or function in test.functions}
    return ordered(calls, [node for node in calls if file_of(node) in files])


def concerning(calls: Calls, root: Path, path: str) -> Calls:
    """Return the tests that call a function of a file, and those of test files that import its module or package."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = module.rpartition(".")[0]
    names = {module, package} if "." in package else {module}
    importing = {file for file in {file_of(node) for node in calls} if names & _imports(root / file)}
    return {
        node: test
        for node, test in calls.items()
        if file_of(node) in importing or any(function.startswith(f"{path}:") for function in test.functions)
    }


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
    return f"{path}:{max(map(_first, around))}" if around else ""


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line of a function's code object: that of its first decorator, if any."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
