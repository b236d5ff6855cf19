"""What the queue counts, as Prometheus text (exposition format 0.0.4), and a small HTTP server for it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from xtoken_core.errors import XtokenError
from xtoken_core.wire import messages as m

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
PATIENCE_S = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Durations in buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total_s = 0.0

    def note(self, seconds: float) -> None:
        """One more duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


class Latencies:
    """How long answers took, by message; how long requests waited that had to; how many were refused, by code."""

    def __init__(self) -> None:
        self.handled: dict[str, Histogram] = {}
        self.waited: dict[str, Histogram] = {}
        self.refused: dict[str, int] = {}

    def note(self, request: m.Request, seconds: float) -> None:
        """A request was answered at once."""
        self.handled.setdefault(_tag(request), Histogram()).note(seconds)

    def note_wait(self, request: m.Request, seconds: float) -> None:
        """A request was answered after it had waited."""
        self.waited.setdefault(_tag(request), Histogram()).note(seconds)

    def note_refusal(self, code: str) -> None:
        """A request was refused."""
        self.refused[code] = self.refused.get(code, 0) + 1


def prometheus_text(document: dict[str, Any], latencies: Latencies) -> str:
    """The statistics of `Stats`, and the latencies, as metrics.

    Args:
        document: The decoded statistics document.
        latencies: The server's.
    """
    return "".join(_lines(document, latencies))


def _lines(document: dict[str, Any], latencies: Latencies) -> Iterator[str]:
    yield from _family("uptime_seconds", "gauge", "Seconds since the queue was started.", [({}, document["uptime_s"])])
    yield from _family("bytes", "gauge", "Bytes of all buffers held.", [({}, document["bytes"])])
    yield from _family("memory_limit_bytes", "gauge", "Bytes held at most.", [({}, document["memory_limit"])])
    yield from _family("waiting_requests", "gauge", "Requests that wait.", [({}, document["waiting"])])
    yield from _family("sessions", "gauge", "Living sessions.", _roles(document["sessions"]))
    requests = [({"type": kind}, count) for kind, count in document["requests"].items()]
    yield from _family("requests_total", "counter", "Requests answered.", requests)
    refused = [({"code": code}, count) for code, count in latencies.refused.items()]
    yield from _family("refused_total", "counter", "Requests refused.", refused)
    yield from _partitions(document["partitions"])
    yield from _histograms("request_seconds", "How long an answer took that was given at once.", latencies.handled)
    yield from _histograms("wait_seconds", "How long an answered request had waited.", latencies.waited)


def _partitions(partitions: dict[str, Any]) -> Iterator[str]:
    simple = {
        "partition_samples": ("samples", "gauge", "Samples held."),
        "partition_bytes": ("bytes", "gauge", "Bytes of buffers held."),
        "partition_leases": ("leases", "gauge", "Leases."),
        "partition_oldest_lease_seconds": ("oldest_lease_s", "gauge", "Age of the oldest lease."),
        "partition_dead": ("dead", "gauge", "Dead letters."),
        "partition_dead_bytes": ("dead_bytes", "gauge", "Bytes of the values of dead letters."),
        "partition_rows_put_total": ("rows_put", "counter", "Rows of samples put, however many fields at once."),
        "partition_given_back_total": ("given_back", "counter", "Samples that were leased and became free again."),
    }
    for name, (key, kind, help_text) in simple.items():
        yield from _family(name, kind, help_text, [({"partition": p}, part[key]) for p, part in partitions.items()])
    of_tasks = {"tasks": "Samples by task and state.", "task_bytes": "Bytes of samples' values by task and state."}
    for key, help_text in of_tasks.items():
        by_state = [
            ({"partition": p, "task": task, "state": state}, count)
            for p, part in partitions.items()
            for task, states in part[key].items()
            for state, count in states.items()
        ]
        yield from _family("task_samples" if key == "tasks" else key, "gauge", help_text, by_state)
    ages = [
        ({"partition": p, "le": "+Inf" if bound == "inf" else bound}, count)
        for p, part in partitions.items()
        for bound, count in part["lease_ages"].items()
    ]
    yield from _family("partition_leases_by_age", "gauge", "Leases that are at most so many seconds old.", ages)
    for key, help_text in (("step", "The step a run is at."), ("rewinds", "How often it was rewound."),
                           ("skipped", "Positions skipped."), ("blocks_leased", "Blocks worked on.")):  # fmt: skip
        values = [({"partition": p}, part["run"][key]) for p, part in partitions.items() if "run" in part]
        yield from _family(f"run_{key}", "gauge", help_text, values)


def _roles(sessions: list[dict[str, Any]]) -> list[tuple[dict[str, str], float]]:
    counts: dict[str, int] = {}
    for session in sessions:
        counts[session["role"]] = counts.get(session["role"], 0) + 1
    return [({"role": role}, count) for role, count in counts.items()]


def _family(name: str, kind: str, help_text: str, values: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP xtoken_queue_{name} {help_text}\n# TYPE xtoken_queue_{name} {kind}\n"
    for labels, value in values:
        yield f"xtoken_queue_{name}{_labels(labels)} {value}\n"


def _histograms(name: str, help_text: str, histograms: dict[str, Histogram]) -> Iterator[str]:
    yield f"# HELP xtoken_queue_{name} {help_text}\n# TYPE xtoken_queue_{name} histogram\n"
    for kind, histogram in histograms.items():
        below = 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), histogram.counts, strict=True):
            below += count
            yield f"xtoken_queue_{name}_bucket{_labels({'type': kind, 'le': bound})} {below}\n"
        yield f"xtoken_queue_{name}_sum{_labels({'type': kind})} {histogram.total_s}\n"
        yield f"xtoken_queue_{name}_count{_labels({'type': kind})} {below}\n"


def _labels(labels: dict[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels.items()
    )
    inner = ",".join(f'{name}="{value}"' for name, value in escaped)
    return f"{{{inner}}}" if inner else ""


def _tag(request: m.Request) -> str:
    return str(type(request).__struct_config__.tag)


class Exporter:
    """Serves `/metrics` on a loopback port from threads of its own.

    The text itself is made by the server's loop, the only one that may touch the engine, when it calls `serve_pending`.

    Args:
        port: 0 takes any free one; `port` tells which.

    Raises:
        XtokenError: The port is in use.
    """

    def __init__(self, port: int) -> None:
        self._wanted = threading.Event()
        self._made = threading.Condition()
        self._text = ""
        self._number = 0
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        except OSError as error:
            raise XtokenError(f"cannot serve metrics at 127.0.0.1:{port}: {error.strerror}") from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def serve_pending(self, make: Callable[[], str]) -> None:
        """Make the text if somebody waits for it."""
        if self._wanted.is_set():
            self._wanted.clear()
            text = make()
            with self._made:
                self._text, self._number = text, self._number + 1
                self._made.notify_all()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _fetch(self) -> str | None:
        with self._made:
            seen = self._number
            self._wanted.set()
            return self._text if self._made.wait_for(lambda: self._number > seen, PATIENCE_S) else None

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fetch = self._fetch

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE_S

            def do_GET(self) -> None:
                text = fetch() if self.path == "/metrics" else None
                body = (text or "").encode()
                self.send_response(200 if text else 503 if self.path == "/metrics" else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
                """The queue's own log is enough."""

        return Handler
