"""Held-out text during a run: bits per byte, into `eval.jsonl`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from services.common.resolve import open_index
from services.common.worker import Worker
from services.trainer.records import JsonLines
from xtoken_core.evaluation import evaluate

log = logging.getLogger("xtoken.trainer")


class Evaluator:
    """Reads the run's held-out text.

    Args:
        worker: The session.
        tokenizer: The student's.
    """

    def __init__(self, worker: Worker, tokenizer: Any) -> None:
        self.worker, self.tokenizer = worker, tokenizer
        self.spec = worker.run.spec
        self.lines = JsonLines(self.spec.output / "eval.jsonl")

    def evaluate(self, model: PreTrainedModel, step: int) -> None:
        """Append one line: bits per byte and what it is made of, after `step` optimiser steps."""
        assert self.spec.eval is not None
        index = open_index(self.spec, self.spec.eval.paths, self.spec.eval.field)
        model.eval()  # type: ignore[no-untyped-call]
        try:
            result = evaluate(
                model,
                self.tokenizer,
                index.documents(),
                context_length=self.spec.student.context_length,
                batch_tokens=self.spec.train.micro_batch_tokens,
                device=model.device,
                max_bytes=self.spec.eval.max_bytes,
            )
        finally:
            model.train()
        self.worker.alive()
        row = {"step": step, **asdict(result)}
        self.lines.append(row)
        log.info("after %d steps: %.4f bits per byte on held-out text", step, result.bits_per_byte)
