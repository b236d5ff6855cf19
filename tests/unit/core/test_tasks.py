"""Tasks of an evaluation: which records are prompts, and how completions are judged."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import cases
from xtoken_core.config.eval import TasksSpec
from xtoken_core.errors import InputError
from xtoken_core.tasks import accuracy_of, answered_prompt, read_prompts


def prompts_of(tmp_path: Path, *records: Any, limit: int = 100) -> list[Any]:
    path = tmp_path / "task.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return read_prompts(path, "exact", limit)


@cases(
    "record, completion, right",
    ({"answer": "Paris"}, " Paris\nand more", True),
    ({"answer": "Paris"}, "Paris, France", False),
    ({"answer": ["Paris", "paris"]}, "paris", True),
    ({"answer": 42, "match": "number"}, " is 42. Then 7", True),
    ({"answer": "1,234.5", "match": "number"}, "1234.50", True),
    ({"answer": -3, "match": "number"}, "x = −3", True),
    ({"answer": 0.00001, "match": "number"}, "0.00001", True),
    ({"answer": 0.00001, "match": "number"}, "1", False),
    ({"answer": 1e22, "match": "number"}, "10000000000000000000000", True),
    ({"answer": "2e3", "match": "number"}, "2,000", True),
    ({"answer": 2000, "match": "number"}, "about 2e3 metres", True),
    ({"answer": 5, "match": "number"}, "5em", True),
    ({"answer": 3, "match": "number"}, "none", False),
    ({"answer": 12, "match": "last_number"}, "3 + 4 = 7, and 7 + 5 = 12. The answer is 12.", True),
    ({"answer": 12, "match": "last_number"}, "12 - 5 = 7", False),
    ({"answer": 12, "match": "last_number"}, "between 7-12", True),
    ({"answer": -12, "match": "last_number"}, "7+5=-12", True),
    ({"answer": 12, "match": "last_number"}, "none", False),
    ({"answer": 12, "match": "boxed"}, r"\boxed{7}, then \boxed{12.0}", True),
    ({"answer": r"\frac{1}{2}", "match": "boxed"}, r"so \boxed{ \frac{1} {2} }.", True),
    ({"answer": 12, "match": "boxed"}, r"\boxed{12 apples}", False),
    ({"answer": 12, "match": "boxed"}, "12", False),
    ({"answer": 3, "match": "number"}, "30", False),
    ({"answer": 12345, "match": "number"}, "it is 12,345, or so", True),
    ({"answer": "1234567.8", "match": "number"}, "$1,234,567.8,", True),
    ({"answer": 1, "match": "number"}, "1,2,3", True),
    ({"answer": 123, "match": "number"}, "1,2,3", False),
    ({"answer": 5, "match": "number"}, "May 5,2024", True),
    ({"answer": 1, "match": "number"}, "1,234,56", True),
    ({"answer": 1, "match": "number"}, "1,234,5678", True),
    ({"answer": 1234, "match": "number"}, "1234,567", True),
    ({"answer": 0, "match": "number"}, "0,123", True),
    ({"answer": "B", "choices": ["A", "B"], "match": "choice"}, "Because (b) is right, not A", True),
    ({"answer": "B", "choices": ["A", "B"], "match": "choice"}, "A or B", False),
    ({"answer": "B", "choices": ["A", "B"], "match": "choice"}, "Abba", False),
    ({"answer": "new  york", "match": "contains"}, "It is New\nYork.", True),
    ({"answer": "york", "match": "contains"}, "London", False),
)
def test_completion_is_judged(tmp_path: Path, record: dict[str, Any], completion: str, right: bool) -> None:
    (prompt,) = prompts_of(tmp_path, {"prompt": "?"} | record)
    assert prompt.is_right(completion) is right


@cases(
    "record, message",
    ("{", "it is not JSON"),
    ("[1]", "no JSON object"),
    ({"answer": "a"}, "either a `prompt`"),
    ({"prompt": "?", "messages": [{"role": "user", "content": "?"}], "answer": "a"}, "either a `prompt`"),
    ({"prompt": 3, "answer": "a"}, "either a `prompt`"),
    ({"prompt": "caf\ud800", "answer": "a"}, "half of a surrogate pair"),
    ({"prompt": "?"}, "needs an `answer`, or `tests`"),
    ({"prompt": "?", "answer": [" "]}, "`answer` takes"),
    ({"prompt": "?", "answer": True}, "`answer` takes"),
    (
        {"prompt": "?", "answer": "a", "match": "regex"},
        "none of exact, number, last_number, boxed, choice, contains, code",
    ),
    ({"prompt": "?", "answer": "a", "match": "number"}, "not one number"),
    ({"prompt": "?", "answer": "a", "match": "choice"}, "need each other"),
    ({"prompt": "?", "answer": "a", "choices": ["b"], "match": "choice"}, "none of its choices"),
    ({"prompt": "?", "answer": "a", "hint": "x"}, "unknown field 'hint'"),
    ({"messages": ["hello"], "answer": "a"}, "objects with `role`"),
    ({"prompt": "?", "answer": "a", "match": "code"}, "`tests`, a text, and match = code"),
    ({"prompt": "?", "tests": "assert f()"}, "`tests`, a text, and match = code"),
    ({"prompt": "?", "tests": ["assert f()"], "match": "code"}, "`tests`, a text, and match = code"),
    ({"prompt": "?", "answer": "a", "tests": "assert f()", "match": "code"}, "needs an `answer`, or `tests`"),
)
def test_bad_record_is_refused_with_its_line(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"task\.jsonl:2 is no prompt") as error:
        prompts_of(tmp_path, {"prompt": "?", "answer": "a"}, record)
    assert message in str(error.value)


def test_files_of_prompts(tmp_path: Path) -> None:
    assert len(prompts_of(tmp_path, *[{"prompt": "?", "answer": "a"}] * 5, "not read", limit=5)) == 5
    with pytest.raises(InputError, match="has no prompts"):
        prompts_of(tmp_path, "")
    with pytest.raises(InputError, match="cannot read the task"):
        read_prompts(tmp_path / "missing.jsonl", "exact", 1)


def test_accuracy_is_the_mean_over_samples(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, {"prompt": "?", "answer": "a"}, {"prompt": "!", "answer": "b"})
    assert accuracy_of(prompts, [["a", "b"], ["a", "c"]]) == (0.25, 0.5)


INSIDE = 'def f(x):\n    """Double."""\n'
ASKED = [{"role": "user", "content": "Double a number."}]


@cases(
    "prompt, completion, code",
    (
        {"prompt": INSIDE},
        "    y = x\n\n    return 2 * y\n\nprint(f(input()))",
        INSIDE + "    y = x\n\n    return 2 * y\n",
    ),
    ({"prompt": "# f doubles.\n"}, "def f(x):\n    return 2 * x\n", "# f doubles.\ndef f(x):\n    return 2 * x\n"),
    ({"messages": ASKED}, "def f(x):\n    return 2 * x", "def f(x):\n    return 2 * x"),
    ({"prompt": INSIDE}, "So:\n```python\ndef f(x): ...\n```\nor\n```\nno\n```", "def f(x): ...\n"),
    ({"messages": ASKED}, "```json\n{}\n```\nand\n  ```\n  def f(x):\n    ...\n  ```", "def f(x):\n  ...\n"),
    ({"messages": ASKED}, "```py\ndef f(x): ...", "def f(x): ..."),
    ids=["inside", "text", "messages", "first-block", "other-languages", "open-block"],
)
def test_the_program_of_a_completion(tmp_path: Path, prompt: dict[str, Any], completion: str, code: str) -> None:
    tests = "assert f(2) == 4"
    (read,) = prompts_of(tmp_path, prompt | {"tests": tests, "match": "code"})
    asked: list[str] = []
    for verdict in (True, False):
        assert read.is_right(completion, lambda text, verdict=verdict: asked.append(text) or verdict) is verdict
    assert asked == [f"{code}\n\n{tests}\n"] * 2


def test_settings_of_tasks() -> None:
    assert list(TasksSpec(path=(Path("x/sums.jsonl"), Path("a b.jsonl"))).by_name) == ["sums", "a_b"]
    with pytest.raises(ValueError, match="set temperature"):
        TasksSpec(path=Path("a.jsonl"), samples=4)
    with pytest.raises(ValueError, match="same file name"):
        TasksSpec(path=(Path("x/a.jsonl"), Path("y/a.jsonl")))


def test_an_answer_that_is_several_numbers_is_refused() -> None:
    """By which of them it would be judged is a guess: a solution may end in its result, a fraction is two."""
    for answer in ("48/2 = 24 in May, 48 + 24 = 72 in all. #### 72", "1/2"):
        for match in ("number", "last_number"):
            with pytest.raises(ValueError, match="its answer is not one number: give the number alone"):
                answered_prompt({"answer": ["3", answer], "match": match}, "exact")
    assert answered_prompt({"answer": "$1,072.50 in all"}, "last_number").is_right("so it is 1072.5")
