"""`xtoken trainer`: connect to a queue, load the student, train this rank to the end of the run, export the model."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from services.common.models import head_width, load_model, pick_device
from services.common.tokenizers import load_tokenizer, pad_id
from services.common.worker import QueueLink, Worker, worker_session
from services.trainer.checkpoint import Cursor
from services.trainer.evaluate import Evaluator
from services.trainer.export import export_model, model_card
from services.trainer.group import Group
from services.trainer.loop import TrainerLoop
from services.trainer.records import replace_file
from services.trainer.rings import OpenRings
from services.trainer.step import StepRunner
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher
from xtoken_core.projection import get_topk_projection
from xtoken_core.protocol.run import TRAINER

log = logging.getLogger("xtoken.trainer")


def work(link: QueueLink, *, rank: int, name: str | None) -> None:
    """Train one rank.

    Raises:
        ConfigError: The run has no such rank.
        InputError: The model, a projection or a checkpoint cannot be read.
        XtokenError: Something cannot be written, or positions are missing at the end.
    """
    name = name or f"trainer-{rank}"
    with worker_session(link, role=TRAINER, name=name, rank=rank) as worker:
        run = worker.run
        if rank >= run.spec.workers.ranks:
            raise ConfigError(f"--rank {rank}: the run {run.spec.name!r} has {run.spec.workers.ranks} ranks")
        if run.spec.workers.ranks > 1 and link.incarnation is None:
            raise ConfigError("--incarnation: all ranks of a trainer are started with the same number; give one")
        device = pick_device(run.spec.workers.device, rank)
        torch.manual_seed(run.spec.seed)
        if device.type == "cpu":
            torch.use_deterministic_algorithms(True)
        model = load_model(run.spec.student, "student", device).train()
        tokenizer = load_tokenizer(run.spec.student.tokenizer_dir, "student")
        if head_width(model) < run.student.vocab_size:
            raise InputError(
                f"the student's head has {head_width(model)} rows, its tokenizer {run.student.vocab_size} ids"
            )
        loss = make_loss(run, device)
        group = Group(rank, run.spec.workers.ranks, device)
        rings = OpenRings(worker, device)
        try:
            runner = StepRunner(worker, model, loss, rings, rank=rank, pad_id=pad_id(tokenizer))
            evaluator = Evaluator(worker, tokenizer) if run.spec.eval is not None else None
            cursor = TrainerLoop(worker, model, runner, group, evaluator).train()
            if group.leads:
                finish(worker, cursor, model, tokenizer)
            group.wait()
        finally:
            rings.close()
            group.close()


def make_loss(run: ResolvedRun, device: torch.device) -> CrossTokenizerDistillationLoss:
    """The run's loss with its projections."""
    teachers = []
    for spec, resolved in zip(run.spec.teacher, run.teachers, strict=True):
        indices, likelihoods = get_topk_projection(spec.projection, device) if spec.projection else (None, None)
        teachers.append(LossTeacher(resolved.vocab_size, indices, likelihoods, spec.weight))
    return CrossTokenizerDistillationLoss(
        run.spec.loss, student_vocab_size=run.student.vocab_size, teachers=teachers, device=device
    )


def finish(worker: Worker, cursor: Cursor, model: PreTrainedModel, tokenizer: Any) -> None:
    """Account for every position, write the summary, export the model.

    Raises:
        XtokenError: Positions are missing: the run is not what it claims to be.
    """
    run, spec = worker.run, worker.run.spec
    skipped, dead = len(cursor.skipped), len(cursor.dead)
    summary: dict[str, Any] = {
        "positions": run.positions,
        "trained": cursor.trained,
        "skipped": skipped,
        "dead": dead,
        "truncated": cursor.truncated,
        "steps": run.steps,
        "tokens": cursor.tokens,
        "skipped_reasons": cursor.skipped,
        "dead_reasons": cursor.dead,
    }
    overlap = set(cursor.skipped) & set(cursor.dead)
    if cursor.trained + skipped + dead != run.positions or overlap:
        raise XtokenError(
            f"the run's account does not add up: {cursor.trained} trained, {skipped} skipped and {dead} dead positions "
            f"are not {run.positions}"
        )
    evaluation = last_line(spec.output / "eval.jsonl") if spec.eval is not None else None
    export_model(spec.output / "model", model, tokenizer, run, model_card(run, summary, evaluation))
    replace_file(spec.output / "summary.json", json.dumps(summary, indent=2) + os.linesep)
    log.info("done: %d trained, %d skipped, %d dead of %d", cursor.trained, skipped, dead, run.positions)


def last_line(path: Path) -> dict[str, Any] | None:
    """The last JSON line of a file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return dict(json.loads(lines[-1])) if lines else None
