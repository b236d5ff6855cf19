"""Which tests call which functions, so that a mutant meets the tests of its own function first."""

from __future__ import annotations

import ast
import json
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

Calls = dict[str, tuple[float, list[str]]]
"""By node id: the CPU seconds of a test and the functions that it calls, each as `path:line`."""


class CallRecorder:
    """A pytest plugin that writes the functions of a package that every test calls.

    Attributes:
        root: Root of the tree.
        paths: Files and folders of the package, relative to it.
        out: File to write, JSON.
    """

    def __init__(self, root: Path, paths: Iterable[str], out: Path) -> None:
        self._prefixes = tuple(str(root / path) for path in paths)
        self._root, self._out = root, out
        self._calls: Calls = {}
        self._seen: set[tuple[str, int]] = set()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename.startswith(self._prefixes):
            self._seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record the calls of one test, of its fixtures and of the threads that it starts."""
        self._seen = set()
        began = time.process_time()
        sys.settrace(self._trace)
        threading.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]  # the stub knows no way to clear it
            names = [f"{Path(path).relative_to(self._root).as_posix()}:{line}" for path, line in sorted(self._seen)]
            self._calls[item.nodeid] = (time.process_time() - began, names)

    def pytest_sessionfinish(self) -> None:
        """Write what was recorded."""
        self._out.write_text(json.dumps(self._calls), encoding="utf-8")


class Reorder:
    """A pytest plugin that runs some tests first, in the order given, and all others after them."""

    def __init__(self, first: Iterable[str]) -> None:
        self._rank = {node: number for number, node in enumerate(first)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the collected tests; those without a rank keep their order."""
        items.sort(key=lambda item: self._rank.get(item.nodeid, len(self._rank)))


def callers(calls: Mapping[str, tuple[float, list[str]]], path: str, source: str, line: int) -> list[str]:
    """Return the node ids of the tests that call the function of a line, the cheapest first; none outside of one.

    Args:
        calls: What `CallRecorder` has written.
        path: The file, relative to the root.
        source: Its text.
        line: A line of it, from 1.
    """
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _first(node) <= line <= (node.end_lineno or 0)
    ]
    if not around:
        return []
    name = f"{path}:{max(map(_first, around))}"
    return sorted((node for node, (_, names) in calls.items() if name in names), key=lambda node: calls[node][0])


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the line of a function's code object: that of its first decorator, if any."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
