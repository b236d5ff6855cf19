"""Which files a model's weights are, and what tells them from another's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.common.weights import WHOLE, weight_count, weight_files, weights_fingerprint
from tests.unit.trainer.students import make_model


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
    (tmp_path / "model.safetensors.index.json").write_text("no JSON")
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
    monkeypatch.setattr("services.common.weights.ENDS", 64)
    before, data = weights_fingerprint(model), bytearray((model / WHOLE).read_bytes())
    data[-1] ^= 1
    (model / WHOLE).write_bytes(data)
    assert weights_fingerprint(model) != before
