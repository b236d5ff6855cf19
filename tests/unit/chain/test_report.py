"""The command that shows chain tables, and tokenizers that no tables can be built for."""

import json

import pytest
from typer.testing import CliRunner

from tests.unit.chain.test_edges import SPLIT, WHOLE
from tests.unit.chain.tiny_tokenizers import TinyTokenizer
from xtoken_core.errors import InputError
from xtoken_services.cli.chain import chain_app
from xtoken_services.common.tables.build_pair_file import build_pair_file


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("tokenizers")
    others = {"student": WHOLE, "teacher": SPLIT, "foreign": TinyTokenizer(b"xyz", [], "words")}
    for name, tokenizer in others.items():
        tokenizer.fast.save_pretrained(base / name)
    return base


def inspect(directories, monkeypatch, tmp_path, *arguments):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sides = ["--student", str(directories / "student"), "--teacher", str(directories / "teacher")]
    return CliRunner().invoke(chain_app, ["inspect", *sides, *arguments])


def test_inspect(directories, monkeypatch, tmp_path):
    done = inspect(directories, monkeypatch, tmp_path, "ab 111 ab")
    assert done.exit_code == 0, done.output
    assert "common tokens" in done.output and "1:1" in done.output
    found = json.loads(inspect(directories, monkeypatch, tmp_path, "ab 111 ab", "--json").output)
    assert found["text"]["shapes"] == {"1:1": 1, "1:n": 3, "n:1": 0, "m:n": 0}  # ab, space, 111, space with ab
    assert (found["text"]["chunks"], found["text"]["incorrect"]) == (4, 0)
    assert found["student"]["tokens"] == len(WHOLE.vocab) and found["teacher"]["tokens"] == len(SPLIT.vocab)
    assert found["common"] >= len(WHOLE.vocab) - len(WHOLE.merges) - 1  # every byte of the alphabet
    assert json.loads(inspect(directories, monkeypatch, tmp_path, "--json").output)["text"] is None


def test_tokenizers_without_a_common_token_are_refused_with_token_and_reason(directories, tmp_path):
    with pytest.raises(InputError, match=r"no token in common.*token 0 of the student \('x'\): the other tokenizer"):
        build_pair_file("chain", directories / "foreign", directories / "teacher", tmp_path / "tables.safetensors")
    assert not list(tmp_path.iterdir())
