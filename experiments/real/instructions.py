"""Instructions that a script can check: prompts by script, a strict scorer, the teacher's answers to learn from.

A prompt asks for a few words on a topic with one or two demands. An answer counts if it follows all of them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.real.questions import lines_of, write_splits
from xtoken_core.atomic import atomic_write

SOURCE = "instructions-en"
TASK, SAMPLED = "instructions-en.task", "instructions-en.sampled"
"""The most likely answer to each held-out prompt, and one that is drawn at temperature 1."""
TEMPLATE_FILE = "turns.jinja"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '<end_of_turn>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)
"""Chat template of a student without one: Gemma's tokens."""
TRAINED, HELD_OUT = 3_000, 1_000
"""Prompts; the answers to the first held-out ones are for validation, the others for the test text."""
VALIDATION = 700
"""Their answers are the 64 KiB that an adaptive weight reads at least."""
ANSWER_TOKENS = 128
ASKS = (
    "Write about {}.", "Describe {}.", "Explain {} to a child.", "Give advice about {}.", "Tell me something about {}.",
    "Say why {} can be useful.", "Write a short advertisement for {}.", "Tell a short story about {}.",
)  # fmt: skip
_TOPICS = (
    "bicycles,old bridges,a rainy day,bread,the moon,chess,cats,a village market,winter,honey bees,trains,a lighthouse,"
    "coffee,forests,volcanoes,a garden,whales,maps,clocks,a school trip,soup,kites,the desert,owls,libraries,a small "
    "boat,music lessons,snow,tomatoes,friendship,a long walk,mountains,night skies,horses,windmills,a birthday party,"
    "rivers,letters,pottery,tea,a broken window,football,farms,spiders,islands,a new neighbour,cheese,museums,swimming,"
    "dogs,candles,a lost key,elephants,umbrellas,paper,a city park,sleep,castles,apples,the sea,robots,shoes,dreams,"
    "penguins,cooking,an old radio,butterflies,ladders,a street band,glass,frogs,mirrors,camping,oranges,a night train,"
    "storms,painting,foxes,salt,a quiet room,the sun,tunnels,baking,parrots,bookshops,a wooden table,fishing,caves,"
    "lemons,a busy kitchen,autumn,turtles,hats,running,a tall tower,ice,wolves,puzzles,a picnic,stones"
)
TOPICS = tuple(_TOPICS.split(","))
_WORDS = (
    "river,lantern,garden,silver,window,gentle,morning,stone,paper,bright,winter,bridge,music,simple,yellow,mountain,"
    "quiet,market,copper,letter,summer,basket,ocean,engine,careful,village,thunder,pocket,circle,forest"
)
WORDS = tuple(_WORDS.split(","))
FIRST = ("Today", "Often", "Imagine", "Once", "Many", "Perhaps", "Every", "Long", "Sometimes", "People")
LAST = ("That is all.", "Now you know.", "Thank you for reading.", "Try it yourself.", "The end.", "What do you think?")
KEYS = ("name", "use", "colour", "size", "place", "price", "reason", "example")
BRIEF = "Keep it short."
"""Not checked: an answer that the limit cuts teaches nothing."""
SENTENCE_END = re.compile(r"[.!?]+[\"')]*(?=\s|$)")
FENCE = re.compile(r"^```(?:json)?\n(.*?)\n?```$", re.DOTALL)

Check = list[Any]
"""Name of a check and its value."""


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _is_json(text: str, keys: Sequence[str]) -> bool:
    found = FENCE.match(text)
    try:
        value = json.loads(found[1] if found else text)
    except ValueError:
        return False
    return (
        isinstance(value, dict) and list(value) == list(keys) and all(isinstance(each, str) for each in value.values())
    )


CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "sentences": lambda text, count: len(SENTENCE_END.findall(text)) == count,
    "bullets": lambda text, count: [line[:2] for line in _lines(text)] == ["- "] * count,
    "numbered": lambda text, count: [line.split()[0] for line in _lines(text)] == [f"{n + 1}." for n in range(count)],
    "words": lambda text, count: len(text.split()) <= count,
    "json": _is_json,
    "paragraphs": lambda text, mark: [line == mark for line in _lines(text)] == [False, True, False],
    "lower": lambda text, _: text == text.lower(),
    "include": _has_word,
    "commas": lambda text, _: "," not in text,
    "first": lambda text, word: re.match(rf"\W*{word}\b", text, re.IGNORECASE) is not None,
    "last": lambda text, sentence: text.lower().endswith(sentence.lower()),
    "quoted": lambda text, _: len(text) > 2 and text[0] == text[-1] == '"' and text.count('"') == 2,
}
"""How the stripped text of an answer is checked, by the name of the check."""
FREE = "free"
DETAILS = {
    FREE: ("lower", "include", "commas", "first", "last", "quoted"),
    "sentences": ("lower", "include", "commas", "first", "quoted"),
    "bullets": ("lower", "include", "commas"),
    "numbered": ("lower", "include", "commas"),
    "words": ("lower", "include", "commas", "first", "last", "quoted"),
    "json": ("include",),
    "paragraphs": ("lower", "include", "commas", "first", "last"),
}
"""Details that go with a form: none or one; one or two without a form."""
APART = ({"first", "quoted"}, {"last", "quoted"})


