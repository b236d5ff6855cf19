"""`xtoken trainer`: connect to a queue, load the student, train this rank to the end of the run, export the model."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from xtoken_core.alignment.tables import token_table
from xtoken_core.config.loss import PAIR_KINDS
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError, InputError, XtokenError, first_line
from xtoken_core.losses import CrossTokenizerDistillationLoss
from xtoken_core.losses.chunk_classes import token_kinds
from xtoken_core.losses.common import LossTeacher
from xtoken_core.losses.custom import losses_with
from xtoken_core.losses.registry import load_teacher
from xtoken_core.queue.run.names import TRAINER
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.files.jsonl import lines_before_step, replace_file
from xtoken_services.common.models.loading import head_width, pick_device
from xtoken_services.common.processes.worker import QueueLink, Worker, worker_session
from xtoken_services.common.run.custom_loss import check_custom_loss
from xtoken_services.common.run.memory_estimate import check_room, custom_loss_memory
from xtoken_services.common.run.metric_lines import BITS, ERROR, TEACHER_BITS, covered, finite
from xtoken_services.common.run.verdict import difference
from xtoken_services.common.tokenizers.loading import pad_id, tokenizer_of
from xtoken_services.trainer.checkpoint import Cursor
from xtoken_services.trainer.completion_samples import CompletionSamples
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.evaluate import Evaluator
from xtoken_services.trainer.export import export_student, position_counts
from xtoken_services.trainer.loop import TrainerLoop
from xtoken_services.trainer.rings import TeacherRings
from xtoken_services.trainer.step import StepRunner
from xtoken_services.trainer.student import load_student

log = logging.getLogger("xtoken.trainer")


def work(link: QueueLink, *, rank: int, name: str | None, custom_loss: str | None = None) -> None:
    """Train one rank.

    Args:
        link: The queue.
        rank: Number of this rank in its node group.
        name: The worker's name; None: from its rank.
        custom_loss: `module:Class` of the mode `custom`, from the command line.

    Raises:
        ConfigError: The run has no such rank.
        InputError: The model, a projection or a checkpoint cannot be read.
        XtokenError: Something cannot be written, or positions are missing at the end.
    """
    group = RankGroup.of_environment()
    if group is not None:
        rank = int(os.environ.get("LOCAL_RANK", group.rank))
        link = replace(link, incarnation=link.incarnation or group.incarnation())
    try:
        with worker_session(link, role=TRAINER, name=name or f"trainer-{rank}", rank=rank) as worker:
            run, workers = worker.run, worker.run.spec.workers
            world_rank = run.group * workers.ranks + rank
            if rank >= workers.ranks or (group is not None and (group.size, group.rank) != (run.world, world_rank)):
                raise ConfigError(f"{_started_as(rank, group)}: the run {run.spec.name!r} has {_ranks_of(run)}")
            if run.world > 1 and link.incarnation is None:
                raise ConfigError("--incarnation: all ranks of a trainer are started with the same number; give one")
            group = group or RankGroup(world_rank, run.world)
            group.nodes, group.beat = workers.nodes, worker.beat
            train(worker, group, rank, custom_loss)
    except BaseException:
        if group is not None:
            group.close(failed=True)
        raise
    if group is not None:
        group.close()


def _started_as(rank: int, group: RankGroup | None) -> str:
    if group is None:
        return f"--rank {rank}"
    return f"torchrun with {group.size} processes, of which this is {group.rank}"


def _ranks_of(run: ResolvedRun) -> str:
    workers = run.spec.workers
    if workers.nodes == 1:
        return f"{workers.ranks} ranks (workers.ranks)"
    return f"{workers.nodes} node groups of {workers.ranks} ranks, and this is the queue of group {run.group}"


def train(worker: Worker, group: RankGroup, rank: int, custom_loss: str | None = None) -> None:
    """Train this rank's part of a session's run, and export the model.

    Args:
        worker: The session.
        group: All ranks.
        rank: Number of this rank in its node group.
        custom_loss: As for `work`.

    Raises:
        InputError: The model, a projection or a checkpoint cannot be read.
        XtokenError: Something cannot be written, or positions are missing at the end.
    """
    run = worker.run
    check_custom_loss(run.spec.loss, custom_loss)
    device = pick_device(run.spec.workers.device, rank)
    torch.manual_seed(run.spec.seed)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
    else:
        torch.cuda.set_device(device)
    check_room(run, device)
    worker.activity("loading the student")
    student = load_student(run.spec, device, ranks=group.size, packed=run.packed)
    tokenizer = tokenizer_of(run.spec.student, "student")
    if head_width(student.model) < run.student.vocab_size:
        raise InputError(
            f"the student's head has {head_width(student.model)} rows, its tokenizer {run.student.vocab_size} ids"
        )
    worker.activity("reading projections and tables")
    loss = make_loss(run, device, custom_loss, tokenizer)
    check_room(run, device, custom_loss_memory(run, loss.losses, run.student.vocab_size))
    worker.activity("")
    rings = TeacherRings(worker, device)
    try:
        samples = CompletionSamples(run, writes=group.is_leader)
        runner = StepRunner(
            worker,
            student,
            loss,
            rings,
            group,
            rank=rank,
            pad_id=pad_id(tokenizer),
            samples=samples,
            token_bytes=torch.tensor([float(len(p)) for p in token_table(tokenizer).pieces], device=device),
        )
        evaluator = Evaluator(worker, tokenizer, rings.poll) if run.spec.eval is not None else None
        loop = TrainerLoop(worker, student, runner, group, evaluator)
        exported = loop.train()
        worker.activity("exporting the model")
        finish(worker, loop, exported, tokenizer, writes=group.is_leader)
        group.barrier()
    finally:
        rings.close()


def make_loss(
    run: ResolvedRun, device: torch.device, custom_loss: str | None = None, tokenizer: Any = None
) -> CrossTokenizerDistillationLoss:
    """Return the run's loss with its projections and tables.

    Args:
        run: The run.
        device: Device of the logits.
        custom_loss: `module:Class` of the mode `custom`.
        tokenizer: The student's, for metrics by class of chunk; None: they are left out.

    Raises:
        InputError: A projection or table cannot be read, or a projection lies outside the control plane's roots.
    """
    teachers = []
    for teacher, (spec, resolved) in enumerate(zip(run.spec.teacher, run.teachers, strict=True)):
        file, same = run.pair_file(teacher), run.same_tokenizer[teacher]
        if file is not None and file == spec.projection:
            file = check_allowed(file, f"teacher.{teacher}.projection")
        reads_tables = not same and PAIR_KINDS.get(run.spec.loss.mode_of(teacher)) == "chain"
        teachers.append(
            load_teacher(
                None if reads_tables else file,
                vocab_size=resolved.vocab_size,
                student_vocab_size=run.student.vocab_size,
                device=device,
                weight=spec.weight,
                tables=file if reads_tables else None,
                own_tokenizer=not same,
            )
        )
    return CrossTokenizerDistillationLoss(
        run.spec.loss,
        student_vocab_size=run.student.vocab_size,
        teachers=[_with_tokenizers(run, number, teacher) for number, teacher in enumerate(teachers)],
        device=device,
        loss_classes=losses_with(custom_loss),
        token_kinds=None if tokenizer is None else token_kinds(token_table(tokenizer).pieces),
    )


def _with_tokenizers(run: ResolvedRun, number: int, teacher: LossTeacher) -> LossTeacher:
    """Pass both tokenizers to a custom loss; the library's own losses need none."""
    if run.spec.loss.mode_of(number) != "custom":
        return teacher
    return replace(
        teacher,
        tokenizers=lambda: (
            tokenizer_of(run.spec.student, "student"),
            tokenizer_of(run.spec.teacher[number], run.spec.teacher_name(number)),
        ),
    )


