"""The mutants that tests/mutation draws: what is changed, what is left alone."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import run
from tests.mutation.mutants import draw
from tests.mutation.selection import Test, concerning, function_around, ordered

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
    source = (Path(__file__).parents[3] / "xtoken_core" / "plan.py").read_text(encoding="utf-8")
    first = mutants_of(tmp_path, source, count=5)
    assert first == mutants_of(tmp_path, source, count=5)
    assert len(first) == 5
    assert ast.unparse(ast.parse(source)) not in first


def test_tests_of_a_function() -> None:
    source = "LIMIT = 3\n\n\n@cache\ndef f(a=1):\n    def g():\n        return a\n\n    return g\n"
    assert [function_around("m.py", source, line) for line in (1, 5, 7, 9)] == ["", "", "m.py:6", "m.py:4"]
    calls = {"a::slow": Test(2.0, []), "a::fast": Test(1.0, []), "b::other": Test(0.5, [])}
    assert ordered(calls, calls) == ["b::other", "a::fast", "a::slow"]


def test_tests_that_concern_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from services.queue import top\n")
    (tmp_path / "b.py").write_text("import services.queue.top as top\n")
    (tmp_path / "c.py").write_text("import services\n")
    calls = {
        "a.py::package": Test(1.0, []),
        "b.py::module": Test(1.0, []),
        "c.py::calls": Test(1.0, ["services/queue/top.py:4"]),
        "c.py::other": Test(1.0, ["services/queue/server.py:4"]),
    }
    assert list(concerning(calls, tmp_path, "services/queue/top.py")) == [
        "a.py::package",
        "b.py::module",
        "c.py::calls",
    ]
    assert list(concerning(calls, tmp_path, "services/queue/server.py")) == ["a.py::package", "c.py::other"]
    assert list(concerning(calls, tmp_path, "services/queue/deeper/memory.py")) == ["a.py::package", "b.py::module"]


def test_mutants_of_changed_lines_alone(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *arguments], cwd=tmp_path, check=True)

    (tmp_path / "services").mkdir()
    old = "a = 1\nb = 2\nc = 3\nd = 4\ne = 5\n"
    for name in ("kept", "moved", "changed", "left"):
        (tmp_path / "services" / f"{name}.py").write_text(old)
    git("init", "--quiet")
    git("add", "--all")
    git("commit", "--quiet", "--message=old")
    (tmp_path / "services" / "moved.py").rename(tmp_path / "services" / "new_name.py")
    for name in ("new_name", "changed", "left"):
        (tmp_path / "services" / f"{name}.py").write_text(old.replace("b = 2\n", "").replace("d = 4", "d = 4 + 4"))
    git("add", "--all")
    package = run.changed_since(tmp_path, "HEAD", ["*/left.py"])
    mutants = draw(tmp_path, package.paths, 100, 1, package.lines)
    assert {(mutant.path, mutant.line) for mutant in mutants} == {
        ("services/changed.py", 3),
        ("services/new_name.py", 3),
    }
    assert {mutant.after for mutant in mutants} == {"d = 4 - 4", "d = 5 + 4", "d = 4 + 5"}


UNSTEADY = """
from pathlib import Path

import package


def test_alone():
    # Fails once with every mutant, and no more.
    mark = Path({folder!r}) / str(package.h())
    before = mark.exists()
    mark.touch()
    assert before or package.h() == 7


def test_without_folder():
    # As on a busy machine: from the second run on it fails with and without a mutant.
    mark = Path({folder!r}) / "second"
    before = mark.exists()
    package.h()
    mark.touch()
    assert not before
"""
TREE = {
    "package.py": "def f(a):\n    return a + 1\n\n\ndef g(a):\n    return a - 1\n\n\ndef h():\n    return 7\n",
    "tests/test_f.py": "from package import f, g\n\n\ndef test_f():\n    assert f(2) == 3\n    g(1)\n",
    "tests/test_broken.py": "def test_broken():\n    assert False\n",
}


def results_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the tests of a tree on all mutants of its `package.py`; the entry of the result file."""
    monkeypatch.setattr(run, "COPIED", ("package.py", "tests"))
    arguments = argparse.Namespace(count=100, seed=1, jobs=2, out=folder / "results.json")
    run.mutate("package", run.Package(("package.py",), ("tests",)), arguments, folder)
    found: dict[str, Any] = json.loads(arguments.out.read_text())["package"]
    return found


@pytest.mark.slow
def test_mutants_that_a_test_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = results_of(tmp_path, monkeypatch)
    # Those of f are noticed; the only test of g asserts nothing, and h is not called.
    assert found["outcomes"] == {"noticed": 3, "survived": 5}
    assert {entry["line"] for entry in found["survivors"]} == {6, 10}
    assert found["left_out"] == ["tests/test_broken.py::test_broken"]
    report = {"package": found | {"waiting": [0, 1, 2, 3, 4, 5, 6], "unnoticed": []}}
    (tmp_path / "results.json").write_text(json.dumps(report))
    assert results_of(tmp_path, monkeypatch)["unnoticed"] == [n for n in found["unnoticed"] if n < 7], "it resumes"
    monkeypatch.delattr(run, "record")
    (tmp_path / "results.json").write_text(json.dumps({"package": found}))
    assert results_of(tmp_path, monkeypatch) == found, "it is not run again"


@pytest.mark.slow
def test_a_failure_that_the_mutant_did_not_cause_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tree"
    (folder / "tests").mkdir(parents=True)
    (folder / "package.py").write_text("def h():\n    return 7\n")
    (folder / "tests" / "test_h.py").write_text(UNSTEADY.format(folder=str(tmp_path)))
    found = results_of(folder, monkeypatch)
    assert found["outcomes"] == {"noticed": 0, "survived": 2}
    assert found["unsteady"] == ["tests/test_h.py::test_alone", "tests/test_h.py::test_without_folder"]
