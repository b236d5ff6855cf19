"""Fingerprints: the same for the same tokenizer however it is stored, another for another, without heavy imports."""

import json
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from tests.support import vocabularies as v
from xtoken_core.errors import InputError
from xtoken_core.projection import file_fingerprint, tokenizer_fingerprint


@pytest.mark.parametrize("make", [v.byte_level, v.unigram, v.wordpiece], ids=["byte-level", "unigram", "wordpiece"])
def test_a_directory_and_what_is_loaded_from_it_agree(make, tmp_path):
    make().save_pretrained(tmp_path / "a")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    first = tokenizer_fingerprint(tmp_path / "a")
    assert len(first) == 64
    assert first == tokenizer_fingerprint(str(tmp_path / "b")) == tokenizer_fingerprint(loaded)
    assert tokenizer_fingerprint(make()) == first


def test_padding_and_the_order_of_keys_do_not_matter_but_the_vocabulary_does(tmp_path):
    v.byte_level().save_pretrained(tmp_path)
    first = tokenizer_fingerprint(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(dict(reversed(content.items())), indent=1), encoding="utf-8")
    assert tokenizer_fingerprint(tmp_path) == first
    content["model"]["merges"] = content["model"]["merges"][:-1]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert tokenizer_fingerprint(tmp_path) != first


def test_different_tokenizers_differ():
    makers = [v.byte_level(), v.byte_level(500), v.byte_level(form="NFC"), v.unigram(), v.byte_tokenizer()]
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in makers}) == len(makers)


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}'])
def test_a_damaged_tokenizer_is_named(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        tokenizer_fingerprint(tmp_path)


def test_missing_directories_and_files_are_named(tmp_path):
    with pytest.raises(InputError, match="no tokenizer at"):
        tokenizer_fingerprint(tmp_path / "none")
    with pytest.raises(InputError, match="holds no tokenizer"):
        tokenizer_fingerprint(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        file_fingerprint(tmp_path / "none")


def test_nothing_heavy_is_imported():
    program = (
        "import sys; import xtoken_core.projection.fingerprint; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
