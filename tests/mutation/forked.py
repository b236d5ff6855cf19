"""Mutants of function bodies, each in a fork of a process that has collected the tests: nothing is imported again.

The code of the one function is exchanged, and the tests that call it are run. A mutant that is not noticed so is run
again in a process of its own: a test may have used the function when it was collected, or may start processes that read
the file.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutation.mutants import Mutant
from tests.mutation.plugins import AbsentPackages, Limits
from tests.mutation.pool import CURRENT, Job, Pool
from tests.mutation.progress import NOTICED, UNNOTICED, Events, fold
from tests.mutation.selection import CallRecorder, Calls, callers, file_of, function_around, with_notes
from tests.mutation.trials import Trials

RECORDING_S = 1800.0
"""Seconds that one test file may take without a mutant."""


class ForkedRuns:
    """A pytest plugin that runs the collected tests once for every mutant, in place of running them.

    Attributes:
        root: Root of the tree.
        mutants: The mutants by number; those that are not in the body of a function are left alone.
        events: What was done and is done.
        pool: Runs the forks.
        recorder: What records which tests call which functions, in a fork as well.
        absent: What knows which files were left out of the collection.
    """

    def __init__(
        self,
        root: Path,
        mutants: Mapping[int, Mutant],
        events: Events,
        pool: Pool,
        recorder: CallRecorder,
        absent: AbsentPackages,
    ) -> None:
        self._root, self._mutants, self._events, self._pool = root, mutants, events, pool
        self._recorder, self._absent = recorder, absent

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record the calls of all tests, then run each mutant on those that call its function."""
        session.config.pluginmanager.unregister(self._recorder)  # it slows mutants down
        progress = fold(self._events.read())
        if progress.collected is None:
            # Without a note, no test is known to call it: as of a function that the collection calls.
            unknown = self._function_names() - self._with_notes().keys()
            self._events.add(collected=[*self._recorder.collected, *unknown], left_out=self._absent.left_out)
        files = {file: list(items) for file, items in groupby(session.items, lambda item: file_of(item.nodeid))}
        recordings = [
            Job(file, functools.partial(self._record, file, items), RECORDING_S, RECORDING_S)
            for file, items in files.items()
            if file not in progress.files
        ]
        for file, end in self._pool.run(recordings):
            if end.outcome != "passed":
                self._events.add(file=file, left_out=[file])
        progress = fold(self._events.read())
        if progress.files < files.keys():
            return True  # the deadline
        targets, nodes = {}, {}
        items = {item.nodeid: item for item in session.items}
        for number, mutant in self._mutants.items():
            target = function_of(self._root, mutant)
            if target is None or number in progress.outcomes:
                continue
            found = callers(progress.calls, self._function_name(mutant))
            targets[number], nodes[number] = target, [node for node in found if node in items]

        def run_mutant(number: int, chosen: Sequence[str], mutated: bool, folder: Path) -> int:
            function, code = targets[number]
            if mutated:
                function.__code__ = code
            return _run_limited([items[node] for node in chosen], progress.calls, folder)

        trials = Trials(self._pool, progress.calls, self._events, run_mutant, start_s=30)
        for number, noticed in trials.run(nodes):
            self._events.add(number=number, outcome=NOTICED if noticed else UNNOTICED)
        return True

    def _function_name(self, mutant: Mutant) -> str:
        source = (self._root / mutant.path).read_text(encoding="utf-8")
        return function_around(mutant.path, source, mutant.line)

    def _function_names(self) -> set[str]:
        return {name for name in map(self._function_name, self._mutants.values()) if name}

    def _with_notes(self) -> dict[str, tuple[FunctionType, CodeType]]:
        """Return the mutants' functions by name, each with its code that notes calls."""
        names, found = self._function_names(), {}
        for mutant in self._mutants.values():
            source = (self._root / mutant.path).read_text(encoding="utf-8")
            noted = replace(mutant, source=with_notes(mutant.path, source, names))
            target = function_of(self._root, noted)
            if target is not None:
                found[self._function_name(mutant)] = target
        return found

    def _record(self, file: str, items: Sequence[pytest.Item], folder: Path) -> int:
        for function, code in self._with_notes().values():
            function.__code__ = code
        items[0].config.pluginmanager.register(self._recorder)
        _run_items(items)
        failed = set(self._recorder.failed)
        calls = {node: test for node, test in self._recorder.calls.items() if node not in failed}
        self._events.add(file=file, calls=calls, left_out=sorted(failed))
        return 0


def _run_limited(items: Sequence[pytest.Item], calls: Calls, folder: Path) -> int:
    """Run tests until one fails."""
    if not items:
        return 0
    limits = Limits(calls, folder / CURRENT)
    items[0].config.pluginmanager.register(limits)
    _run_items(items, limits)
    return int(limits.failed > 0)


def _run_items(items: Sequence[pytest.Item], limits: Limits | None = None) -> None:
    """Run tests; with limits until one fails."""
    for item, behind in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=behind)
        if limits is not None and limits.failed:
            return


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
