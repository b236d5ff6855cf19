"""Which files a model's weights are, and what tells them from another's."""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.unit.trainer.students import make_model
from xtoken_core.errors import InputError
from xtoken_core.model_files import INDEX, WHOLE, check_model_directory, weight_files
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.models.weights import check_weights, weight_count, weights_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path)
    return tmp_path


def test_a_copy_beside_the_weights_is_none_of_them(model: Path) -> None:
    count = sum(parameter.numel() for parameter in make_model().parameters())
    (model / "consolidated.safetensors").write_bytes((model / WHOLE).read_bytes())
    assert weight_files(model) == [model / WHOLE]
    assert weight_count(model) == count


def test_the_index_names_the_parts(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path, max_shard_size="20KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    (tmp_path / "consolidated.safetensors").write_bytes(parts[0].read_bytes())
    assert len(parts) > 1 and weight_files(tmp_path) == parts
    assert weight_count(tmp_path) == sum(parameter.numel() for parameter in make_model().parameters())
    (tmp_path / INDEX).unlink()
    assert len(weight_files(tmp_path)) == len(parts) + 1, "whatever is there"


def test_other_weights_and_another_configuration_have_another_fingerprint(model: Path) -> None:
    found = [weights_fingerprint(model)]
    weights = load_file(model / WHOLE)
    save_file({name: value + 1 for name, value in weights.items()}, model / WHOLE, metadata={"format": "pt"})
    found.append(weights_fingerprint(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    found.append(weights_fingerprint(model))
    assert len(set(found)) == 3
    assert weights_fingerprint(model) == found[-1]


def test_the_last_byte_of_a_large_file_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xtoken_services.common.models.weights.ENDS", 64)
    before, data = weights_fingerprint(model), bytearray((model / WHOLE).read_bytes())
    data[-1] ^= 1
    (model / WHOLE).write_bytes(data)
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize(
    "name", ["../../secret/x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "..", "a\n.safetensors"]
)
def test_an_index_names_plain_files_only(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name, "b": "model-1.safetensors"}}))
    for refuse in (weight_files, weight_count, check_model_directory):
        with pytest.raises(InputError, match=r"the files of a model must be \.safetensors files beside it"):
            refuse(tmp_path)


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "[" * 10**5]
)
def test_a_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError, match=r"the index of weights .* is damaged"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", [WHOLE, "model-00001-of-00002.safetensors", INDEX, "config.json"])
def test_a_fifo_does_not_block(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="regular file"):
        check_model_directory(tmp_path)
    if name != "config.json":
        with pytest.raises(InputError, match="regular file"):
            check_weights("student", tmp_path)
    with pytest.raises((InputError, OSError)):
        weights_fingerprint(tmp_path)


def test_weights_behind_a_link_out_of_the_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    make_model().save_pretrained(model)
    other.mkdir()
    (model / WHOLE).rename(other / WHOLE)
    (model / WHOLE).symlink_to(other / WHOLE)
    check_weights("student", model)
    for name, value in Roots.of([model], []).environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="leads out of the allowed directories"):
        check_weights("student", model)
