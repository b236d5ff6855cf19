"""Coverage of a teacher's tokens and probability by a projection."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_run import documents, make_assets
from xtoken_core.projection import write_projection
from xtoken_core.projection.coverage import named_tokens, unnamed_fraction, unreachable_mass
from xtoken_core.projection.files import TopKProjection, read_topk
from xtoken_services.common.tables.coverage import WINDOW, coverage_of_text

PROJECTION = TopKProjection(torch.tensor([[0, 2], [2, -1], [3, 1]]), torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0]]))
NAMED = torch.tensor([True, False, True, True, False])
"""Token 1 has the weight 0 only, and no row has token 4."""


def test_tokens_with_a_weight_are_named() -> None:
    assert torch.equal(named_tokens(PROJECTION, 5), NAMED)
    assert unnamed_fraction(NAMED, torch.tensor([0, 1, 2, 4])) == 0.5
    assert unnamed_fraction(NAMED, torch.tensor([], dtype=torch.int64)) == 0.0


def test_unreachable_mass_is_the_mean_over_positions() -> None:
    uniform, certain = torch.zeros(1, 7), torch.tensor([[0.0, 90.0, 0.0, 0.0, 0.0, 99.0, 0.0]])
    mass = unreachable_mass(NAMED, [uniform, certain])
    torch.testing.assert_close(torch.tensor(mass), torch.tensor((0.4 + 1.0) / 2))


def test_windows_of_a_text_begin_as_the_teachers_texts_do(tmp_path: Path) -> None:
    assets = make_assets(tmp_path)
    projection = read_topk(assets.projection)
    weights = projection.likelihoods * (torch.arange(len(projection.likelihoods)) % 3 == 0)[:, None]
    write_projection(replace(projection, likelihoods=weights), tmp_path / "part.safetensors")
    text = "".join(documents(30, seed=0))
    found = coverage_of_text(tmp_path / "part.safetensors", assets.teacher, text, mass=True)
    tokenizer, model = (each.from_pretrained(assets.teacher) for each in (AutoTokenizer, AutoModelForCausalLM))
    ids, size = tokenizer(text, add_special_tokens=False)["input_ids"], WINDOW - 1
    windows = [[tokenizer.bos_token_id, *ids[at : at + size]] for at in range(0, len(ids), size)]
    assert len(windows) > 2
    named = named_tokens(read_topk(tmp_path / "part.safetensors"), len(tokenizer))
    with torch.no_grad():
        mass = unreachable_mass(named, (model(torch.tensor([window])).logits[0] for window in windows))
    assert found["unreachable_mass"] == pytest.approx(mass, rel=1e-6)
