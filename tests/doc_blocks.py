"""Fenced blocks of the documents, and the commands in their shell blocks."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATORS = {"&&", "||", ";", "|", "(", ")", "&"}
REDIRECTIONS = {">", ">>", "<", "2>"}


def fenced(page: Path, language: str) -> list[str]:
    """Return the page's blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands_of(script: str) -> list[list[str]]:
    """Return the words of every simple command in a script, without assignments, redirections and comments."""
    commands: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        skip = False
        for word in [*lexer, ";"]:
            if word in OPERATORS:
                if words:
                    commands.append(words)
                words = []
            elif word in REDIRECTIONS or skip:
                skip = word in REDIRECTIONS
            elif words or not re.fullmatch(r"\w+=.*", word):
                words.append(word)
    return commands


def shell_commands(page: Path) -> list[list[str]]:
    """Return the words of every command in a page's shell blocks."""
    return [words for block in fenced(page, "sh") for words in commands_of(block)]