def follows(answer: str, checks: Sequence[Check]) -> bool:
    """Return True if an answer is there and passes all checks.

    Args:
        answer: The text of the answer.
        checks: Names of checks with their values.
    """
    text = answer.strip()
    return bool(text) and all(CHECKS[name](text, value) for name, value in checks)


def _form(r: random.Random, name: str) -> tuple[str, Check]:
    count = r.randint(2, 5)
    if name == "sentences":
        return f"Use exactly {count} sentences.", [name, count]
    if name == "bullets":
        return f"Answer only with a list of exactly {count} lines that each begin with '- '.", [name, count]
    if name == "numbered":
        return f"Answer only with exactly {count} numbered lines, '1.' to '{count}.'.", [name, count]
    if name == "words":
        return f"Use at most {10 + 5 * count} words.", [name, 10 + 5 * count]
    if name == "json":
        keys = r.sample(KEYS, min(count, 4))
        named = ", ".join(f'"{key}"' for key in keys)
        return f"Answer only with a JSON object with the keys {named}, whose values are short texts.", [name, keys]
    return "Write two paragraphs with a line between them that holds only '***'.", [name, "***"]


def _detail(r: random.Random, name: str) -> tuple[str, Check]:
    if name == "lower":
        return "Use only lower case letters.", [name, ""]
    if name == "include":
        word = r.choice(WORDS)
        return f"Use the word '{word}'.", [name, word]
    if name == "commas":
        return "Do not use any commas.", [name, ""]
    if name == "first":
        word = r.choice(FIRST)
        return f"Begin with the word '{word}'.", [name, word]
    if name == "last":
        sentence = r.choice(LAST)
        return f"End with the sentence '{sentence}'", [name, sentence]
    return "Put the whole answer in double quotation marks.", [name, ""]


def instructions(count: int, seed: int = 0) -> Iterator[tuple[str, list[Check]]]:
    """Yield different prompts with the checks of their answers.

    Args:
        count: Number of prompts.
        seed: Seed of everything that is drawn.
    """
    r, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        form = r.choice(tuple(DETAILS))
        least = int(form == FREE)
        chosen = r.sample(DETAILS[form], r.randint(least, least + 1))
        parts = [*([] if least else [_form(r, form)]), *(_detail(r, name) for name in chosen)]
        prompt = " ".join([r.choice(ASKS).format(r.choice(TOPICS)), *(text for text, _ in parts), BRIEF])
        if prompt not in seen and not any(pair <= set(chosen) for pair in APART):
            seen.add(prompt)
            yield prompt, [check for _, check in parts]


def asking(prompt: str) -> list[dict[str, str]]:
    """Return the messages of a prompt."""
    return [{"role": "user", "content": prompt}]


def write_answers(texts: Path, generate: Callable[[list[list[dict[str, str]]]], Iterator[str | None]]) -> float:
    """Write the held-out prompts with their checks, and a teacher's answers as records with `messages`.

    Returns:
        Fraction of the held-out prompts that the teacher follows; an answer without an end does not.

    Args:
        texts: Directory of the texts.
        generate: Returns the greedy answer to each conversation; None for one without an end.
    """
    every = list(instructions(TRAINED + HELD_OUT))
    task = ({"messages": asking(prompt), "checks": checks} for prompt, checks in every[TRAINED:])
    atomic_write(texts / f"{TASK}.jsonl", lines_of(task))
    answers = list(generate([asking(prompt) for prompt, _ in every]))
    records = [
        {"messages": [*asking(prompt), {"role": "assistant", "content": answer}]} if answer else None
        for (prompt, _), answer in zip(every, answers, strict=True)
    ]
    write_splits(texts, SOURCE, records, TRAINED, VALIDATION)
    pairs = zip(every[TRAINED:], answers[TRAINED:], strict=True)
    return sum(follows(answer or "", checks) for (_, checks), answer in pairs) / HELD_OUT


def read_task(texts: Path) -> list[tuple[list[dict[str, str]], list[Check]]]:
    """Return the held-out prompts as messages, with the checks of their answers."""
    rows = map(json.loads, (texts / f"{TASK}.jsonl").read_text(encoding="utf-8").splitlines())
    return [(row["messages"], row["checks"]) for row in rows]
