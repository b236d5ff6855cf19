"""A control plane under test without any run of its own: an application, and runs put into its database."""

import json
from pathlib import Path
from typing import Any

from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.run.status import RunState
from xtoken_services.control.runs import Runs
from xtoken_services.control.store import AttemptRow, RunRow, now
from xtoken_services.control.validation import SpecValidator

HERE = "http://127.0.0.1:8400"


def make_runs(tmp_path: Path) -> Runs:
    """Runs below `tmp/runs`, which may read `tmp/data`."""
    places = tmp_path / "runs", tmp_path / "data"
    for place in places:
        place.mkdir(exist_ok=True)
    return Runs(places[0], validator=SpecValidator(Roots.of(places[1:], places[:1]), places[0].resolve()))


def spec(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A run over files that are not there, below the root."""
    data = tmp_path / "data"
    model = {"model": str(data / "model"), "context_length": 8}
    teacher = {**model, "projection": str(data / "projection.pt")}
    return {
        "output": "out",
        "student": model,
        "teacher": [teacher],
        "data": {"path": str(data / "data.txt")},
        **changes,
    }


def put(runs: Runs, name: str = "old-1", state: RunState = RunState.COMPLETED, **columns: Any) -> Path:
    """A run that is remembered, with two steps in its curves; returns its output."""
    output = runs.directory / name
    (output / "logs").mkdir(parents=True)
    (output / "steps.jsonl").write_text('{"step":0,"loss":2.0,"ids":[1]}\n{"step":1,"loss":1.0,"ids":[2]}\n')
    (output / "summary.json").write_text('{"trained": 2}')
    (output / "run.json").write_text(json.dumps({"run": name}))
    (output / "logs" / "trainer-0.1.log").write_text("2026-01-01T00:00:01Z INFO one\n2026-01-01T00:00:03Z INFO three\n")
    (output / "logs" / "queue.1.log").write_text("2026-01-01T00:00:02Z INFO two\n  and more\n")
    row = RunRow(
        id=name, name="old", output=str(output), created=now(), state=state, steps=2, step=2,
        spec=spec(runs.directory.parent, output=str(output)), **columns,
    )  # fmt: skip
    runs.store.add(row)
    log = str(output / "logs" / "trainer-0.1.log")
    runs.store.add_attempts(
        [AttemptRow(run_id=name, launch=1, worker="trainer-0", kind="trainer", incarnation=1, log=log, started=now())]
    )
    runs.store.change_attempt(name, "trainer-0", 1, ended=now(), exit_code=0)
    return output
