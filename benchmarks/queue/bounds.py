"""Acceptance bounds of the queue."""

from __future__ import annotations

from typing import Any

from benchmarks.bounds import Bound, at_least, at_most


def queue_bounds(result: dict[str, Any]) -> list[Bound]:
    """Return every bound of the queue with its measured figure."""
    one, journal, crowd, idle = result["ours"]["ipc_1"], result["journal"], result["crowd"], result["idle"]
    return [
        *_rates(result),
        at_most("start to first put, s", max(r["start_to_first_put_s"] for r in result["ours"].values()), 1.5),
        *latency_bounds(result["latency"]),
        at_most("memory over payload", max(r["memory_over_payload"] for r in result["ours"].values()), 1.25),
        at_most("RSS after 10,240 samples are done, relative to the start", one["rss_after_over_start"], 1.1),
        at_least(
            "put with a journal, relative to the lower of the disk's rate and the rate without a journal",
            journal["put"] / min(journal["put_without"], journal["disk"]), 0.33,  # SQLite copies a row several times
        ),
        at_least("fewest answers to one of 1,000 connections", crowd["fewest_answers_of_a_client"], 1),
        at_most("worst client's mean wait, relative to the median client's", crowd["worst_over_median"], 10),
        at_most("longest wait of any client, relative to the median wait", crowd["longest_wait_over_median_wait"], 10),
        at_most("idle memory (PSS), MiB", idle["idle_pss_mib"], 60),
        at_most("idle fraction of a core", idle["idle_core_share"], 0.01),
    ]  # fmt: skip


def _rates(result: dict[str, Any]) -> list[Bound]:
    """Return the rates relative to raw pyzmq, and to TransferQueue's better figure."""
    bounds, peer = [], result["transferqueue"]
    for call in ("put", "get"):
        for key, rates in result["ours"].items():
            transport, in_flight = key.split("_")
            if "skipped" not in peer and in_flight == "1":
                best = max(size[call] for size in peer["batch"].values())
                bounds.append(Bound(f"{call}, {transport}, of TransferQueue", rates[call] / best, form="{:.1f}"))
            what = f"{call}, {transport}, {in_flight} in flight, relative to raw pyzmq"
            bounds.append(at_least(what, rates[call] / result["plain"][key][call], 0.6))
    return bounds


def latency_bounds(latency: dict[str, Any]) -> list[Bound]:
    """Return the latencies of single samples relative to a raw round trip of the same size."""
    return [
        at_most(
            f"{call} of one {size} sample, {quantile}, relative to a raw round trip",
            latency[f"{size}_{call}"][f"{quantile}_ms"] / latency[f"{size}_round_trip"][f"{quantile}_ms"],
            limit,
        )
        for call in ("put", "claim", "ack")
        for size in ("small", "workload")
        for quantile, limit in (("p50", 3), ("p99", 5))
    ]
