"""A run with the values that its files determine; the queue hands it to every worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from xtoken_core.config.base import ConfigModel
from xtoken_core.config.identity import ModelIdentity, RunIdentity, TeacherIdentity
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.routing import Routes
from xtoken_core.config.spec import RunSpec
from xtoken_core.config.validation_errors import describe
from xtoken_core.errors import ConfigError
from xtoken_core.prompt_plan import PromptPlan

BESIDE_THE_IDENTITY = {"weights": "shared_memory", "stop_when_worse": None, "learning_rate": None} | {
    name: field.default for name, field in RolloutSpec.model_fields.items() if name.startswith(("url", "workers"))
}
"""Settings of rollouts that a run may change when it resumes."""


class ResolvedModel(ConfigModel):
    """Values read from a model's files.

    Attributes:
        vocab_size: Token ids of its tokenizer: the highest plus one.
        head_width: Rows of its head, at least `vocab_size`.
        tokenizer_fingerprint: Hash of the tokenizer's files.
        hidden_size: Columns of its head; 0 if its configuration does not say.
        weights_fingerprint: Of its configuration and weights.
        template_fingerprint: SHA-256 of the chat template that the settings name; empty without one.
        prompt: What only this model reads before a text; empty without it.
    """

    vocab_size: int
    head_width: int
    tokenizer_fingerprint: str
    hidden_size: int = 0
    weights_fingerprint: str = ""
    template_fingerprint: str = ""
    prompt: str = ""


class ResolvedRun(ConfigModel):
    """A RunSpec and the values read from its files.

    Attributes:
        records: Records of the training data, bad ones included (`N`).
        positions: Positions of the run (`P`).
        mixture: Per source of weighted texts its records and its samples in an epoch; empty without weights.
        pair_files: Per teacher the file that its loss reads about the two tokenizers, a projection or chain tables;
            None: it reads none. Empty: the projections that the settings name.
        projection_fingerprints: Those of the files above, "" without one.
        piece_bytes: Bytes of text of a record at most, where long documents are divided; otherwise 0.
        packed: The samples of a micro-batch lie in one row, on every side.
        packing_obstacle: Why they do not, although they may; empty otherwise.
        routes: The teachers of its samples; None: all compare every sample.
        group: The node group that a queue hands this out for, `0 .. workers.nodes - 1`.
    """

    spec: RunSpec
    student: ResolvedModel
    teachers: tuple[ResolvedModel, ...]
    projection_fingerprints: tuple[str, ...]
    pair_files: tuple[Path | None, ...] = ()
    data_fingerprint: str
    held_out_fingerprint: str = ""
    records: int
    positions: int
    mixture: tuple[tuple[int, int], ...] = ()
    piece_bytes: int = 0
    packed: bool = False
    packing_obstacle: str = ""
    routes: Routes | None = None
    group: int = 0

    @property
    def same_tokenizer(self) -> tuple[bool, ...]:
        """Per teacher, True if it has the student's tokenizer and is compared token by token."""
        return same_tokenizer_of(self.spec, self.student, self.teachers)

    def pair_file(self, teacher: int) -> Path | None:
        """Return the file that a teacher's loss reads about the two tokenizers."""
        return self.pair_files[teacher] if self.pair_files else self.spec.teacher[teacher].projection

    @property
    def epoch(self) -> int:
        """Positions of an epoch: the records, or what their mixture takes to hold each of them."""
        return sum(samples for _, samples in self.mixture) or self.records

    @property
    def first_pass(self) -> int:
        """Positions before the first at which a text is read again: no record is there twice."""
        # The samples of a text are spread evenly but for one, and for one more with each text before it.
        ends = [(records - n) * self.epoch // samples for n, (records, samples) in enumerate(self.mixture)]
        return max(min(ends, default=self.records), 0)

    @property
    def steps(self) -> int:
        """Optimiser steps of the run; the last may be short."""
        return -(-self.positions // self.spec.train.samples_per_step)

    @property
    def span(self) -> int:
        """Positions that collators may be ahead of the lowest one that is not done."""
        return self.spec.queue.span_steps * self.spec.train.samples_per_step

    @property
    def world(self) -> int:
        """Trainers of all node groups."""
        return self.spec.workers.nodes * self.spec.workers.ranks

    @property
    def prompts(self) -> PromptPlan:
        """Positions that are prompts, which a rollout worker completes."""
        spec = self.spec
        after = 0 if spec.rollout is None else spec.rollout.steps_before(self.steps)
        return PromptPlan(spec.train.samples_per_step, self.steps, after, *spec.prompts_per_step, unit=spec.block_size)

    @property
    def restart(self) -> tuple[int, float] | None:
        """The step at which the schedule of learning rates starts again, and its highest rate; None: it does not."""
        rate = self.spec.rollout.learning_rate if self.spec.rollout is not None else None
        return (self.prompts.after, rate) if rate is not None else None

    def owns(self, position: int) -> bool:
        """Return True if a position is this node group's."""
        per_step = self.spec.train.samples_per_step
        return position % per_step * self.spec.workers.nodes // per_step == self.group

    def identity(self) -> RunIdentity:
        """Return the settings and fingerprints that a checkpoint must have in common with this run."""
        spec = self.spec
        student = ModelIdentity(
            model=self.student.weights_fingerprint,
            tokenizer=self.student.tokenizer_fingerprint,
            chat_template=self.student.template_fingerprint,
            context_length=spec.student.context_length,
            dtype=spec.student.dtype,
        )
        teachers = tuple(
            TeacherIdentity(
                model=files.weights_fingerprint,
                tokenizer=files.tokenizer_fingerprint,
                chat_template=files.template_fingerprint,
                prompt=files.prompt,
                context_length=teacher.context_length,
                dtype=teacher.dtype,
                projection=projection,
                special_tokens=teacher.special_tokens,
                weight=teacher.weight,
                quantized=teacher.quantized,
                topk=teacher.topk if teacher.content == "topk" else None,
                sync_decay=spec.sync_decays.get(number),
            )
            for number, (teacher, files, projection) in enumerate(
                zip(spec.teacher, self.teachers, self.projection_fingerprints, strict=True)
            )
        )
        return RunIdentity(
            name=spec.name,
            seed=spec.seed,
            data=self.data_fingerprint,
            held_out=self.held_out_fingerprint,
            held_out_bytes=spec.eval.max_bytes if spec.eval is not None else 0,
            records=self.records,
            positions=self.positions,
            mixture=self.mixture,
            shuffle=spec.data.shuffle,
            append_eos=spec.data.append_eos,
            train_on=spec.data.train_on,
            long=spec.data.long,
            samples_per_step=spec.train.samples_per_step,
            micro_batch_tokens=spec.train.micro_batch_tokens,
            packed=self.packed,
            student=student,
            float32_weights=spec.train.master_weights or spec.student.dtype == "float32",
            lora=spec.train.lora.model_copy(update={"export": "merged"}) if spec.train.lora else None,
            optimizer=spec.train.optimizer,
            teacher=teachers,
            loss=spec.loss,
            rollout=spec.rollout.model_copy(update=BESIDE_THE_IDENTITY) if spec.rollout else None,
            routes=self.routes,
        )


def same_tokenizer_of(spec: RunSpec, student: ResolvedModel, teachers: Sequence[ResolvedModel]) -> tuple[bool, ...]:
    """Return for each teacher True if it has the student's tokenizer and is compared token by token.

    A named projection is used, also between equal tokenizers. A teacher with a prompt has rows of its own, and so have
    all teachers of a run with completions, whose losses compare bytes.
    """
    own = student.tokenizer_fingerprint if spec.rollout is None else None
    pairs = zip(teachers, spec.teacher, strict=True)
    return tuple(
        files.tokenizer_fingerprint == own and teacher.projection is None and teacher.prompt is None
        for files, teacher in pairs
    )


def parse_resolved_run(document: bytes, *, source: str) -> ResolvedRun:
    """Read a resolved run from JSON.

    Raises:
        ConfigError: It is none, or of another version.
    """
    try:
        return ResolvedRun.model_validate_json(document)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error, ResolvedRun)}") from error
