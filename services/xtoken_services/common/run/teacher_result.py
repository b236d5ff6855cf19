"""A teacher's own result on a run's held-out text, which its worker leaves in the run's directory. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.regular_files import json_object_or_empty
from xtoken_services.common.files.jsonl import replace_file
from xtoken_services.common.run.metric_lines import BITS, finite


def read_result(run: ResolvedRun, teacher: int, text: str, suffix: str = "") -> dict[str, Any] | None:
    """Return a teacher's result on a held-out text, as a line of `eval.jsonl`; None if it has not been measured.

    Args:
        run: The run.
        teacher: Number of the teacher.
        text: Fingerprint of the held-out text.
        suffix: That of the text's metrics.
    """
    document = json_object_or_empty(_file(run, teacher, suffix))
    return document if document.get("of") == _of(run, teacher, text) and BITS in finite(document) else None


def write_result(run: ResolvedRun, teacher: int, text: str, result: dict[str, Any], suffix: str = "") -> None:
    """Keep a teacher's result; a later start of the run reads it.

    Args:
        run: The run.
        teacher: Number of the teacher.
        text: Fingerprint of the held-out text.
        result: Metrics, `bits_per_byte` among them.
        suffix: As of `read_result`.

    Raises:
        OutputError: It cannot be written.
    """
    document = {"of": _of(run, teacher, text), **result}
    replace_file(_file(run, teacher, suffix), json.dumps(document, indent=2) + "\n")


def _file(run: ResolvedRun, teacher: int, suffix: str) -> Path:
    return run.spec.output / f"teacher-{teacher}-held-out{suffix}.json"


def _of(run: ResolvedRun, teacher: int, text: str) -> dict[str, Any]:
    """Return the settings that decide a result."""
    spec = run.spec
    assert spec.eval is not None
    settings = spec.teacher[teacher].model_dump(mode="json", include={"url", "store"})
    own = run.identity().teacher[teacher].model_dump(mode="json") | settings
    return {"text": text, "max_bytes": spec.eval.max_bytes, "train_on": spec.data.train_on, **own}