def finish(worker: Worker, loop: TrainerLoop, exported: Cursor, tokenizer: Any, *, writes: bool) -> None:
    """Check that every position is accounted for, write the summary and export the model; all ranks call.

    Args:
        worker: The session.
        loop: The training, which has ended.
        exported: Position of the student's weights.
        tokenizer: The student's.
        writes: This rank writes the files.

    Raises:
        XtokenError: No step has changed the weights, or positions are missing or counted twice.
    """
    run, output, cursor = worker.run, worker.run.spec.output, loop.cursor
    check_trained(run, cursor)
    model = loop.student.full_model(run.spec)
    if not writes or model is None:
        return
    summary = position_counts(run, cursor)
    skipped, dead = summary["skipped"], summary["dead"]
    overlap = set(cursor.skipped) & set(cursor.dead)
    expected = min(cursor.step * run.spec.train.samples_per_step, run.positions)
    if cursor.trained + skipped + dead != expected or overlap:
        raise XtokenError(
            f"the counts of positions do not add up: {cursor.trained} trained, {skipped} skipped and {dead} dead "
            f"positions are not {expected}"
        )
    summary |= held_out_summary(list(lines_before_step(output / "eval.jsonl", exported.step + 1)))
    summary |= loop.best.summary(cursor)
    export_student(output / "model", run, exported, model, tokenizer, output=output)
    if run.spec.push_to is not None:
        worker.activity(f"pushing the model to {run.spec.push_to}")
        summary["pushed"] = push_model(output / "model", run.spec.push_to)
    replace_file(output / "summary.json", json.dumps(summary, indent=2) + os.linesep)
    log.info("done: %d trained, %d skipped, %d dead of %d", cursor.trained, skipped, dead, run.positions)


