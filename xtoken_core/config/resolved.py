"""A run with everything filled in that its files decide: what the queue hands to every worker."""

from __future__ import annotations

from pydantic import ValidationError

from xtoken_core.config.base import Part
from xtoken_core.config.complaints import describe
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError


class ResolvedModel(Part):
    """What a model's files say.

    Attributes:
        vocab_size: Token ids of its tokenizer: the highest plus one.
        head_width: Rows of its head, at least `vocab_size`.
        tokenizer_fingerprint: Hash of the tokenizer's files.
        hidden_size: Columns of its head; 0 if its configuration does not say.
        max_length: Tokens that it was made for; 0 likewise.
        weights_fingerprint: Of its configuration and weights.
    """

    vocab_size: int
    head_width: int
    tokenizer_fingerprint: str
    hidden_size: int = 0
    max_length: int = 0
    weights_fingerprint: str = ""


class ResolvedRun(Part):
    """A RunSpec and what its files say.

    Attributes:
        records: Records of the training data, bad ones included (`N`).
        positions: Positions of the run (`P`).
        group: The node group that a queue hands this out for, `0 .. workers.nodes - 1`.
    """

    spec: RunSpec
    student: ResolvedModel
    teachers: tuple[ResolvedModel, ...]
    projection_fingerprints: tuple[str, ...]
    data_fingerprint: str
    records: int
    positions: int
    group: int = 0

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

    def owns(self, position: int) -> bool:
        """Whether a position is this node group's."""
        per_step = self.spec.train.samples_per_step
        return position % per_step * self.spec.workers.nodes // per_step == self.group

    def identity(self) -> dict[str, str | int | float | bool]:
        """What makes it this run and no other: a checkpoint is resumed by a run that has all of it and nothing more.

        It is what is trained, on what, and in which precision. How the optimiser goes about it (rates, clipping, decay)
        and how the work is spread over processes and GPUs may change from one start to the next.
        """
        spec = self.spec
        return {
            "name": spec.name,
            "samples_per_step": spec.train.samples_per_step,
            "records": self.records,
            "positions": self.positions,
            "seed": spec.seed,
            "shuffle": spec.data.shuffle,
            "append_eos": spec.data.append_eos,
            "student length": spec.student.context_length,
            "student dtype": spec.student.dtype,
            "weights in float32": spec.train.master_weights or spec.student.dtype == "float32",
            **{f"length of teacher {i}": teacher.context_length for i, teacher in enumerate(spec.teacher)},
            **{f"weight of teacher {i}": teacher.weight for i, teacher in enumerate(spec.teacher)},
            **{f"dtype of teacher {i}": teacher.dtype for i, teacher in enumerate(spec.teacher)},
            **{f"fp8 of teacher {i}": teacher.fp8 for i, teacher in enumerate(spec.teacher)},
            "micro_batch_tokens": spec.train.micro_batch_tokens,
            "loss": spec.loss.model_dump_json(),
            "lora": spec.train.lora.model_dump_json(exclude={"export"}) if spec.train.lora else "",
            **self.fingerprints(),
        }

    def fingerprints(self) -> dict[str, str]:
        """Of the text, the models, the tokenizers and the projections."""
        found = {
            "data": self.data_fingerprint,
            "student model": self.student.weights_fingerprint,
            "student tokenizer": self.student.tokenizer_fingerprint,
        }
        for index, (teacher, projection) in enumerate(zip(self.teachers, self.projection_fingerprints, strict=True)):
            found[f"model of teacher {index}"] = teacher.weights_fingerprint
            found[f"tokenizer of teacher {index}"] = teacher.tokenizer_fingerprint
            found[f"projection of teacher {index}"] = projection
        return found


def parse_resolved_run(document: bytes, *, source: str) -> ResolvedRun:
    """Read a resolved run from JSON.

    Raises:
        ConfigError: It is none, or of another version.
    """
    try:
        return ResolvedRun.model_validate_json(document)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error, ResolvedRun)}") from error
