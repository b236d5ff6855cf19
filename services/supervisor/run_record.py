"""A run's own account of itself: `run.json` in its output directory, replaced atomically."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write
from xtoken_core.config.spec import RunSpec

FILE, SPEC, SUMMARY, MODEL = "run.json", "spec.json", "summary.json", "model"


class RunState(StrEnum):
    """Where a run stands."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    """All its processes were found gone by a control plane that came after the one that had started them."""

    @property
    def over(self) -> bool:
        """Whether it will not change any more, unless somebody resumes it."""
        return self not in (RunState.STARTING, RunState.RUNNING, RunState.STOPPING)


def write_record(output: Path, document: dict[str, Any]) -> None:
    """Replace a run's `run.json`.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    replace_json(output / FILE, document)


def replace_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    atomic_write(path, json.dumps(document, indent=2) + "\n")


def read_record(output: Path) -> dict[str, Any]:
    """A run's `run.json`; empty if there is none that can be read."""
    return _read(output / FILE)


def is_finished(spec: RunSpec) -> bool:
    """Whether a run of exactly these settings has written its model and its summary, which comes last."""
    output = spec.output
    there = (output / SUMMARY).is_file() and (output / MODEL).is_dir()
    return there and _read(output / SPEC) == spec.model_dump(mode="json")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
