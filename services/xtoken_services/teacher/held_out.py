"""A teacher's own bits per byte on a run's held-out text, measured once before it serves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import InputError
from xtoken_services.common.run.teacher_result import read_result, write_result
from xtoken_services.common.text.training_text import open_held_out, open_index, scored_documents
from xtoken_services.teacher.base import HeldOutText, Teacher
from xtoken_services.teacher.stored import StoredTeacher

log = logging.getLogger("xtoken.teacher")


def measure_held_out(
    run: ResolvedRun, teacher: int, model: Teacher, report: Callable[[str], None], also: str | None = None
) -> tuple[str, dict[str, Any]] | None:
    """Measure a teacher as the student is measured, unless an earlier start has, and keep the result in the run.

    Args:
        run: The run.
        teacher: Number of the teacher.
        model: The teacher. A store has what its build has measured, if that had the same held-out text.
        report: Called with what is done, or an empty text; what it raises ends the measurement.
        also: Name of a text of `eval.also` to measure on in place of the held-out text.

    Returns:
        The name of the result in a store, and the result; None if nothing was measured now.

    Raises:
        OutputError: The result cannot be written.
    """
    if run.spec.eval is None:
        return None
    name = run.spec.teacher_name(teacher)

    def reading(done: int, _all: int) -> None:
        report(f"reading the held-out text: {done}")

    if also is None:
        text, suffix = open_held_out(run.spec, reading), ""
    else:
        text, suffix = (
            open_index(run.spec, [run.spec.eval.also_by_name[also]], run.spec.eval.field, reading),
            f"_{also}",
        )
    if read_result(run, teacher, text.fingerprint, suffix) is not None:
        return None
    key = f"held-out-{text.fingerprint[:16]}-{run.spec.eval.max_bytes}.json"
    report("measuring the held-out text")
    try:
        if isinstance(model, StoredTeacher):
            result = json.loads(model.store.files.read(key))
        else:
            result = _measured(run, teacher, model, scored_documents(run.spec, text))
    except (InputError, ValueError) as error:
        log.warning("%s has no result on the held-out text: %s", name, error)
        return None
    finally:
        report("")
    write_result(run, teacher, text.fingerprint, result, suffix)
    log.info("%s has %.4f bits per byte on %s", name, result["bits_per_byte"], also or "held-out text")
    return key, result


def _measured(run: ResolvedRun, teacher: int, model: Teacher, documents: Any) -> dict[str, Any]:
    """Return the metrics of a teacher that can compute.

    Raises:
        InputError: The text does not allow it.
    """
    settings = run.spec.teacher[teacher]
    assert run.spec.eval is not None
    with torch.compiler.set_stance("force_eager"):  # many widths, each seldom
        text = HeldOutText(
            model.tokenizer,
            documents,
            context_length=settings.context_length,
            batch_tokens=run.spec.train.micro_batch_tokens,
            max_bytes=run.spec.eval.max_bytes,
            packed=run.packed,
        )
        result = model.evaluate(text)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the ring is outside torch's allocator
    return asdict(result)
