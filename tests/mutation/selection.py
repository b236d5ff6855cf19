"""Which tests call which functions, so that a mutant meets the tests of its own function alone, cheapest first."""

from __future__ import annotations

import ast
import builtins
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

NOTE = "__note_call__"
"""A builtin that a function with a note calls (`with_notes`)."""


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
    """A pytest plugin that records which functions of some files every test calls.

    The collection is traced. A test would take a multiple of its time so: in tests it records the functions that have
    a note (`with_notes`).

    Attributes:
        root: Root of the tree.
        paths: The files, relative to it.
    """

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self._prefixes = tuple(str(root / path) for path in paths)
        self._root = root
        self._seen: set[str] = set()
        self._processes = 0
        self._audited = False
        self.calls: Calls = {}
        self.collected: list[str] = []
        self.failed: list[str] = []

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(self._prefixes):
            self._seen.add(f"{Path(code.co_filename).relative_to(self._root).as_posix()}:{code.co_firstlineno}")

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]  # the stub knows no way to clear it

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        """Record the calls of the collection, imports included."""
        with self._tracing():
            result = yield
        self.collected = sorted(self._seen)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record the calls of one test, of its fixtures and of the threads that it starts."""
        self._audit()
        self._seen = set()
        setattr(builtins, NOTE, self._seen.add)
        began, clock, processes = time.process_time(), time.monotonic(), self._processes
        result = yield
        seconds = time.process_time() - began, time.monotonic() - clock
        self.calls[item.nodeid] = Test(*seconds, sorted(self._seen), self._processes > processes)
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
    """Return the tests that call a function of a file, and those of test files that import its module or package.

    If there is none, those of files that import anything from the same folder of the product.
    """
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = module.rpartition(".")[0]
    names = {module, package} if "." in package else {module}
    imports = {file: _imports(root / file) for file in {file_of(node) for node in calls}}
    found = {
        node: test
        for node, test in calls.items()
        if names & imports[file_of(node)] or any(function.startswith(f"{path}:") for function in test.functions)
    }
    folder = ".".join([*module.split(".")[:2], ""])
    near = {file for file, modules in imports.items() if any(name.startswith(folder) for name in modules)}
    return found or {node: test for node, test in calls.items() if file_of(node) in near}


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


def with_notes(path: str, source: str, functions: Collection[str]) -> str:
    """Return a file's source in which some functions first call `NOTE` with their names, `path:line`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and f"{path}:{_first(node)}" in functions:
            node.body[:0] = ast.parse(f"{NOTE}({path!r} ':{_first(node)}')").body
    return ast.unparse(tree)


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line of a function's code object: that of its first decorator, if any."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
