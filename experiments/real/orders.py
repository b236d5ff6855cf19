"""Orders as JSON: requests by script, and the one line of JSON that answers each; every value must be right."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

from experiments.real.questions import Questions
from experiments.real.word_problems import NAMES

ANSWER_TOKENS = 96
"""Tokens of an answer."""
SOLVED = (
    (
        "Hello, this is Rosa. Please bring 4 pizzas at 9 dollars each and 3 salads at 12 dollars each. I pay with 100 "
        "dollars.",
        '{"name": "Rosa", "pizzas": "4 x 9 = 36", "salads": "3 x 12 = 36", "total": "36 + 36 = 72", "back": '
        '"100 - 72 = 28"}',
    ),
    (
        "Otto orders 6 soups at 14 dollars each and 5 rolls at 3 dollars each. He gives 200 dollars.",
        '{"name": "Otto", "soups": "6 x 14 = 84", "rolls": "5 x 3 = 15", "total": "84 + 15 = 99", "back": '
        '"200 - 99 = 101"}',
    ),
)
DISHES = ("pizzas", "cakes", "salads", "soups", "pies", "rolls", "teas", "plums")
NOTES = (150, 200, 250, 300)
FORMS = (
    "{name} orders {0} and {1}, and gives {paid} dollars.",
    "Hello, this is {name}. Please bring {0} and {1}. I pay with {paid} dollars.",
    "The order of {name}: {0}, and also {1}. {paid} dollars are paid.",
    "{name} wants {0}, and then {1}. There are {paid} dollars to pay it.",
)


def orders(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield different requests with the line of JSON that answers each.

    Args:
        count: Number of requests.
        seed: Seed of everything that is drawn.
    """
    r, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        name = r.choice(NAMES)
        lines = [(dish, r.randint(2, 9), r.randint(3, 15)) for dish in r.sample(DISHES, 2)]
        prices = [number * each for _, number, each in lines]
        paid = r.choice([note for note in NOTES if note > sum(prices)])
        said = (f"{number} {dish} at {each} dollars each" for dish, number, each in lines)
        request = r.choice(FORMS).format(*said, name=name, paid=paid)
        if request not in seen:
            seen.add(request)
            answer = {dish: f"{number} x {each} = {number * each}" for dish, number, each in lines}
            answer["total"] = f"{prices[0]} + {prices[1]} = {sum(prices)}"
            answer["back"] = f"{paid} - {sum(prices)} = {paid - sum(prices)}"
            yield request, json.dumps({"name": name} | answer)


ORDERS = Questions(
    "orders-en",
    orders,
    asked="{question} Write one line of JSON with the name, how the price of each item, the total and the money back "
    "are computed.",
    solved=SOLVED,
    match="exact",
    ends=re.compile(r"^\{.*\}$"),
    trained=1_280,
)
