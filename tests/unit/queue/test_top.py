"""Terminal view of a queue: units, rates and states."""

from typing import Any

import pytest
from rich.console import Console

from xtoken_services.queue.top import view

STATES = {"waiting": 1, "ready": 2, "leased": 3, "done": 4}


def stats(**changes: Any) -> dict[str, Any]:
    part = {
        "samples": 10, "bytes": 2048, "leases": 1, "oldest_lease_s": 3.0, "rows_put": 100, "dead": 5, "sealed": True,
        "tasks": {"train": STATES},
    }  # fmt: skip
    session = {"name": "w", "role": "collator", "rank": 0, "phase": "run", "progress": 7, "seen_age_s": 1.0}
    document = {
        "uptime_s": 60.0, "bytes": 512, "memory_limit": 1 << 30, "waiting": 0, "requests": {"put": 10},
        "sessions": [{**session, "progress_age_s": 119.9}], "partitions": {"p": part},
    }  # fmt: skip
    return {**document, **changes}


def shown(seen: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view(seen, before))
    return capture.get()


@pytest.mark.parametrize(("count", "text"), [(1023, "1023 B"), (1 << 42, "4.0 TiB")])
def test_sizes(count: int, text: str) -> None:
    assert f" · {text} of 1.0 GiB · " in shown(stats(bytes=count))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 s"), (119.9, "119.9 s"), (120.0, "2 min"), (7140.0, "119 min"), (7200.0, "2.0 h"), (9000.0, "2.5 h")],
)
def test_ages(seconds: float, text: str) -> None:
    assert shown(stats(uptime_s=seconds)).startswith(f"up {text} · ")


def test_rates_cover_the_time_between_two_views() -> None:
    later = stats(uptime_s=62.0, requests={"put": 30})
    later["partitions"]["p"]["rows_put"] = 600
    text = shown(later, stats())
    assert "10 requests/s" in text
    assert "250" in text


def test_a_partition_shows_its_states() -> None:
    row = next(line for line in shown(stats()).splitlines() if "p (sealed)" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "p (sealed)", "train", "1", "2", "3", "4", "5", "2.0 KiB", "", "3.0 s",
    ]  # fmt: skip


def test_names_and_reasons_are_no_markup() -> None:
    seen = stats()
    part = seen["partitions"].pop("p")
    run = {
        "rings": [], "positions": 8, "samples_per_step": 2, "failed": "[/red] no room\x1b[2J", "ended": False,
        "step": 1, "skipped": 0, "rewinds": 1, "blocks_leased": 0,
    }  # fmt: skip
    seen["partitions"]["[/data]"] = {**part, "tasks": {"t[bold]": STATES}, "run": run}
    seen["sessions"][0] |= {"name": "w[eval]", "role": "[link]", "phase": ":smile:"}
    text = shown(seen)
    for plain in ("[/data] (sealed)", "t[bold]", "failed: [/red] no room\ufffd[2J", "w[eval]", "[link]", ":smile:"):
        assert plain in text
