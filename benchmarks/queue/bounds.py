"""What the figures of a run must show."""

from __future__ import annotations

from typing import Any


def bounds(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every bound: what it is about, the value, the limit, and whether it holds."""
    found: list[dict[str, Any]] = []

    def at_least(what: str, value: float, limit: float) -> None:
        found.append({"what": what, "value": value, "limit": f"at least {limit:g}", "holds": value >= limit})

    def at_most(what: str, value: float, limit: float) -> None:
        found.append({"what": what, "value": value, "limit": f"at most {limit:g}", "holds": value <= limit})

    one, peer = result["ours"]["ipc_1"], result["transferqueue"]
    for call in ("put", "get"):
        for key, rates in result["ours"].items():
            transport, in_flight = key.split("_")
            if "skipped" not in peer and in_flight == "1":
                best = max(size[call] for size in peer["batch"].values())
                at_least(f"{call}, times TransferQueue's better figure (over tcp), {transport}", rates[call] / best, 10)
            what = f"{call}, times plain pyzmq, {transport}, {in_flight} in flight"
            at_least(what, rates[call] / result["plain"][key][call], 0.6)
    at_most("start to first put, s", max(r["start_to_first_put_s"] for r in result["ours"].values()), 1.5)
    for call in ("put", "claim", "ack"):
        for size in ("small", "workload"):
            plain, ours = result["latency"][f"{size}_round_trip"], result["latency"][f"{size}_{call}"]
            for quantile, limit in (("p50_ms", 3), ("p99_ms", 5)):
                what = f"{call} of one {size} sample, {quantile.removesuffix('_ms')}, times a plain round trip"
                at_most(what, ours[quantile] / plain[quantile], limit)
    at_most("memory over payload", max(r["memory_over_payload"] for r in result["ours"].values()), 1.25)
    at_most("RSS after 10,240 samples are done, times the start's", one["rss_after_over_start"], 1.1)
    journal = result["journal"]
    lower = min(journal["put_without"], journal["disk"])
    at_least(
        "put with a journal, times the lower of the disk's rate and the rate without one", journal["put"] / lower, 0.5
    )
    crowd = result["crowd"]
    at_least("fewest answers of one of 1,000 connections", crowd["fewest_answers_of_a_client"], 1)
    at_most("worst client's mean wait, times the median client's", crowd["worst_over_median"], 10)
    at_most("longest single wait of any client, times the median wait", crowd["longest_wait_over_median_wait"], 10)
    at_most("idle memory (PSS), MiB", result["idle"]["idle_pss_mib"], 60)
    at_most("idle share of a core", result["idle"]["idle_core_share"], 0.01)
    return found
