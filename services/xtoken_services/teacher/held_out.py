"""A teacher's own bits per byte on a run's held-out text, measured once before it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict

import torch

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import InputError
from xtoken_services.common.run.teacher_result import read_result, write_result
from xtoken_services.common.text.training_text import open_held_out
from xtoken_services.common.tokenizers.loading import load_tokenizer
from xtoken_services.teacher.base import Teacher

log = logging.getLogger("xtoken.teacher")


def measure_held_out(run: ResolvedRun, teacher: int, model: Teacher, report: Callable[[str], None]) -> None:
    """Measure a teacher as the student is measured, unless an earlier start has; what it is compared by stays so fixed.

    Args:
        run: The run.
        teacher: Number of the teacher.
        model: The teacher.
        report: Called with what is done, or an empty text; what it raises ends the measurement.

    Raises:
        OutputError: The result cannot be written.
    """
    if run.spec.eval is None:
        return
    name, settings = run.spec.teacher_name(teacher), run.spec.teacher[teacher]
    index = open_held_out(run.spec, lambda _done, _all: report("reading the held-out text"))
    if read_result(run.spec, teacher, index.fingerprint) is not None:
        return
    report("measuring the held-out text")
    try:
        with torch.compiler.set_stance("force_eager"):  # many widths, each seldom
            result = model.evaluate(
                load_tokenizer(settings.tokenizer_dir, name),
                index.documents(),
                context_length=settings.context_length,
                batch_tokens=run.spec.train.micro_batch_tokens,
                max_bytes=run.spec.eval.max_bytes,
                packed=run.packed,
            )
    except InputError as error:
        log.warning("%s cannot be measured on the held-out text: %s", name, error)
        result = None
    report("")
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the ring is outside torch's allocator
    if result is not None:
        write_result(run.spec, teacher, index.fingerprint, asdict(result))
        log.info("%s has %.4f bits per byte on held-out text", name, result.bits_per_byte)
