"""Questions by script: their answers, and what a teacher's answers become."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.real import questions
from experiments.real.models import MissingSourceError
from experiments.real.orders import ORDERS
from experiments.real.word_problems import ALONE, PROBLEMS

FEW = replace(PROBLEMS, trained=20)


def test_an_orders_json_is_computed_right() -> None:
    made = list(ORDERS.make(200))
    assert len({question for question, _ in made}) == 200 and made == list(ORDERS.make(200))
    for question, answer in (*ORDERS.solved, *made):
        assert ORDERS.ends.search(answer)
        order = json.loads(answer)
        assert order.pop("name") in question
        for said in order.values():
            left, sign, right, _, value = said.split()
            a, b = int(left), int(right)
            assert int(value) == {"x": a * b, "+": a + b, "-": a - b}[sign]
        first, second, total, back = (int(said.split()[-1]) for said in order.values())
        assert total == first + second and back >= 0


@pytest.mark.parametrize("source", [PROBLEMS.source, ALONE])
def test_a_teachers_answers_become_records_and_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(questions, "HELD_OUT", 8)
    monkeypatch.setattr(questions, "VALIDATION", 5)
    every = list(FEW.make(28))
    asked: list[Any] = []

    def generate(conversations: list[Any]) -> Iterator[str | None]:
        asked.extend(conversations)
        for number, (_, answer) in enumerate(every):
            yield None if number % 7 == 0 else f"So it is. The answer is {answer + (number == 22)}."

    assert FEW.write(tmp_path, source, generate) == 6 / 8, "one has no end, one is wrong"
    shown = FEW.shown() if source == PROBLEMS.source else []
    assert asked[3] == [*shown, *FEW.asking(every[3][0])] and len(asked) == 28
    train, validation, test = (
        [json.loads(line) for line in (tmp_path / f"{source}.{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation", "test")
    )
    assert (len(train), len(validation), len(test)) == (17, 4, 3)
    assert train[0]["messages"][:-1] == FEW.asking(every[1][0]), "what is shown is in no record"
    task = [json.loads(line) for line in (tmp_path / f"{FEW.task}.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in task] == [answer for _, answer in every[20:]]
    with pytest.raises(MissingSourceError, match="fewer than half"):
        FEW.write(tmp_path, source, lambda conversations: iter([None] * len(conversations)))
