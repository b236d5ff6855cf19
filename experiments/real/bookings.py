"""Bookings as JSON: requests by script, and the one line of JSON that answers each; every value must be right."""

from __future__ import annotations

import calendar
import json
import random
import re
from collections.abc import Iterator

from experiments.real.questions import Questions
from experiments.real.word_problems import NAMES

ANSWER_TOKENS = 64
"""Tokens of an answer."""
SOLVED = (
    (
        "Hello, this is Rosa. I paid six dollars, so please book five adults and three children at 11:45 in the "
        "morning on the 8th of April.",
        '{"name": "Rosa", "people": 8, "date": "04-08", "time": "11:45", "deposit": 6}',
    ),
    (
        "On November 25, Otto comes at 7:20 in the evening with a deposit of 35 dollars. The table is for three "
        "couples.",
        '{"name": "Otto", "people": 6, "date": "11-25", "time": "19:20", "deposit": 35}',
    ),
    (
        "Please keep a table for a family of five and two friends: the 2nd of June, 1:05 in the afternoon. The name is "
        "Lisa, and 10 dollars are already paid.",
        '{"name": "Lisa", "people": 7, "date": "06-02", "time": "13:05", "deposit": 10}',
    ),
)
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ORDINALS = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd"}
FORMS = (
    "{name} would like a table for {people} on {date} at {time}, and pays {deposit} in advance.",
    "On {date}, {name} comes at {time} with a deposit of {deposit}. The table is for {people}.",
    "Please keep a table for {people}: {date}, {time}. The name is {name}, and {deposit} are already paid.",
    "Hello, this is {name}. I paid {deposit}, so please book {people} at {time} on {date}.",
)


def _people(r: random.Random) -> tuple[str, int]:
    a, b = r.randint(2, 6), r.randint(2, 5)
    return r.choice(
        (
            (f"{NUMBERS[a]} people", a),
            (f"{NUMBERS[a]} adults and {NUMBERS[b]} children", a + b),
            (f"{NUMBERS[a]} couples", 2 * a),
            (f"a family of {NUMBERS[a]} and {NUMBERS[b]} friends", a + b),
        )
    )


def _date(r: random.Random) -> tuple[str, str]:
    month, day = r.randint(1, 12), r.randint(1, 28)
    name = calendar.month_name[month]
    said = (f"the {day}{ORDINALS.get(day, 'th')} of {name}", f"{name} {day}")
    return r.choice(said), f"{month:02}-{day:02}"


def _time(r: random.Random) -> tuple[str, str]:
    hour, minute = r.choice((8, 9, 10, 11, *range(13, 22))), 5 * r.randrange(12)
    part = "morning" if hour < 12 else "afternoon" if hour < 17 else "evening"
    return f"{(hour - 1) % 12 + 1}:{minute:02} in the {part}", f"{hour:02}:{minute:02}"


def _deposit(r: random.Random) -> tuple[str, int]:
    amount = r.randint(2, 12)
    return r.choice(((f"{NUMBERS[amount]} dollars", amount), (f"{5 * amount} dollars", 5 * amount)))


def bookings(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield different requests with the line of JSON that answers each.

    Args:
        count: Number of requests.
        seed: Seed of everything that is drawn.
    """
    r, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        name = r.choice(NAMES)
        drawn = {"people": _people(r), "date": _date(r), "time": _time(r), "deposit": _deposit(r)}
        request = r.choice(FORMS).format(name=name, **{key: said for key, (said, _) in drawn.items()})
        if request not in seen:
            seen.add(request)
            yield request, json.dumps({"name": name} | {key: value for key, (_, value) in drawn.items()})


BOOKINGS = Questions(
    "bookings-en",
    bookings,
    asked="{question} Write this booking as one line of JSON with the keys name, people, date (MM-DD), time (HH:MM, 24 "
    "hours) and deposit.",
    solved=SOLVED,
    match="exact",
    ends=re.compile(r"^\{.*\}$"),
    trained=1_280,
)
