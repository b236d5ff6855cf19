"""Streams of events: all that follow a run share one look, and what was cut back is sent again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.control.api.events import Cursor, _beyond, _events
from services.control.api.plane import Plane
from services.control.api.streams import Lines, Streams
from services.control.app import create_app
from services.control.curves import Curve
from services.control.runs import Runs
from services.control.views import View
from services.supervisor.run_record import RunState
from tests.unit.control.planes import make_runs, put

FOLLOWERS = 20


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = make_runs(tmp_path)
    yield found
    found.close()


def lines(first: int, last: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 1.0 / (step + 1)}) + "\n" for step in range(first, last))


def test_followers_of_a_run_share_its_looks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    output = put(runs, "old-1")
    plane: Plane = create_app(runs).state.plane
    view = plane.view("old-1")
    looks = []
    status = View.status
    going = {"state": RunState.RUNNING}

    def looked(self: View) -> object:
        looks.append(1)
        found = status(self)
        return found | going if found is not None else None

    monkeypatch.setattr(View, "status", looked)

    async def follow() -> list[str]:
        told = ""
        async for chunk in _events(plane, view, Cursor(-1, -1, 0)):
            told += chunk.decode()
        return [line.removeprefix("event: ") for line in told.splitlines() if line.startswith("event: ")]

    async def all_of_them() -> list[list[str]]:
        followers = [asyncio.create_task(follow()) for _ in range(FOLLOWERS)]
        await asyncio.sleep(0.8)
        with (output / "steps.jsonl").open("a") as file:
            file.write(lines(2, 4))
        await asyncio.sleep(1.2)
        going["state"] = RunState.COMPLETED
        return await asyncio.gather(*followers)

    told = asyncio.run(all_of_them())
    assert [events.count("step") for events in told] == [4] * FOLLOWERS
    assert all(events[0] == "status" and events[-1] == "end" for events in told)
    assert len(looks) < FOLLOWERS, "one look each half second, not one for each that follows"


def test_a_look_that_fails_ends_the_streams_and_the_next_begins_anew(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(runs, "old-1")
    plane: Plane = create_app(runs).state.plane
    view = plane.view("old-1")

    async def follow() -> str:
        return "".join([chunk.decode() async for chunk in _events(plane, view, Cursor(-1, -1, 0))])

    def broken(_: View) -> None:
        raise RuntimeError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(View, "status", broken)

        async def both() -> list[object]:
            return await asyncio.gather(follow(), follow(), return_exceptions=True)

        assert [type(found) for found in asyncio.run(both())] == [RuntimeError, RuntimeError]
    assert "event: end" in asyncio.run(follow())


def test_what_was_cut_back_is_sent_again(tmp_path: Path, runs: Runs) -> None:
    put(runs, "old-1")
    plane: Plane = create_app(runs).state.plane
    view = plane.view("old-1")

    async def looked() -> tuple[list[bytes], int]:
        async with plane.streams.feed(view, runs.store) as feed:
            look = await feed.next(None)
            cursor = Cursor(100, 100, 100)
            cursor.cut_back(look)
            return list(_beyond(look, cursor)), cursor.step

    assert asyncio.run(looked()) == ([], 1), "the curve ends with step 1, so what comes next is step 2"


def test_each_line_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(lines(0, 3))
    monkeypatch.setattr("services.control.curves.LOOK_S", 0.0)
    curve = Curve(path)
    kept = Lines(curve)
    curve.refresh()
    generation, first = kept.all()
    with path.open("a") as file:
        file.write(lines(3, 5))
    curve.refresh()
    again, second = kept.all()
    assert (again, [step for step, _ in second]) == (generation, [0, 1, 2, 3, 4])
    assert all(ours is theirs for (_, ours), (_, theirs) in zip(first, second[:3], strict=True))
    path.write_text(lines(0, 2))
    curve.refresh()
    cut, third = kept.all()
    assert cut > generation and [step for step, _ in third] == [0, 1]


def test_a_feed_lives_as_long_as_somebody_follows(runs: Runs) -> None:
    put(runs, "old-1")
    plane: Plane = create_app(runs).state.plane
    streams = Streams()

    async def twice() -> bool:
        view = plane.view("old-1")
        async with streams.feed(view, runs.store) as first, streams.feed(view, runs.store) as second:
            same = first is second
        async with streams.feed(view, runs.store) as third:
            return same and third is not first

    assert asyncio.run(twice())
