"""Mutants of function bodies, each in a fork of a process that has collected the tests: nothing is imported again.

The code of the one function is exchanged. A mutant that is not noticed so is run again in a process of its own: a test
may have used the function when it was collected, or may start processes that read the file.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation.mutants import Mutant
from tests.mutation.selection import CallRecorder, Calls, callers


class ForkedRuns:
    """A pytest plugin that runs the collected tests once for every mutant, in place of running them.

    Attributes:
        root: Root of the tree.
        recorder: What records which tests call which functions, in a fork as well.
        record: File that it writes.
        mutants: The mutants; those that are not in the body of a function are left out.
        out: File to write, JSON: numbers of the mutants that were noticed.
        run: Runs a function in a fork; returns the outcome and CPU seconds.
    """

    def __init__(
        self, root: Path, recorder: CallRecorder, record: Path, mutants: Sequence[Mutant], out: Path, run: Any
    ) -> None:
        self._root, self._recorder, self._record = root, recorder, record
        self._mutants, self._out, self._run = mutants, out, run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record the calls of all tests, then run them on each mutant, its function's own first."""
        outcome, seconds = self._run(lambda: self._all(session, list(session.items), self._recorder), 1800.0)
        if outcome != "passed":
            raise pytest.UsageError("the tests do not pass without a mutant")
        calls: Calls = json.loads(self._record.read_text(encoding="utf-8"))
        noticed = []
        for number, mutant in enumerate(self._mutants):
            target = function_of(self._root, mutant)
            if target is None:
                continue
            source = (self._root / mutant.path).read_text(encoding="utf-8")
            rank = {node: at for at, node in enumerate(callers(calls, mutant.path, source, mutant.line))}
            first = sorted((i for i in session.items if i.nodeid in rank), key=lambda item: rank[item.nodeid])
            outcome, _ = self._run(functools.partial(self._mutated, session, first, *target), max(10.0, 2 * seconds))
            print(f"{outcome:8} {mutant.path}:{mutant.line} {mutant.after!r:.90}", file=sys.__stderr__, flush=True)
            if outcome != "passed":
                noticed.append(number)
                self._out.write_text(json.dumps(noticed), encoding="utf-8")
        return True

    def _mutated(self, session: pytest.Session, items: list[pytest.Item], function: Any, code: CodeType) -> int:
        function.__code__ = code
        return self._all(session, items, None)

    def _all(self, session: pytest.Session, items: list[pytest.Item], recorder: CallRecorder | None) -> int:
        """Run tests until one fails; the exit status."""
        if recorder is not None:
            session.config.pluginmanager.register(recorder)
        for item, behind in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=behind)
            if session.testsfailed:
                return 1
        if recorder is not None:
            recorder.pytest_sessionfinish()
        return 0


def function_of(root: Path, mutant: Mutant) -> tuple[FunctionType, CodeType] | None:
    """Return the function in whose body a mutant is, and its code in the mutant; None if it is in none."""
    tree = ast.parse((root / mutant.path).read_text(encoding="utf-8"))
    name = _qualified(tree, mutant.line)
    module = sys.modules.get(mutant.path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    if not name or module is None:
        return None
    found: Any = module
    for part in name.split("."):
        found = vars(found).get(part)
        if found is None:
            return None
    function = _unwrapped(found)
    codes = [
        code for code in _codes(compile(mutant.source, str(root / mutant.path), "exec")) if code.co_qualname == name
    ]
    if not isinstance(function, FunctionType) or len(codes) != 1:
        return None
    return (function, codes[0]) if codes[0].co_freevars == function.__code__.co_freevars else None


def _qualified(tree: ast.AST, line: int) -> str:
    """Return the qualified name of the outermost function in whose body a line is; empty if there is none."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            inner = _qualified(node, line)
            return f"{node.name}.{inner}" if inner else ""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.body[0].lineno <= line <= (node.end_lineno or 0):
                return node.name
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            inner = _qualified(node, line)
            if inner:
                return inner
    return ""


def _unwrapped(found: Any) -> Any:
    """Return the function inside of a descriptor and of decorators."""
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    elif isinstance(found, functools.cached_property):
        found = found.func
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
