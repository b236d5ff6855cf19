"""The text: arithmetic, one problem a line, and the standard library's sources; what is held out is in neither."""

from __future__ import annotations

import json
import random
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from experiments.digits.settings import Scale
from xtoken_services.demo.corpus import is_held_out, library_files

HELD_OUT_ONE_IN = 16
SHOWN = 3
"""Solved problems before a question."""
_CODE_BYTES = 240


class Problem(NamedTuple):
    """`left operator right =` with its answer; no difference is below 0."""

    left: int
    operator: str
    right: int

    @property
    def answer(self) -> int:
        """Return the right answer."""
        return self.left + self.right if self.operator == "+" else self.left - self.right

    @property
    def digits(self) -> int:
        """Of the longer operand."""
        return len(str(max(self.left, self.right)))

    @property
    def question(self) -> str:
        """Everything up to the equals sign."""
        return f"{self.left}{self.operator}{self.right}="

    @property
    def held_out(self) -> bool:
        """Return whether it is one of the sixteenth that no model is trained on; both orders of a sum are."""
        low, high = sorted((self.left, self.right))
        return zlib.crc32(f"{low}{self.operator}{high}".encode()) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Texts:
    """Files of `{"text": ...}` lines.

    Attributes:
        clean: To train teachers on.
        wrong: The same documents with wrong answers: for the first students.
        more: New documents, with wrong answers too: to continue with.
        arithmetic: Held-out problems.
        code: Held-out sources.
    """

    directory: Path

    @property
    def clean(self) -> Path:  # noqa: D102
        return self.directory / "clean.jsonl"

    @property
    def wrong(self) -> Path:  # noqa: D102
        return self.directory / "wrong.jsonl"

    @property
    def more(self) -> Path:  # noqa: D102
        return self.directory / "more.jsonl"

    @property
    def arithmetic(self) -> Path:  # noqa: D102
        return self.directory / "heldout-arithmetic.jsonl"

    @property
    def code(self) -> Path:  # noqa: D102
        return self.directory / "heldout-code.jsonl"


def write_texts(directory: Path, scale: Scale) -> Texts:
    """Write all files, the same for the same scale and the same Python."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = Texts(directory)
    rng = random.Random(1)
    code, held_out_code = source_documents()
    rng.shuffle(code)
    count = int(scale.documents * scale.code_share)
    first, second = ([code[i % len(code)] for i in range(start, start + count)] for start in (0, count))
    both = [arithmetic_documents(scale, rng, scale.documents) for _ in range(2)]
    order = list(range(scale.documents + count))
    rng.shuffle(order)
    clean, wrong = [*both[0][0], *first], [*both[0][1], *first]
    more = [*both[1][1], *second]
    _write(texts.clean, [clean[i] for i in order])
    _write(texts.wrong, [wrong[i] for i in order])
    _write(texts.more, [more[i] for i in order])
    rng.shuffle(held_out_code)
    _write(texts.code, held_out_code)
    _write(texts.arithmetic, held_out_documents(scale))
    return texts


def arithmetic_documents(scale: Scale, rng: random.Random, count: int) -> tuple[list[str], list[str]]:
    """Return so many documents with right answers, and the same ones with some wrong answers."""
    right, wrong = [], []
    for _ in range(count):
        problems = [training_problem(scale, rng) for _ in range(scale.lines)]
        right.append("".join(f"{p.question}{p.answer}\n" for p in problems))
        answers = [spoilt(p.answer, rng) if rng.random() < scale.wrong else str(p.answer) for p in problems]
        wrong.append("".join(f"{p.question}{a}\n" for p, a in zip(problems, answers, strict=True)))
    return right, wrong


def training_problem(scale: Scale, rng: random.Random) -> Problem:
    """Draw a problem that is not held out."""
    while True:
        found = draw(scale, rng)
        if not found.held_out:
            return found


def draw(scale: Scale, rng: random.Random) -> Problem:
    """Draw a problem; each operand has up to as many digits as the scale's fractions say, and is below its limit."""
    left, right = (
        rng.randrange(min(10**digits, scale.limit))
        for digits in rng.choices(range(1, scale.digits + 1), scale.shares, k=2)
    )
    operator = rng.choice("+-")
    return Problem(max(left, right), "-", min(left, right)) if operator == "-" else Problem(left, "+", right)


def spoilt(answer: int, rng: random.Random) -> str:
    """Replace one digit of an answer by another; no leading 0 comes in.

    >>> spoilt(579, random.Random(0)) != "579"
    True
    """
    text = str(answer)
    place = rng.randrange(len(text))
    others = [d for d in "0123456789" if d != text[place] and (d != "0" or place or len(text) == 1)]
    return text[:place] + rng.choice(others) + text[place + 1 :]


def held_out_problems(scale: Scale) -> dict[int, list[Problem]]:
    """Return problems that no model was trained on, by number of digits, at most `scale.problems` of each."""
    rng = random.Random(2)
    found: dict[int, dict[Problem, None]] = {digits: {} for digits in range(1, scale.digits + 1)}
    for _ in range(400 * scale.problems):
        problem = draw(scale, rng)
        if problem.held_out and len(found[problem.digits]) < scale.problems:
            found[problem.digits][problem] = None
    return {digits: list(problems) for digits, problems in found.items()}


def prompt_of(scale: Scale, problem: Problem, shown: int) -> str:
    """Return a document up to a problem's equals sign, after so many solved problems of the training text's kind."""
    rng = random.Random(problem.question)
    others = [training_problem(scale, rng) for _ in range(shown)]
    return "".join(f"{p.question}{p.answer}\n" for p in others) + problem.question


def held_out_documents(scale: Scale) -> list[str]:
    """Return held-out problems as documents, with the right answers."""
    problems = [problem for some in held_out_problems(scale).values() for problem in some]
    random.Random(3).shuffle(problems)
    lines = [f"{p.question}{p.answer}\n" for p in problems]
    return ["".join(lines[i : i + scale.lines]) for i in range(0, len(lines) - scale.lines + 1, scale.lines)]


def source_documents() -> tuple[list[str], list[str]]:
    """Return stretches of the standard library's sources, to train on and held out, by file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[bool, list[str]] = {False: [], True: []}
    for path in library_files(library):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found[is_held_out(path, library)] += cut_at_lines(text)
    return found[False], found[True]


def cut_at_lines(text: str) -> Iterator[str]:
    """Yield whole lines, up to 240 bytes of them; longer lines and blank stretches are left out."""
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        width = len(line.encode("utf-8"))
        if size + width > _CODE_BYTES:
            if "".join(lines).strip():
                yield "".join(lines)
            lines, size = [], 0
        if width <= _CODE_BYTES:
            lines.append(line)
            size += width


def read_texts(path: Path) -> list[str]:
    """Return a file's documents."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def _write(path: Path, documents: Sequence[str]) -> None:
    partial = path.with_suffix(".part")
    with partial.open("w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    partial.replace(path)
