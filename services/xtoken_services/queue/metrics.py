"""Prometheus metrics of a queue, and an HTTP server for `/metrics`."""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from xtoken_core.errors import XtokenError
from xtoken_core.queue.engine import Engine
from xtoken_core.queue.stats import stats_document
from xtoken_core.wire import messages as m

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BOUNDS = (*map(str, BUCKETS_S), "+Inf")
"""Upper bounds of the buckets as Prometheus spells them."""
PATIENCE_S = 5.0
PREFIX = "xtoken_queue_"

Samples = Iterable[tuple[Sequence[str], float]]
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

TOTALS = (
    ("uptime_seconds", "uptime_s", "Seconds since the queue was started."),
    ("bytes", "bytes", "Bytes of all buffers held."),
    ("memory_limit_bytes", "memory_limit", "Bytes held at most."),
    ("waiting_requests", "waiting", "Requests that wait."),
)
PARTITION: tuple[tuple[Family, str, str, str], ...] = (
    (GaugeMetricFamily, "samples", "samples", "Samples held."),
    (GaugeMetricFamily, "bytes", "bytes", "Bytes of buffers held."),
    (GaugeMetricFamily, "leases", "leases", "Leases."),
    (GaugeMetricFamily, "oldest_lease_seconds", "oldest_lease_s", "Age of the oldest lease."),
    (GaugeMetricFamily, "dead", "dead", "Dead letters."),
    (GaugeMetricFamily, "dead_bytes", "dead_bytes", "Bytes of the values of dead letters."),
    (CounterMetricFamily, "rows_put", "rows_put", "Rows of samples put, however many fields at once."),
    (CounterMetricFamily, "given_back", "given_back", "Samples that were leased and became free again."),
)
TASKS = (
    ("task_samples", "tasks", "Samples by task and state."),
    ("task_bytes", "task_bytes", "Bytes of samples' values by task and state."),
)
RUN = (
    ("step", "Step of a run."),
    ("rewinds", "Rewinds so far."),
    ("skipped", "Positions skipped."),
    ("blocks_leased", "Blocks leased."),
)


