"""The mutants that tests/mutation draws: what is changed, what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.mutants import draw

LEFT_ALONE = '''
"""Text."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import json

Alias = int | None


def f(x: int | None) -> int | None:
    """Text."""
    log.info("text", 1)
    raise ValueError("text", 1 + 1)
'''


def mutants_of(tmp_path: Path, source: str, count: int = 100) -> list[str]:
    (tmp_path / "module.py").write_text(source)
    return [mutant.source.strip() for mutant in draw(tmp_path, ["module.py"], count, seed=1)]


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("a < b", {"a <= b"}),
        ("a and b", {"a or b"}),
        ("a + b", {"a - b"}),
        ("not a", {"a"}),
        ("x = 3", {"x = 4"}),
        ("x = True", {"x = False"}),
        ("x = a if b else c", {"x = a if not b else c"}),
        ("f(a)", {"pass"}),
        ("x += a", {"x -= a", "pass"}),
        ("if a:\n    b", {"if not a:\n    b"}),
        ("while a:\n    continue", {"while not a:\n    continue", "while a:\n    break"}),
        ("def f():\n    return a", {"def f():\n    return None"}),
    ],
)
def test_each_kind_of_change(tmp_path: Path, source: str, mutants: set[str]) -> None:
    assert set(mutants_of(tmp_path, source)) == mutants


def test_text_annotations_and_log_calls_are_left_alone(tmp_path: Path) -> None:
    assert mutants_of(tmp_path, LEFT_ALONE) == []


def test_a_draw_repeats_and_its_mutants_differ_from_the_source(tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "xtoken_core" / "plan.py").read_text(encoding="utf-8")
    first = mutants_of(tmp_path, source, count=30)
    assert first == mutants_of(tmp_path, source, count=30)
    assert len(first) == 30
    assert ast.unparse(ast.parse(source)) not in first
