"""Word problems with a chain of thought, by script."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from experiments.real.questions import Questions

ALONE = "problems-alone-en"
"""Text of the answers by a teacher that read the question alone."""
TRAINED = 5_120
ANSWER_TOKENS, LONGER = 96, 128
"""Tokens of an answer; the teacher's are longer where it has read no solved problems."""
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


PROBLEMS = Questions(
    "problems-en",
    problems,
    asked="{question} Think step by step in short sentences and end with 'The answer is N.'",
    solved=SOLVED,
    match="last_number",
    ends=re.compile(r"answer is [-$\d,.]+\s*$"),
    trained=TRAINED,
)