class Metrics:
    """A queue's metrics: latencies, recorded by the server, and its statistics, read at each scrape of `/metrics`.

    Args:
        port: Loopback port; 0 takes any free one, which `port` names.

    Raises:
        XtokenError: The port is in use.
    """

    def __init__(self, port: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._scrapes = Rendezvous()
        self.registry.register(_StatsCollector(self._scrapes.fetch))
        self._handled = Durations("request_seconds", "How long an answer took that was given at once.")
        self._waited = Durations("wait_seconds", "How long an answered request had waited.")
        self.registry.register(self._handled)
        self.registry.register(self._waited)
        self._refused = Counter(f"{PREFIX}refused", "Requests refused.", ["code"], registry=self.registry)
        self._exporter = Exporter(port, self.registry)
        self.port = self._exporter.port

    def serve(self, engine: Engine) -> None:
        """Make the statistics if a scrape waits for them; the server's loop calls it."""
        self._scrapes.serve(lambda: stats_document(engine))

    def close(self) -> None:
        """Stop serving."""
        self._exporter.close()

    def handled(self, request: m.Request, seconds: float) -> None:
        """Record the latency of a request that was answered at once."""
        self._handled.observe(m.TAGS[type(request)], seconds)

    def waited(self, request: m.Request, seconds: float) -> None:
        """Record how long an answered request had waited."""
        self._waited.observe(m.TAGS[type(request)], seconds)

    def refused(self, code: str) -> None:
        """Count a refused request."""
        self._refused.labels(code).inc()


class Durations:
    """Collector of one histogram by type of request, for one writing thread: five times as fast as the library's.

    Args:
        name: Name of the metric without its prefix.
        text: Its description.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = PREFIX + name, text
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, tag: str, seconds: float) -> None:
        """Record one duration."""
        counts = self._counts.get(tag)
        if counts is None:
            self._sums[tag] = 0.0
            counts = self._counts[tag] = [0] * (len(BUCKETS_S) + 1)
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        self._sums[tag] += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        family = HistogramMetricFamily(self._name, self._text, labels=["type"])
        for tag, counts in list(self._counts.items()):
            totals = zip(BOUNDS, accumulate(counts), strict=True)
            family.add_metric([tag], list(totals), self._sums[tag])
        yield family


class _StatsCollector:
    """Collector of a queue's statistics."""

    def __init__(self, document: Callable[[], bytes]) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of one statistics document."""
        stats = json.loads(self._document())
        for name, key, text in TOTALS:
            yield _family(GaugeMetricFamily, name, text, (), [((), stats[key])])
        roles = Counts(session["role"] for session in stats["sessions"])
        yield _family(GaugeMetricFamily, "sessions", "Living sessions.", ("role",), _items(roles))
        requests = _items(stats["requests"])
        yield _family(CounterMetricFamily, "requests", "Requests answered.", ("type",), requests)
        yield from _partition_families(stats["partitions"])


def _partition_families(partitions: Mapping[str, Any]) -> Iterator[Metric]:
    for kind, name, key, text in PARTITION:
        values = [((partition,), part[key]) for partition, part in partitions.items()]
        yield _family(kind, f"partition_{name}", text, ("partition",), values)
    for name, key, text in TASKS:
        by_state = [
            ((partition, task, state), count)
            for partition, part in partitions.items()
            for task, states in part[key].items()
            for state, count in states.items()
        ]
        yield _family(GaugeMetricFamily, name, text, ("partition", "task", "state"), by_state)
    ages = [
        ((partition, "+Inf" if bound == "inf" else bound), count)
        for partition, part in partitions.items()
        for bound, count in part["lease_ages"].items()
    ]
    text = "Leases that are at most so many seconds old."
    yield _family(GaugeMetricFamily, "partition_leases_by_age", text, ("partition", "le"), ages)
    for key, text in RUN:
        values = [((partition,), part["run"][key]) for partition, part in partitions.items() if "run" in part]
        yield _family(GaugeMetricFamily, f"run_{key}", text, ("partition",), values)


def _family(kind: Family, name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = kind(PREFIX + name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _items(counts: Mapping[str, float]) -> Samples:
    return [((label,), count) for label, count in counts.items()]


class Rendezvous:
    """Hands values that one thread makes to others that ask for them.

    The server's loop is the only thread that may touch the engine, so a scrape asks it for the statistics and waits.
    """

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._made = threading.Condition()
        self._value = b""
        self._number = 0

    def serve(self, make: Callable[[], bytes]) -> None:
        """Make the value if another thread waits for it."""
        if self._wanted.is_set():
            # Before the value is made: a scrape that comes meanwhile must get a newer one.
            self._wanted.clear()
            value = make()
            with self._made:
                self._value, self._number = value, self._number + 1
                self._made.notify_all()

    def fetch(self) -> bytes:
        """Wait for a value that is made from now on.

        Raises:
            TimeoutError: None was made in time.
        """
        with self._made:
            seen = self._number
            self._wanted.set()
            if not self._made.wait_for(lambda: self._number > seen, PATIENCE_S):
                raise TimeoutError("the queue's loop made no statistics")
            return self._value


class Exporter:
    """HTTP server of `/metrics` on a loopback port, on threads of its own.

    Args:
        port: Port; 0 takes any free one, which `port` names.
        registry: Metrics to serve.

    Raises:
        XtokenError: The port is in use.
    """

    def __init__(self, port: int, registry: CollectorRegistry) -> None:
        metrics = make_wsgi_app(registry)

        def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if environ["PATH_INFO"] != "/metrics":
                start_response("404 Not Found", [])
                return []
            try:
                body: Iterable[bytes] = metrics(environ, start_response)
            except TimeoutError:
                start_response("503 Service Unavailable", [])
                return []
            return body

        try:
            self._server = make_server("127.0.0.1", port, serve, _ThreadingServer, _QuietHandler)
        except OSError as error:
            raise XtokenError(f"cannot serve metrics at 127.0.0.1:{port}: {error.strerror}") from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Log nothing: the queue has a log of its own."""
