"""Commands in the documents: names, options, targets and files exist, and `xtoken` is installed before it is used."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner
from huggingface_hub.cli import hf

from tests.doc_blocks import PAGES, ROOT, commands_of, shell_commands
from tests.support.cases import cases
from xtoken_services.cli.app import app

GUIDES = [ROOT / "README.md", ROOT / "docs/quickstart.md"]
"""Pages that are followed from the top in a fresh shell."""
SYSTEM = {
    ".", "cat", "cp", "curl", "df", "docker", "echo", "export", "kubectl", "ls", "mkdir", "nvidia-cuda-mps-control",
    "nvidia-smi", "openssl", "pip", "ray", "sed", "sglang", "umask", "vllm",
}  # fmt: skip
"""Programs of other projects, whose options are not checked."""

COMMANDS = [
    pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}") for page in PAGES for words in shell_commands(page)
]


def check_xtoken(words: list[str]) -> None:
    """Parse the arguments of one `xtoken` command as the program does."""
    if words == ["--help"]:
        return
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and not (words[0].startswith("-") and command.invoke_without_command):
        assert words[0] in command.commands, f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    command.parse_args(typer.Context(command), words)


def check_make(words: list[str]) -> None:
    """Check that the Makefile has every target."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets


def check_python(words: list[str]) -> None:
    """Check that the module or the file exists; a line of code must compile."""
    if words[0] == "-c":
        compile(words[1], "<document>", "exec")
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
    else:
        assert (ROOT / words[0]).is_file()


def check_hf(words: list[str]) -> None:
    """Look the options up in the help of huggingface_hub's own command."""
    done = CliRunner().invoke(hf.app, [words[0], "--help"])
    assert done.exit_code == 0, done.output
    assert [word for word in words if word.startswith("-") and word not in done.output] == []


CHECKS = {"xtoken": check_xtoken, "make": check_make, "python": check_python, "python3": check_python, "hf": check_hf}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_exists_with_its_options(words: list[str]) -> None:
    if words[:3] == ["docker", "compose", "exec"]:
        words = words[4:]
    program = words[0].removeprefix(".venv/bin/")
    if program in CHECKS:
        CHECKS[program](words[1:])
    else:
        assert program in SYSTEM, f"{program} is neither of this project nor in the list of other programs"


def uses_before_install(commands: list[list[str]]) -> list[str]:
    """Return the `xtoken` commands of a page that come before its environment is active."""
    early = []
    for words in commands:
        if words[0] == "." or words[:2] == ["pip", "install"]:
            break
        if words[0] == "xtoken":
            early.append(" ".join(words))
    return early


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_xtoken_is_installed_before_it_is_used(page: Path) -> None:
    commands = shell_commands(page)
    assert any(words[0] == "xtoken" for words in commands)
    assert uses_before_install(commands) == []


@cases(
    "script, commands",
    ("make demo  # a remark", [["make", "demo"]]),
    ("A=1 xtoken run x.toml", [["xtoken", "run", "x.toml"]]),
    ("(umask 077; openssl rand -base64 32 > token)", [["umask", "077"], ["openssl", "rand", "-base64", "32"]]),
    (
        "python3 -m venv .venv && . .venv/bin/activate",
        [["python3", "-m", "venv", ".venv"], [".", ".venv/bin/activate"]],
    ),
    ("echo quit | cat", [["echo", "quit"], ["cat"]]),
    ("xtoken run \\\n  x.toml", [["xtoken", "run", "x.toml"]]),
)
def test_a_script_is_split_into_commands(script: str, commands: list[list[str]]) -> None:
    assert commands_of(script) == commands


@cases(
    "words",
    ["xtoken", "begin"],
    ["xtoken", "run", "--no-such-option"],
    ["make", "no-such-target"],
    ["python", "-m", "no_such_module"],
    ["hf", "fetch"],
    ["huggingface-cli", "download"],
    ids=" ".join,
)
def test_a_wrong_command_is_noticed(words: list[str]) -> None:
    with pytest.raises(Exception):  # noqa: B017 - each check has its own
        test_a_command_exists_with_its_options(words)


def test_an_index_of_torch_is_asked_for_nothing_else() -> None:
    words = ["make", "--dry-run", "--always-make", "install", "TORCH_INDEX=https://torch.example"]
    shown = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    torch, rest = (line.split() for line in shown if "pip install" in line)
    assert "--no-deps" in torch and torch[-1] == "torch" and "https://torch.example" in torch
    assert not any("index" in word for word in rest)


def test_a_use_before_the_installation_is_noticed() -> None:
    assert uses_before_install([["xtoken", "run"], [".", "activate"], ["xtoken", "run"]]) == ["xtoken run"]
