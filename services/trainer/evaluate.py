"""Held-out text during a run: bits per byte, accuracy and losses, into `eval.jsonl`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch

from services.common.resolve import open_index
from services.common.worker import Worker
from services.trainer.eval_loss import HeldOutLoss
from services.trainer.jsonl import JsonLines
from services.trainer.loggers import held_out_line
from services.trainer.student import Student
from xtoken_core.evaluation import evaluate
from xtoken_core.losses import CrossTokenizerDistillationLoss

log = logging.getLogger("xtoken.trainer")


class Evaluator:
    """Reads the run's held-out text.

    Args:
        worker: The session.
        tokenizer: The student's.
        loss: The run's loss.
    """

    def __init__(self, worker: Worker, tokenizer: Any, loss: CrossTokenizerDistillationLoss) -> None:
        self.worker, self.tokenizer, self.loss = worker, tokenizer, loss
        self.spec = worker.run.spec
        self.lines = JsonLines(self.spec.output / "eval.jsonl")
        self._held_out: HeldOutLoss | None = None
        # Several ranks wait for each other behind it: none leaves from within.
        self._goes_on = worker.alive if worker.run.world == 1 else worker.beat

    def evaluate(self, student: Student, step: int, *, leads: bool = True) -> dict[str, Any] | None:
        """Append one line, after `step` optimiser steps; all ranks of a sharded student call.

        Args:
            student: What is measured.
            step: How many steps it has been trained.
            leads: Whether this rank writes.

        Returns:
            The line; None on a rank that does not write.
        """
        assert self.spec.eval is not None
        index = open_index(
            self.spec, self.spec.eval.paths, self.spec.eval.field, progress=lambda _done, _all: self._goes_on()
        )
        student.eval()
        try:
            with torch.compiler.set_stance("force_eager"):  # text of many widths, read seldom
                result = evaluate(
                    student,
                    self.tokenizer,
                    index.documents(),
                    context_length=self.spec.student.context_length,
                    batch_tokens=self.spec.train.micro_batch_tokens,
                    device=student.device,
                    max_bytes=self.spec.eval.max_bytes,
                    progress=self._goes_on,
                    outputs=student.outputs if student.blockwise else None,
                )
                row = {"step": step, **asdict(result), "loss": result.nll_nats / max(result.tokens, 1)}
                if self.spec.eval.teacher_kl:
                    self._goes_on()
                    if self._held_out is None:
                        self._held_out = HeldOutLoss(
                            self.spec, self.loss, self.tokenizer, index.documents(), progress=self._goes_on
                        )
                    row |= self._held_out.measure(student, progress=self._goes_on)
        finally:
            student.train()
        self._goes_on()
        if not leads:
            return None
        self.lines.append(row)
        log.info("after %d steps: %s", step, held_out_line(row))
        return row
