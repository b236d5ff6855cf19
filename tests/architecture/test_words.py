"""Standard words: identifiers and phrases that the field has better words for do not come back.

python -m tests.architecture.test_words    # list every offender, by file
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.cases import cases

ROOT = Path(__file__).parents[2]
CODE = ("xtoken", "xtoken_core", "services")
HELPERS = ("experiments", "benchmarks")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "proto/*.md", "benchmarks/*.md")
TEMPLATES = ("services/**/*.html", "services/**/static/*.js", "benchmarks/templates/*", "experiments/**/*.j2")


def replacements(text: str) -> dict[str, str]:
    """Read `word: replacement` pairs that semicolons separate."""
    return dict(pair.split(": ") for pair in text.split("; "))


IDENTIFIERS = replacements(
    "bury: mark_dead; buried: marked_dead; dowry: the thing's name; told: reported, logged, notified; "
    "tell: report, log, notify; tells: reports; said: message, output; "
    "settle: drain, wait_for_..., drop_stale, finish; settled: drained, finished; vouch: own; vouched: owned; "
    "whoever: caller, client; somebody: any; nobody: none; remains: recovered; asked: requested, request; "
    "learnt: trained"
)
"""Words within an identifier (`as_told`, `SettledRun`), and what to write instead."""

NAMES = replacements(
    "line_up: rebuild_ready_queue; stand_by: dummy_backward; place_of: device_of, path_of, rank_of; "
    "remains_of: recover; fleet_of: build_process_specs; go_on: resume; goes_on: resumes; went_on: resumed; "
    "left_over: unmatched, rest; by_hand: manual"
)
"""Whole identifiers, and sequences of words within one."""

PHRASES = {
    r"in order; once more": "shut down gracefully; press Ctrl+C again to force quit",
    r"once more to (stop|leave|quit|end)": "press ... again to",
    r"(stop|end|leav|left|clos|quit|shut|finish|goes down|go down|brings? down)\w*( \w+){0,4} in order\b(?! to| of)":
        "gracefully",
    r"\b(an|in) orderly\b": "graceful",
    r"\b(go|goes|going|went) on\b": "resume, continue",
    r"keeps? no books": "no bookkeeping",
    r"without a word": "with unknown status",
    r"\b(two )?coins\b": "Bernoulli distributions",
    r"lost with its machine": "node lost",
    r"\bdiary\b": "events",
    r"[Ww]ho may ask": "auth",
    r"\b(nobody|somebody|whoever|no one|everybody)\b": "the process, the caller, no client",
    r"\b(tell|tells|told)\b": "report, state, show",
    r"what was learnt": "gradients",
    r"[Ss]end the guard home": "stop the reaper",
    r"of its own accord": "by itself",
    r"come to no good": "fail",
    r"came to no good": "failed",
    r"\bby and by\b": "later",
    r"\bvouch": "own",
    r"\bbur(y|ied|ies)\b": "mark dead",
    r"\bsettle[sd]?\b": "finish, drain",
    r"\bremains of\b": "recovered",
    r"\bNothing is asked for\b": "is not requested",
    r"with nothing of one's own": "dummy",
    r"\bhouse\b": "repository, package",
    r"\blooked after\b": "supervised",
    r"\bmerely\b": "only",
}  # fmt: skip
"""Phrases of prose, comments and messages, and what to write instead."""

OPENINGS = ("What", "Whether", "How", "Where", "Which", "Who", "Whose", "As", "Its")
"""First words that a docstring must not have: begin with an imperative verb or a noun."""

VAGUE = r"Return (what|those|some|the same|it|them)\b"
"""Beginning of a function's docstring that does not name the result."""

DETERMINERS = (
    r"The|An?|One|Two|Every|Each|Both|All|Some|Same|This|These|That|Those|So|Of|For|Until|Only|Everything|Nothing|It|"
    r"Why|Whether"
)
"""First words of a function's docstring that begin a noun phrase; so do plurals, and words with a sign in them."""


@cache
def code_files() -> list[Path]:
    """Return the product's Python files."""
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return a file's path in the tree."""
    return path.relative_to(ROOT).as_posix()


def words_of(identifier: str) -> list[str]:
    """Split `as_told` and `SettledRun` into lower-case words."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def identifiers_of(tree: ast.AST) -> Iterator[str]:
    """Yield every identifier that a file defines: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def wrong_identifiers(source: str) -> list[tuple[str, str]]:
    """Return (identifier, word) of every identifier with a word that has a better one."""
    wrong = []
    for identifier in identifiers_of(ast.parse(source)):
        words = words_of(identifier)
        wrong += [(identifier, word) for word in sorted({*words} & IDENTIFIERS.keys())]
        wrong += [(identifier, name) for name in NAMES if f"_{name}_" in f"_{'_'.join(words)}_"]
    return wrong


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings and comments of a file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            yield token.start[0], token.string


def phrases_in(text: str) -> list[str]:
    """Return the patterns of every unwanted phrase in a text, across line breaks."""
    flat = re.sub(r"\s+", " ", text)
    return [pattern for pattern in PHRASES if re.search(pattern, flat, re.IGNORECASE)]


