"""The queue's own histogram beside that of Prometheus' library."""

import random

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from xtoken_services.queue.metrics import BUCKETS_S, PREFIX, Durations


def test_text_is_that_of_the_library() -> None:
    disable_created_metrics()
    rng = random.Random(1)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    durations = Durations("request_seconds", "How long.")
    ours.register(durations)
    library = Histogram(PREFIX + "request_seconds", "How long.", ["type"], buckets=BUCKETS_S, registry=theirs)
    for seconds in (*BUCKETS_S, 0.0, 99.0, *(rng.expovariate(10) for _ in range(100))):
        tag = rng.choice(("put", "claim"))
        durations.observe(tag, seconds)
        library.labels(tag).observe(seconds)
    lines = [sorted(generate_latest(registry).splitlines()) for registry in (ours, theirs)]
    assert lines[0] == lines[1]
