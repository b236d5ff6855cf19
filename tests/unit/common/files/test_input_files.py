"""Configurations of models that are refused before anything is built from them."""

import json
from pathlib import Path

import pytest

from xtoken_core.errors import InputError
from xtoken_services.common.files.input_files import read_model_config


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