def wrong_openings(source: str) -> list[tuple[int, str]]:
    """Return line and beginning of every docstring that starts with a question word."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    wrong = []
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and text.split(maxsplit=1)[0].rstrip(",:") in OPENINGS:
            wrong.append((getattr(node, "lineno", 1), text.splitlines()[0][:60]))
    return wrong


def wrong_functions(source: str) -> list[tuple[int, str]]:
    """Return line and beginning of function docstrings that begin with no verb or do not name the result."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_property(node):
            text = ast.get_docstring(node) or "Return nothing."
            if re.match(VAGUE, text) or begins_with_a_noun(text):
                wrong.append((node.lineno, text.splitlines()[0][:60]))
    return wrong


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read as an attribute, whose docstring is a noun phrase."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def begins_with_a_noun(text: str) -> bool:
    """Return whether a docstring's first word is a determiner, a plural or no plain word."""
    word = text.split(maxsplit=1)[0].rstrip(".,:;")
    plural = word.endswith("s") and not word.endswith("ss")
    return bool(re.fullmatch(DETERMINERS, word)) or plural or not word.replace("-", "").isalpha()


def text_files() -> list[Path]:
    """Return documents and templates."""
    return sorted({path for pattern in (*DOCUMENTS, *TEMPLATES) for path in ROOT.glob(pattern) if path.is_file()})


def identifier_findings() -> list[str]:
    """Return every unwanted identifier of the product."""
    return [
        f"{name_of(path)}: {identifier} ({(IDENTIFIERS | NAMES)[word]})"
        for path in code_files()
        for identifier, word in dict.fromkeys(wrong_identifiers(path.read_text(encoding="utf-8")))
    ]


def phrase_findings() -> list[str]:
    """Return every unwanted phrase of code, documents and templates."""
    texts = [(path, line, text) for path in code_files() for line, text in prose_of(path.read_text(encoding="utf-8"))]
    texts += [(path, 0, path.read_text(encoding="utf-8")) for path in text_files()]
    return [
        f"{name_of(path)}:{line}: /{pattern}/ ({PHRASES[pattern]})"
        for path, line, text in texts
        for pattern in phrases_in(text)
    ]


def opening_findings() -> list[str]:
    """Return every docstring of the product that begins with a question word."""
    return [
        f"{name_of(path)}:{line}: {text}"
        for path in code_files()
        for line, text in wrong_openings(path.read_text(encoding="utf-8"))
    ]


def function_findings() -> list[str]:
    """Return every function docstring of product, experiments and benchmarks that does not begin as it should."""
    files = [*code_files(), *(path for folder in HELPERS for path in (ROOT / folder).rglob("*.py"))]
    return [
        f"{name_of(path)}:{line}: {text}"
        for path in sorted(files)
        for line, text in wrong_functions(path.read_text(encoding="utf-8"))
    ]


def test_identifiers_are_standard_words() -> None:
    assert identifier_findings() == []


def test_phrases_are_standard_english() -> None:
    assert phrase_findings() == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert opening_findings() == []


def test_docstrings_of_functions_begin_with_a_verb_and_name_the_result() -> None:
    assert function_findings() == []


@cases(
    "source, expected",
    ("def settle_all(): ...", [("settle_all", "settle")]),
    ("class ToldRun: ...", [("ToldRun", "told")]),
    ("def stand_by(x): ...", [("stand_by", "stand_by")]),
    ("place_of_device = 1", [("place_of_device", "place_of")]),
    ("settings = 1", []),
    ("x.settle()", []),
)
def test_the_search_splits_identifiers(source: str, expected: list[tuple[str, str]]) -> None:
    assert wrong_identifiers(source) == expected


@cases(
    "text",
    "stopping in order; once more to stop at once",
    "it goes on from the\nlast checkpoint",
    "has ended without a word",
    "raw pyzmq, which keeps no books",
    "Ctrl-C stops it in order",
    "Who may ask",
    "nobody waits",
)
def test_the_search_finds_phrases(text: str) -> None:
    assert phrases_in(text)


@cases(
    "text", "Return those of a row.", "Return what is left.", "The ids of a text.", "Rows of a batch.", "`count` rows."
)
def test_the_search_finds_docstrings_without_a_verb(text: str) -> None:
    assert wrong_functions(f"def f():\n    '{text}'")
    assert not wrong_functions(f"@property\ndef f(self):\n    '{text}'")


@pytest.mark.parametrize("text", ["Return some_name.", "Process a row.", "Re-tokenize a text.", "Read a file."])
def test_the_search_leaves_docstrings_with_a_verb(text: str) -> None:
    assert wrong_functions(f"def f():\n    '{text}'") == []


@pytest.mark.parametrize("text", ["in order to stop", "granted in plan order", "The order of files", "settings"])
def test_the_search_leaves_plain_english(text: str) -> None:
    assert phrases_in(text) == []


if __name__ == "__main__":
    for finding in [*identifier_findings(), *opening_findings(), *function_findings(), *phrase_findings()]:
        print(finding)
