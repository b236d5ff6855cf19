"""Questions by script that have one right answer: a teacher's answers to learn from, a task to count.

A teacher may see a few answered questions before; the records do not have them, so that the student learns
to answer without. What is trained are the teacher's greedy answers that end, right or wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.real.models import MissingSourceError
from xtoken_core.atomic import atomic_write
from xtoken_core.config.eval import Match
from xtoken_core.tasks import accuracy_of, read_prompts

HELD_OUT = 1_200
"""Questions; the first are for validation and the task, the others for the test text."""
VALIDATION = 900
"""Their answers are the 64 KiB that an adaptive weight reads at least."""


@dataclass(frozen=True)
class Questions:
    """Questions of one sort.

    Attributes:
        source: Name of the text of a teacher's answers that has read the answered questions.
        make: Yields so many different questions, each with its answer.
        asked: What a model reads; `{question}` stands for the question.
        solved: Questions with the answers that a teacher is shown.
        match: How an answer is judged.
        ends: What an answer holds that no limit has cut.
        trained: Number of questions that are trained.
    """

    source: str
    make: Callable[[int], Iterator[tuple[str, Any]]]
    asked: str
    solved: tuple[tuple[str, str], ...]
    match: Match
    ends: re.Pattern[str]
    trained: int

    @property
    def task(self) -> str:
        """Name of the task."""
        return f"{self.source}.task"

    @property
    def template(self) -> str:
        """File of the chat template that shows the answered questions."""
        return f"{self.source}.jinja"

    def asking(self, question: str) -> list[dict[str, str]]:
        """Return the messages of a question alone."""
        return [{"role": "user", "content": self.asked.format(question=question)}]

    def shown(self) -> list[dict[str, str]]:
        """Return the messages of the answered questions."""
        return [
            message
            for question, said in self.solved
            for message in (*self.asking(question), {"role": "assistant", "content": said})
        ]

    def template_after(self, template: str) -> str:
        """Return a chat template that shows the answered questions before the messages it is given.

        Args:
            template: The model's own.
        """
        return f"{{%- set messages = {json.dumps(self.shown())} + messages -%}}\n{template}"

    def write(
        self, texts: Path, source: str, generate: Callable[[list[list[dict[str, str]]]], Iterator[str | None]]
    ) -> float:
        """Write the task, and the answers of a teacher as records with `messages` in three splits.

        Returns:
            Fraction of the task's questions that the teacher answers right; an answer without an end is wrong.

        Args:
            texts: Directory of the texts.
            source: Name of the text; where it is not that of these questions, the teacher reads the question alone.
            generate: Returns the greedy answer to each conversation; None for one without an end.

        Raises:
            MissingSourceError: The teacher ended hardly any answer.
        """
        every = list(self.make(self.trained + HELD_OUT))
        task = (
            {"messages": self.asking(question), "answer": answer, "match": self.match}
            for question, answer in every[self.trained :]
        )
        atomic_write(texts / f"{self.task}.jsonl", lines_of(task))
        shown = self.shown() if source == self.source else []
        # A text that the limit cut has no end.
        answers = [
            answer if answer and self.ends.search(answer) else None
            for answer in generate([shown + self.asking(question) for question, _ in every])
        ]
        if sum(answer is not None for answer in answers) < len(answers) // 2:
            raise MissingSourceError("the teacher ended fewer than half of its answers: ask for shorter ones")
        records = [
            {"messages": [*self.asking(question), {"role": "assistant", "content": answer}]} if answer else None
            for (question, _), answer in zip(every, answers, strict=True)
        ]
        write_splits(texts, source, records, self.trained, VALIDATION)
        prompts = read_prompts(texts / f"{self.task}.jsonl", self.match, HELD_OUT)
        right, _ = accuracy_of(prompts, ([answer or ""] for answer in answers[self.trained :]))
        return right


def write_splits(texts: Path, source: str, records: Sequence[Any], trained: int, validation: int) -> None:
    """Write records in three splits, those that are None left out.

    Args:
        texts: Directory of the texts.
        source: Name of the files.
        records: Records to train, then those for validation, then those for test.
        trained: Number of the first.
        validation: Number of the second.
    """
    tested = trained + validation
    ends = {"train": (0, trained), "validation": (trained, tested), "test": (tested, len(records))}
    for split, (first, last) in ends.items():
        atomic_write(texts / f"{source}.{split}.jsonl", lines_of(filter(None, records[first:last])))


def lines_of(records: Any) -> str:
    """Return records as JSON lines."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
