"""Word problems with a chain of thought: questions by script, the teacher's answers to learn from, a task to count.

A model that is asked sees two solved problems before; the records do not have them, so that the student learns to
solve a problem without. What is trained are the teacher's greedy answers that end, right or wrong.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.real.models import MissingSourceError
from xtoken_core.atomic import atomic_write
from xtoken_core.config.eval import Match
from xtoken_core.tasks import accuracy_of, read_prompts

SOURCE, ALONE = "problems-en", "problems-alone-en"
"""Texts of answers by a teacher that read two solved problems first, and by one that read the question alone."""
TASK = "problems-en.task"
TEMPLATE = "problems-en.jinja"
"""Chat template of a teacher that reads two solved problems before each conversation."""
TRAINED, HELD_OUT = 5_120, 1_200
"""Problems; of the held-out ones the first are for validation and the task, the others for the test text."""
VALIDATION = 900
"""Their answers are the 64 KiB that an adaptive weight reads at least."""
ANSWER_TOKENS, LONGER = 96, 128
"""Tokens of an answer; the teacher's are longer where it has read no solved problems."""
MATCH: Match = "last_number"
ENDS = re.compile(r"answer is [-$\d,.]+\s*$")
ASKED = "{question} Think step by step in short sentences and end with 'The answer is N.'"
SOLVED = (
    (
        "A shop has 3 boxes of 12 pens. It sells 9 pens. How many pens are left?",
        "There are 3 x 12 = 36 pens. After selling 9, 36 - 9 = 27 pens are left. The answer is 27.",
    ),
    (
        "Ann is 14. Her brother is 5 years older. How old are they together?",
        "The brother is 14 + 5 = 19. Together they are 14 + 19 = 33. The answer is 33.",
    ),
)
NAMES = ("Mia", "Leo", "Sara", "Tom", "Nina", "Paul", "Eva", "Max", "Ida", "Ben")
ITEMS = ("apples", "books", "coins", "eggs", "stamps", "cards", "shells", "nails", "tickets", "beads")


def _packs(r: random.Random, name: str, item: str) -> tuple[str, int]:
    a, b, c = r.randint(3, 9), r.randint(6, 25), r.randint(5, 17)
    return (
        f"{name} buys {a} packs of {b} {item} and gives away {c} {item}. How many {item} does {name} have left?",
        a * b - c,
    )


def _prices(r: random.Random, name: str, item: str) -> tuple[str, int]:
    a, b, c, d = r.randint(2, 9), r.randint(3, 15), r.randint(2, 9), r.randint(3, 15)
    return (
        f"{name} buys {a} {item} for {b} dollars each and {c} bags for {d} dollars each. How many dollars does {name} "
        "pay?",
        a * b + c * d,
    )


def _shares(r: random.Random, name: str, item: str) -> tuple[str, int]:
    children, each, more = r.randint(3, 9), r.randint(4, 16), r.randint(2, 20)
    return (
        f"{name} has {children * each - more} {item} and finds {more} more. {name} shares all {item} equally among "
        f"{children} children. How many {item} does each child get?",
        each,
    )


def _weeks(r: random.Random, name: str, item: str) -> tuple[str, int]:
    a, b, c = r.randint(4, 19), r.randint(2, 6), r.randint(10, 50)
    return (
        f"{name} collects {a} {item} every day. After {b} weeks {name} sells {c} {item}. How many {item} are left?",
        a * 7 * b - c,
    )


def _compared(r: random.Random, name: str, item: str) -> tuple[str, int]:
    a, times, less = r.randint(8, 30), r.randint(2, 4), r.randint(2, 7)
    return (
        f"{name} has {a} {item}. Kim has {times} times as many {item} as {name}, and Joe has {less} fewer than Kim. "
        "How many do the three have together?",
        a + a * times + a * times - less,
    )


def _halves(r: random.Random, name: str, item: str) -> tuple[str, int]:
    half, more, used = r.randint(11, 48), r.randint(5, 30), r.randint(2, 10)
    return (
        f"{name} has {2 * half} {item}. {name} loses half of them, buys {more} new ones and then uses {used}. How many "
        f"{item} does {name} have now?",
        half + more - used,
    )


KINDS: tuple[Callable[[random.Random, str, str], tuple[str, int]], ...] = (
    _packs, _prices, _shares, _weeks, _compared, _halves
)  # fmt: skip


def problems(count: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """Yield different questions with the number that answers each.

    Args:
        count: Number of questions.
        seed: Seed of names, items and numbers.
    """
    generator, seen = random.Random(seed), set()
    while len(seen) < count:
        question, answer = generator.choice(KINDS)(generator, generator.choice(NAMES), generator.choice(ITEMS))
        if question not in seen:
            seen.add(question)
            yield question, answer


def conversation(question: str) -> list[dict[str, str]]:
    """Return the messages that a model is asked with before it has been trained: two solved problems come first."""
    return [*_shots(), *asking(question)]


def asking(question: str) -> list[dict[str, str]]:
    """Return the messages of a question alone."""
    return [{"role": "user", "content": ASKED.format(question=question)}]


def template_with_shots(template: str) -> str:
    """Return a chat template that shows the solved problems before the messages it is given.

    Args:
        template: The model's own.
    """
    return f"{{%- set messages = {json.dumps(_shots())} + messages -%}}\n{template}"


def _shots() -> list[dict[str, str]]:
    shots = [({"role": "user", "content": ASKED.format(question=asked)}, said) for asked, said in SOLVED]
    return [message for asked, said in shots for message in (asked, {"role": "assistant", "content": said})]


def write_problems(
    texts: Path, source: str, generate: Callable[[list[list[dict[str, str]]]], Iterator[str | None]]
) -> float:
    """Write the task, and the answers of a teacher as records with `messages` in three splits.

    Returns:
        Fraction of the task's problems that the teacher answers right; an answer without an end is wrong.

    Args:
        texts: Directory of the texts.
        source: `SOURCE` or `ALONE`.
        generate: Returns the greedy answer to each conversation; None for one without an end.

    Raises:
        MissingSourceError: The teacher ended hardly any answer.
    """
    all_of_them = list(problems(TRAINED + HELD_OUT))
    held_out = all_of_them[TRAINED:]
    task = ({"messages": asking(question), "answer": answer, "match": MATCH} for question, answer in held_out)
    atomic_write(texts / f"{TASK}.jsonl", lines_of(task))
    asked = conversation if source == SOURCE else asking
    made = generate([asked(question) for question, _ in all_of_them])
    # A text that the limit cut has no number at its end.
    answers = [answer if answer and ENDS.search(answer) else None for answer in made]
    if sum(answer is not None for answer in answers) < len(answers) // 2:
        raise MissingSourceError("the teacher ended fewer than half of its answers: ask for shorter ones")
    records = [
        {"messages": [*asking(question), {"role": "assistant", "content": answer}]} if answer else None
        for (question, _), answer in zip(all_of_them, answers, strict=True)
    ]
    write_splits(texts, source, records, TRAINED, VALIDATION)
    prompts = read_prompts(texts / f"{TASK}.jsonl", MATCH, HELD_OUT)
    right, _ = accuracy_of(prompts, ([answer or ""] for answer in answers[TRAINED:]))
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
