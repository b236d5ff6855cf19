"""Write the queue's figures into `docs/performance.md`, from the JSON of the benchmark.

    python -m benchmarks.queue.page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "queue.json"
PAGE = ROOT / "docs" / "performance.md"
START, END = "<!-- queue: written by benchmarks/queue/page.py -->", "<!-- end of queue -->"
EARLIER = {"64": {"put": 1211, "get": 2032}, "256": {"put": 2337, "get": 3615}}
EARLIER_MEMCPY = 4.9
"""TransferQueue's rates on another day on a machine of two cores, and that machine's memcpy in GB/s."""


def figures(result: dict[str, Any]) -> str:
    """The generated part of the page."""
    return "\n".join([START, *_setting(result), "", *_rates(result), "", *_more(result), "", *_bounds(result), END])


def _setting(result: dict[str, Any]) -> Iterator[str]:
    work, machine, versions = result["workload"], result["machine"], result["versions"]
    yield (
        f"Taken {result['taken_at'][:10]} in one run of {result['took_s']:.0f} s on {machine['cpus']} cores "
        f"({machine['processor']}, {machine['memory_gib']:g} GiB, load {machine['load_at_start']:g} before it began): "
        f"Python {versions['python']}, pyzmq {versions['pyzmq']}, tensordict {versions['tensordict']}, "
        f"torch {versions['torch']}."
    )
    passes = f", read {work['get_passes']} times over" if "get_passes" in work else ""
    yield (
        f"Batches of {work['batch']} samples, {work['bytes_per_batch'] / 1e6:.2f} MB: four jagged int64 columns of "
        f"{work['tokens'][0]} to {work['tokens'][1]} tokens and a bool mask; {work['batches']} batches{passes}, "
        f"medians of {work['rounds']} rounds; one producer process, one consumer process, loopback."
    )


def _rates(result: dict[str, Any]) -> Iterator[str]:
    peer = result["transferqueue"]
    yield "| samples/s | in flight | put | get | start to first put |"
    yield "|---|---|---|---|---|"
    for key, mine in result["ours"].items():
        transport, in_flight = key.split("_")
        theirs = result["plain"][key]
        start = f"{mine['start_to_first_put_s']:.2f} s"
        yield f"| xtoken, {transport} | {in_flight} | {mine['put']:,.0f} | {mine['get']:,.0f} | {start} |"
        yield f"| plain pyzmq, {transport} | {in_flight} | {theirs['put']:,.0f} | {theirs['get']:,.0f} | |"
    if "skipped" in peer:
        yield f"| TransferQueue: {peer['skipped']} | | | | |"
        return
    for size, rate in peer["batch"].items():
        start = f"{peer['start_to_first_put_s']:.1f} s"
        yield f"| TransferQueue, batches of {size} | 1 | {rate['put']:,.0f} | {rate['get']:,.0f} | {start} |"
    yield ""
    yield (
        f"TransferQueue {peer['versions']['TransferQueue']} on Ray {peer['versions']['ray']}, simple storage, "
        f"{peer['settings']['storage_units']} storage units; one sample: put {peer['put_p50_ms']:.1f} ms, get "
        f"{peer['get_p50_ms']:.1f} ms (p50). {_deviation(result)}"
    )


def _deviation(result: dict[str, Any]) -> str:
    """Whether TransferQueue did as on an earlier day, within a factor of two, and what may be behind it if not."""
    far = [
        f"{call} at {size}: {rate[call]:,.0f} against {EARLIER[size][call]:,}"
        for size, rate in result["transferqueue"]["batch"].items()
        for call in ("put", "get")
        if not 0.5 <= rate[call] / EARLIER[size][call] <= 2
    ]
    if not far:
        return "Each of its rates is within a factor of two of what it showed on an earlier day."
    machine = result["machine"]
    return (
        f"Beyond a factor of two from an earlier day: {'; '.join(far)}. It runs five processes on {machine['cpus']} "
        f"cores, so whatever else runs slows it first: the load was {machine['load_at_start']:g} before this run, and "
        f"memcpy reached {machine['memcpy_gb_per_s']:.1f} GB/s against {EARLIER_MEMCPY} then."
    )


def _more(result: dict[str, Any]) -> Iterator[str]:
    one, times, journal = result["ours"]["ipc_1"], result["latency"], result["journal"]
    crowd, idle, at_once, tensors = result["crowd"], result["idle"], result["at_once"], result["tensordict"]
    yield "| xtoken, ipc, one in flight | |"
    yield "|---|---|"
    if "put_at_first" in one:
        yield f"| put into a queue that was never so full | {one['put_at_first']:,.0f} samples/s |"
    yield f"| get, shuffled ids | {one['get_shuffled']:,.0f} samples/s |"
    yield f"| claim and ack | {one['claim_ack']:,.0f} samples/s |"
    yield f"| TensorDict in, out | {tensors['put_tensordict']:,.0f}, {tensors['get_tensordict']:,.0f} samples/s |"
    yield f"| put and claim at once | {at_once['put_at_once']:,.0f}, {at_once['get_at_once']:,.0f} samples/s |"
    yield (
        f"| put with a journal; without; the disk alone | {journal['put']:,.0f}; {journal['put_without']:,.0f}; "
        f"{journal['disk']:,.0f} samples/s |"
    )
    for call, name in (("round_trip", "plain round trip"), ("put", "put"), ("claim", "claim"), ("ack", "ack")):
        small, large = times[f"small_{call}"], times[f"workload_{call}"]
        yield (
            f"| {name}, one sample of 64 bytes (of the workload), p50 / p99 | {small['p50_ms']:.3f} / "
            f"{small['p99_ms']:.3f} ms ({large['p50_ms']:.3f} / {large['p99_ms']:.3f} ms) |"
        )
    yield f"| server memory over the payload it holds | {one['memory_over_payload']:.3f} |"
    yield f"| idle memory (PSS), share of a core | {idle['idle_pss_mib']:.0f} MiB, {idle['idle_core_share']:.2%} |"
    yield (
        f"| {crowd['connections']:,} connections from {crowd['processes']} processes | {crowd['answers_per_s']:,.0f} "
        f"answers/s; a client waits {crowd['median_client_wait_ms']:.0f} ms, the worst "
        f"{crowd['worst_client_wait_ms']:.0f} ms |"
    )


def _bounds(result: dict[str, Any]) -> Iterator[str]:
    yield "| it must show | this run | limit | |"
    yield "|---|---|---|---|"
    for bound in result["bounds"]:
        yield f"| {bound['what']} | {bound['value']:g} | {bound['limit']} | {'holds' if bound['holds'] else 'fails'} |"


def rendered() -> str:
    """The page with its figures renewed."""
    return pages.with_part(PAGE, START, END, figures(json.loads(RESULT.read_text(encoding="utf-8"))))


def write() -> None:
    """Renew the page."""
    PAGE.write_text(rendered(), encoding="utf-8")


def main() -> int:
    """Write the page, or say whether it is up to date."""
    return pages.command(__doc__, lambda: {PAGE: rendered()})


if __name__ == "__main__":
    raise SystemExit(main())