def check_trained(run: ResolvedRun, cursor: Cursor) -> None:
    """Refuse to export a student that no step has changed.

    Raises:
        InputError: The text has the reason.
    """
    if cursor.updates:
        return
    reason = next(iter((cursor.skipped | cursor.dead).values()), "")
    whys = [f"{len(cursor.skipped) + len(cursor.dead)} were skipped (first: {reason})"] if reason else []
    if cursor.nonfinite:
        whys.append(f"{cursor.nonfinite} steps had no finite loss or gradient")
    elif cursor.trained:
        whys.append(f"{cursor.trained} have no token that counts in the loss")
    raise InputError(f"nothing was trained, no model is written: of {run.positions} samples {', '.join(whys)}")


def held_out_summary(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of `summary.json` about the held-out text; empty before a second evaluation.

    Args:
        evaluations: Lines of `eval.jsonl` up to the step of the exported weights.
    """
    if len(evaluations) < 2:
        return {}
    first, last = evaluations[0], evaluations[-1]
    change = difference(last, first)
    teacher = finite(last).get(TEACHER_BITS)
    beside = {TEACHER_BITS: teacher, "distance_covered": covered(first, last)}
    return {
        "held_out": {
            "bits_per_byte_at_start": finite(first).get(BITS),
            **{name: finite(last).get(name) for name in (BITS, ERROR, "documents", "bytes", "step")},
            "since_start": None if change is None else change.verdict,
            "difference_error": None if change is None else change.error,
            **(beside if teacher is not None else {}),
        }
    }


def push_model(directory: Path, repo: str) -> dict[str, Any]:
    """Upload a model directory as a commit; the repository is created, as a private one, if there is none.

    A failure is logged and does not fail the run: its model is complete on this machine.

    Args:
        directory: The model.
        repo: `org/name`.

    Returns:
        The entry `pushed` of `summary.json`: `repo`, and `commit` or `error`.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN"))
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=directory, commit_message="Model distilled by xtoken")
    except Exception as error:  # of the library, its HTTP client, or the server
        reason = first_line(error)
        log.error(
            "the model could not be pushed to %s (%s): push it by `hf upload %s %s`", repo, reason, repo, directory
        )
        return {"repo": repo, "error": reason}
    log.info("pushed the model to %s, commit %s", repo, commit.oid)
    return {"repo": repo, "commit": commit.oid}
