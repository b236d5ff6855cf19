"""Configurations of models that are refused before anything is built from them."""

import json
from pathlib import Path

import pytest

from xtoken_core.config.spec import parse_run_spec
from xtoken_core.errors import InputError
from xtoken_services.common.files.input_files import check_input_files, read_model_config


@pytest.mark.parametrize("inside", ["", "text_config"])
@pytest.mark.parametrize(
    "size", [{"num_hidden_layers": 10**7}, {"hidden_size": 1e12}, {"vocab_size": 1 << 40}], ids=str
)
def test_a_size_that_no_model_has_is_named(tmp_path: Path, size: dict[str, float], inside: str) -> None:
    config = {"num_hidden_layers": 126, "hidden_size": 16384, "vocab_size": 262144}
    (tmp_path / "config.json").write_text(json.dumps({inside: config} if inside else config))
    assert read_model_config("student", tmp_path)
    config |= size  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps({inside: config} if inside else config))
    with pytest.raises(InputError, match=f"config.json is not a model configuration: {next(iter(size))} = 1"):
        read_model_config("student", tmp_path)


@pytest.mark.parametrize("missing", ["student", "teacher"])
@pytest.mark.parametrize("there", [False, True], ids=["no-directory", "no-tokenizer"])
def test_a_missing_tokenizer_is_named_before_anything_else(tmp_path: Path, missing: str, *, there: bool) -> None:
    for what in ("student", "teacher"):
        (tmp_path / what).mkdir()
        (tmp_path / what / "config.json").write_text("{}")
        (tmp_path / what / "vocab.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    models = {what: {"model": str(tmp_path / what), "context_length": 8} for what in ("student", "teacher")}
    document: dict[str, object] = {"output": str(tmp_path / "out"), "data": {"path": "text.txt"}, **models}
    check_input_files(parse_run_spec(document, source="run"))
    models[missing]["tokenizer"] = str(tmp_path / ("bare" if there else "none"))
    said = "bare holds no tokenizer" if there else "no tokenizer at "
    with pytest.raises(InputError, match=f"^the {missing}'s tokenizer: .*{said}"):
        check_input_files(parse_run_spec(document, source="run"))
