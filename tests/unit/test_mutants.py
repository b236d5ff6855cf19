"""The mutants that tests/mutation draws: what is changed, what is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.mutants import draw
from tests.mutation.selection import callers

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


def test_tests_of_the_mutated_function_run_first_the_cheapest_at_the_head() -> None:
    source = "LIMIT = 3\n\n\n@cache\ndef f(a=1):\n    def g():\n        return a\n\n    return g\n"
    calls = {"slow": (2.0, ["m.py:4"]), "fast": (1.0, ["m.py:4", "m.py:6"]), "other": (0.5, ["n.py:4"])}
    found = {line: callers(calls, "m.py", source, line) for line in (1, 5, 7, 9)}
    assert found == {1: [], 5: ["fast", "slow"], 7: ["fast"], 9: ["fast", "slow"]}
