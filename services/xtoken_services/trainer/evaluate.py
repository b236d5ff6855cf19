"""Evaluation on held-out text during a run: bits per byte, accuracy and tasks, into `eval.jsonl`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.dataset.index import DataIndex
from xtoken_core.evaluation import EvalResult, evaluate
from xtoken_core.transports.signal import RINGS
from xtoken_services.common.files.jsonl import JsonLines
from xtoken_services.common.processes.worker import Worker
from xtoken_services.common.run.metric_lines import BEYOND_TEACHER, BITS, ERROR, TEACHER_BITS
from xtoken_services.common.run.teacher_result import read_result
from xtoken_services.common.run.verdict import difference
from xtoken_services.common.text.training_text import open_held_out, open_index, scored_documents
from xtoken_services.trainer.eval_tasks import EvalSamples, EvalTasks
from xtoken_services.trainer.loggers import eval_line
from xtoken_services.trainer.student import Student

log = logging.getLogger("xtoken.trainer")

OF_EVERY_TEXT = (BITS, ERROR, "next_token_accuracy", "nll_nats", "bytes", "tokens", "documents")
"""Metrics that every text of `eval.also` gets, with `_NAME` appended."""
BETWEEN_S = 0.25
"""Time between two calls of what an evaluation does beside its own work."""


class Evaluator:
    """Evaluates a student on the run's held-out text.

    Args:
        worker: The session.
        tokenizer: The student's.
        meanwhile: Called from time to time during an evaluation: teachers need not wait for its end to start.

    Raises:
        InputError: A task cannot be read, or a prompt leaves no room for its completion.
    """

    def __init__(self, worker: Worker, tokenizer: Any, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.worker, self.tokenizer = worker, tokenizer
        self.spec, self.packed = worker.run.spec, worker.run.packed
        self.lines = JsonLines(self.spec.output / "eval.jsonl")
        has_tasks = self.spec.eval is not None and self.spec.eval.tasks is not None
        self.tasks = EvalTasks(self.spec, tokenizer) if has_tasks else None
        self.samples = EvalSamples(self.spec, tokenizer) if self.spec.eval and self.spec.eval.samples else None
        # `alive` raises once a stop is requested; of several ranks none may leave an evaluation alone.
        self._beat = worker.alive if worker.run.world == 1 else worker.beat
        self._meanwhile, self._called_at = meanwhile, 0.0

    def evaluate(self, student: Student, step: int, *, writes: bool = True) -> dict[str, Any] | None:
        """Evaluate, and append a line to `eval.jsonl`; all ranks of a sharded student call.

        Args:
            student: The student.
            step: Optimizer steps that it was trained for.
            writes: This rank writes the line.

        Returns:
            The line; None on a rank that does not write.
        """
        assert self.spec.eval is not None
        began = time.monotonic()
        self.worker.activity("evaluating: reading the text")
        index = open_held_out(self.spec, self._on_text)
        student.eval()
        try:
            # Many widths, each seldom: compiling them would take longer.
            with torch.compiler.set_stance("force_eager"), all_cores(self.worker.run, student.device):
                result = self._measure(student, index, "evaluating")
                row = {"step": step, **asdict(result), "loss": result.nll_nats / max(result.tokens, 1)}
                for name, path in self.spec.eval.also_by_name.items():
                    text = open_index(self.spec, [path], self.spec.eval.field, self._on_text)
                    other = self._measure(student, text, f"evaluating on {name}")
                    row |= {f"{metric}_{name}": getattr(other, metric) for metric in OF_EVERY_TEXT}
                if self.tasks is not None:
                    on_fraction = partial(self.worker.activity, "evaluating on tasks")
                    row |= self.tasks.measure(student, progress=self._heartbeat, on_fraction=on_fraction, judges=writes)
                if self.samples is not None:
                    self.worker.activity("evaluating: sample completions")
                    row |= self.samples.measure(student, progress=self._heartbeat)
        finally:
            student.train()
            self.worker.activity("")
        row["seconds"] = round(time.monotonic() - began, 3)
        self._heartbeat()
        if not writes:
            return None
        row |= self._of_teachers(index.fingerprint, row)
        self.lines.append(row)
        log.info("after %d steps: %s", step, eval_line(row))
        return row

    def _of_teachers(self, held_out: str, own: dict[str, Any]) -> dict[str, float | None]:
        """Return the teachers' own bits per byte, which their workers measure before they serve.

        Args:
            held_out: Fingerprint of the held-out text.
            own: The student's result on it, from which the best teacher's differs.
        """
        row = self._of_teachers_on(held_out, own)
        assert self.spec.eval is not None
        for name, path in self.spec.eval.also_by_name.items() if self.worker.run.routes else ():
            text = open_index(self.spec, [path], self.spec.eval.field, self._on_text)
            row |= self._of_teachers_on(text.fingerprint, {}, f"_{name}")
        return row

    def _of_teachers_on(self, text: str, own: dict[str, Any], suffix: str = "") -> dict[str, float | None]:
        results: dict[str, dict[str, Any]] = {}
        for number in range(len(self.spec.teacher)):
            while (result := read_result(self.worker.run, number, text, suffix)) is None:
                self.worker.activity("waiting for the teacher's own result on the held-out text")
                if RINGS.of_teacher(number) is not None or self.worker.stopping.is_set():
                    break  # it serves, and cannot be measured, or on a machine that does not share this directory
                self._meanwhile()
                time.sleep(BETWEEN_S)
                self._heartbeat()
            if result is not None:
                results[f"{TEACHER_BITS}{suffix}_t{number}"] = result
        self.worker.activity("")
        if not results:
            return {}
        best = min(results.values(), key=lambda result: result[BITS])
        row: dict[str, float | None] = {f"{TEACHER_BITS}{suffix}": best[BITS]}
        if own and (beside := difference(own, best)) is not None:
            row[BEYOND_TEACHER] = beside.error
        return row | ({name: result[BITS] for name, result in results.items()} if len(self.spec.teacher) > 1 else {})

    def _heartbeat(self) -> None:
        self._beat()
        if time.monotonic() - self._called_at > BETWEEN_S:
            self._meanwhile()
            self._called_at = time.monotonic()

    def _on_text(self, _done: int, _all: int) -> None:
        self._heartbeat()

    def _measure(self, student: Student, index: DataIndex, activity: str) -> EvalResult:
        assert self.spec.eval is not None
        return evaluate(
            student,
            self.tokenizer,
            scored_documents(self.spec, index),
            context_length=self.spec.student.context_length,
            batch_tokens=self.spec.train.micro_batch_tokens,
            device=student.device,
            max_bytes=self.spec.eval.max_bytes,
            progress=self._heartbeat,
            outputs=student.outputs if student.blockwise else None,
            packed_outputs=student.outputs if self.packed else None,
            on_fraction=lambda fraction: self.worker.activity(activity, fraction),
        )


@contextmanager
def all_cores(run: ResolvedRun, device: torch.device) -> Iterator[None]:
    """Compute with every core of the machine: teachers wait for the trainer, once their slots are full.

    It does so where the only trainer has its part of the cores by default, and no other number was set.

    Args:
        run: The run.
        device: Device of the student.
    """
    own, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    by_default = own == max(1, cores // (1 + run.spec.teacher_processes))
    if device.type != "cpu" or run.world > 1 or run.spec.rollout is not None or not by_default:
        yield
        return
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(own)
