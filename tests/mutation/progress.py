"""Progress of a package: events that several processes append to one file, each a line of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.selection import Calls, Test

Event = dict[str, Any]
NOTICED, UNNOTICED, SURVIVED = "noticed", "unnoticed", "survived"
"""Outcomes of a mutant; unnoticed: with its code exchanged, and not yet run in a process of its own."""


class Events:
    """An append-only file of events."""

    def __init__(self, path: Path, earlier: Iterable[Event]) -> None:
        self._path = path
        path.touch()
        for event in earlier:
            self.add(**event)

    def add(self, **event: Any) -> None:
        """Append one event, from any process."""
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(handle, json.dumps(event, ensure_ascii=False).encode() + b"\n")
        finally:
            os.close(handle)

    def read(self) -> list[Event]:
        """Return all events so far, in the order of their writing."""
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]


@dataclass
class Progress:
    """What the events of a package amount to.

    Attributes:
        calls: By node id, the tests that pass without a mutant.
        collected: Functions that the collection of the tests calls; None until it is recorded.
        files: Test files that were recorded.
        left_out: Tests and files that cannot be collected or fail without a mutant.
        unsteady: Tests that failed with a mutant and did not count: without it they fail too, or they failed once only.
        outcomes: By number of the mutant.
    """

    calls: Calls = field(default_factory=dict)
    collected: list[str] | None = None
    files: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    unsteady: set[str] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)


def fold(events: Iterable[Event]) -> Progress:
    """Return the progress that events amount to."""
    progress = Progress()
    for event in events:
        if "number" in event:
            progress.outcomes[event["number"]] = event["outcome"]
        if "collected" in event:
            progress.collected = event["collected"]
        if "file" in event:
            progress.files.add(event["file"])
        if "unsteady" in event:
            progress.unsteady.add(event["unsteady"])
        progress.calls |= {node: Test(*entry) for node, entry in event.get("calls", {}).items()}
        progress.left_out += event.get("left_out", [])
    return progress
