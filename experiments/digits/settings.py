"""Sizes of the experiment: one scale for a GPU, one for two cores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A model's: heads are 64 wide, the embedding is the head.

    Attributes:
        hidden: Width.
        layers: Depth.
    """

    hidden: int
    layers: int


@dataclass(frozen=True)
class Scratch:
    """Training from scratch, with cross-entropy.

    Attributes:
        steps: Optimiser steps.
        rows: Packed sequences of a step.
        context: Tokens of each.
        learning_rate: At its highest; it falls to a twentieth along a cosine.
        warmup: Steps over which it rises.
    """

    steps: int
    rows: int
    context: int
    learning_rate: float
    warmup: int


@dataclass(frozen=True)
class Continued:
    """The compared training: the same for every method.

    Attributes:
        steps: Optimiser steps.
        samples: Documents of a step.
        learning_rate: At its highest; it falls to a tenth along a cosine.
        warmup: Steps over which it rises.
        vocab_topk: Teacher tokens that P-KL compares, unless it takes all.
        evaluate_every: Steps between two readings of held-out text.
    """

    steps: int
    samples: int
    learning_rate: float
    warmup: int
    vocab_topk: int
    evaluate_every: int


@dataclass(frozen=True)
class Scale:
    """One size of the whole experiment.

    Attributes:
        name: Of its result files.
        digits: Operands have up to so many.
        limit: And are below this.
        shares: How many operands of up to 1, 2, ... digits there are, relative to each other.
        documents: Arithmetic documents for training from scratch, and as many new ones to continue with.
        lines: Problems of a document.
        code_share: Documents of source text, relative to arithmetic ones.
        wrong: Share of wrong answers in the student's text.
        teacher_vocabulary: Tokens.
        student_words: Tokens that are no numbers of several digits.
        teacher: Shape of the teacher that splits numbers.
        student: Shape.
        teach: How the teacher that splits numbers is made.
        teach_same: How the one with the student's tokenizer is made, of the student's shape.
        begin: How the students that every method starts from are made.
        go_on: The compared training.
        seeds: How many first students there are.
        problems: Held-out problems of each number of digits that are answered, at most.
        side_by_side: Runs at a time.
        device: As in a run file.
    """

    name: str
    digits: int
    limit: int
    shares: tuple[int, ...]
    documents: int
    lines: int
    code_share: float
    wrong: float
    teacher_vocabulary: int
    student_words: int
    teacher: Shape
    student: Shape
    teach: Scratch
    teach_same: Scratch
    begin: Scratch
    go_on: Continued
    seeds: int
    problems: int
    side_by_side: int
    device: str

    @property
    def numerals(self) -> list[str]:
        """Numbers of two digits and more that are one token to the student."""
        return [f"{n:0{width}d}" for width in range(2, self.digits + 1) for n in range(10**width)]

    def plain(self) -> dict[str, Any]:
        """Return all settings as JSON has them."""
        return asdict(self)


FULL = Scale(
    name="full",
    digits=3,
    limit=1000,
    shares=(2, 4, 3),
    documents=60_000,
    lines=8,
    code_share=0.4,
    wrong=0.25,
    teacher_vocabulary=2048,
    student_words=1536,
    teacher=Shape(256, 4),
    student=Shape(256, 4),
    teach=Scratch(steps=2600, rows=40, context=224, learning_rate=2e-3, warmup=100),
    teach_same=Scratch(steps=3200, rows=56, context=192, learning_rate=2e-3, warmup=100),
    begin=Scratch(steps=3000, rows=56, context=192, learning_rate=2e-3, warmup=100),
    go_on=Continued(steps=1000, samples=64, learning_rate=5e-4, warmup=50, vocab_topk=256, evaluate_every=250),
    seeds=3,
    problems=500,
    side_by_side=8,
    device="auto",
)

REDUCED = Scale(
    name="reduced",
    digits=2,
    limit=30,
    shares=(1, 2),
    documents=10_000,
    lines=8,
    code_share=0.2,
    wrong=0.25,
    teacher_vocabulary=512,
    student_words=448,
    teacher=Shape(64, 2),
    student=Shape(64, 2),
    teach=Scratch(steps=2500, rows=16, context=96, learning_rate=4e-3, warmup=100),
    teach_same=Scratch(steps=2500, rows=16, context=96, learning_rate=4e-3, warmup=100),
    begin=Scratch(steps=2000, rows=16, context=96, learning_rate=4e-3, warmup=100),
    go_on=Continued(steps=400, samples=24, learning_rate=1e-3, warmup=20, vocab_topk=128, evaluate_every=400),
    seeds=3,
    problems=300,
    side_by_side=4,
    device="cpu",
)

SCALES = {scale.name: scale for scale in (FULL, REDUCED)}
