"""Pytest plugins for runs of tests on mutants: limits of every test, and packages that are not installed."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import resource
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.selection import Test

OWN = ("tests", "xtoken_core", "xtoken_services", "benchmarks", "experiments")


class Limits:
    """Ends the process when a test takes far longer than it did without a mutant.

    Attributes:
        calls: What the tests took.
        current: File to which the node id of the running test is written.
        failed: Number of tests that have failed.
    """

    def __init__(self, calls: Mapping[str, Test], current: Path) -> None:
        self._calls, self._current = calls, current
        self._silent = os.open(os.devnull, os.O_WRONLY)
        self.failed = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Set the limits of one test: five times what it took, and some seconds."""
        self._current.write_text(item.nodeid, encoding="utf-8")
        test = self._calls.get(item.nodeid)
        if test is not None:
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            soft = int(time.process_time() + 10 + 5 * test.cpu_s)
            resource.setrlimit(resource.RLIMIT_CPU, (min(soft, hard), hard))
            # A signal is of no use for the clock's limit: pytest-timeout takes it for itself.
            faulthandler.dump_traceback_later(20 + 5 * test.wall_s, exit=True, file=self._silent)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count failures."""
        self.failed += report.failed


class AbsentPackages:
    """Skips test files that import a package that is not installed; knows pytest-timeout's settings without it.

    Attributes:
        left_out: The files skipped so, and those that cannot be collected for another reason.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self._timeouts = importlib.util.find_spec("pytest_timeout") is not None

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        """Accept the setting `timeout`."""
        if not self._timeouts:
            parser.addini("timeout", "seconds of a test; without effect")

    def pytest_configure(self, config: pytest.Config) -> None:
        """Accept the mark `timeout`."""
        if not self._timeouts:
            config.addinivalue_line("markers", "timeout: seconds of a test; without effect")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Turn the failed import of an absent package into a skip."""
        report = yield
        if report.failed:
            self.left_out.append(report.nodeid)
            if _absent(getattr(report, "call", None)):
                report.outcome = "skipped"
                report.longrepr = (str(collector.path), 0, "a package is not installed")
        return report


def _absent(call: Any) -> bool:
    error = call.excinfo.value if call is not None and call.excinfo is not None else None
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return (error.name or "").partition(".")[0] not in OWN
        error = error.__cause__ or error.__context__
    return False
