"""Prometheus metrics of a control plane: its requests, its runs and their workers.

All values come from the views, so that a scrape sends no request to a worker or a queue.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.control.runs import Runs
from xtoken_services.control.views import Views

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
PREFIX = "xtoken_"
STREAMED = "/logs"
"""Route whose duration is not recorded: with `follow` it lasts as long as the run."""


class Telemetry:
    """Registry of a control plane's metrics.

    Args:
        runs: Runs to report.
        views: Views of the runs.
    """

    def __init__(self, runs: Runs, views: Views) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            f"{PREFIX}control_requests", "HTTP requests.", ["method", "route", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            f"{PREFIX}control_request_seconds",
            "Duration of HTTP requests.",
            ["method", "route"],
            buckets=BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_Collector(runs, views))

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self._registry)


class RequestMetrics:
    """Middleware that counts and times requests by route, not by path, of which a scanner would create any number."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app, self._telemetry = app, telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and record status and duration."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._telemetry.requests.labels(scope["method"][:16], route, str(status)).inc()
            if not route.endswith(STREAMED):
                self._telemetry.seconds.labels(scope["method"][:16], route).observe(time.perf_counter() - began)


class _Collector:
    """Collector of the metrics of all runs."""

    def __init__(self, runs: Runs, views: Views) -> None:
        self._runs, self._views = runs, views

    def describe(self) -> Iterable[Metric]:
        """Return nothing, as the metrics depend on the runs."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the number of runs by state, and the metrics of active runs."""
        runs = GaugeMetricFamily(f"{PREFIX}runs", "Runs by state.", labels=["state"])
        counts = self._runs.store.counts()
        for state in RunState:
            runs.add_metric([state], counts.get(state, 0))
        yield runs
        age, about = self._runs.housekeeping_age_s, "Seconds since the last housekeeping."
        yield GaugeMetricFamily(f"{PREFIX}control_round_age_seconds", about, value=age)
        statuses = ((run.id, self._views.status(run.id)) for run in self._runs.active())
        yield from _of_runs({run_id: status for run_id, status in statuses if status is not None})


RUN_GAUGES = {
    "run_step": ("step", "Optimiser steps taken."),
    "run_steps": ("steps", "Optimiser steps of the whole run."),
    "run_skipped_positions": ("skipped", "Positions without a row."),
    "run_dead_positions": ("dead", "Positions abandoned after repeated failures."),
}
LINE_GAUGES = (
    ("run_metric", "last", "Metric of the last optimiser step."),
    ("run_evaluation", "evaluation", "Metric of the last evaluation."),
)
WORKER_GAUGES = {
    "worker_restarts": ("restarts", "Restarts."),
    "worker_heartbeat_age_seconds": ("heartbeat_age_s", "Age of the last heartbeat."),
    "worker_progress": ("progress", "Units of work finished by the current attempt."),
}


def _of_runs(statuses: dict[str, RunStatus]) -> Iterator[Metric]:
    for name, (key, help_text) in RUN_GAUGES.items():
        yield _family(name, help_text, ["run"], (([r], getattr(s, key)) for r, s in statuses.items()))
    queues = {r: s.queue for r, s in statuses.items() if s.queue is not None}
    for key, help_text in (("samples", "Samples held."), ("bytes", "Bytes held."), ("memory_limit", "Bytes at most.")):
        yield _family(f"run_queue_{key}", help_text, ["run"], (([r], getattr(q, key)) for r, q in queues.items()))
    for name, key, help_text in LINE_GAUGES:
        lines = {r: getattr(s, key) or {} for r, s in statuses.items()}
        values = (([r, k], v) for r, line in lines.items() for k, v in line.items() if k != "step")
        yield _family(name, help_text, ["run", "metric"], values)
    yield from _of_workers(statuses)


def _of_workers(statuses: dict[str, RunStatus]) -> Iterator[Metric]:
    workers = [(r, w) for r, s in statuses.items() for w in s.workers]
    labels = ["run", "worker", "kind"]
    up = (([r, w.name, w.kind], int(w.state == "running")) for r, w in workers)
    yield _family("worker_up", "1 if the process is running.", labels, up)
    for name, (key, help_text) in WORKER_GAUGES.items():
        yield _family(name, help_text, labels, (([r, w.name, w.kind], getattr(w, key)) for r, w in workers))


def _family(name: str, help_text: str, labels: list[str], rows: Iterable[tuple[list[str], object]]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, value in rows:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            family.add_metric(values, value)
    return family
