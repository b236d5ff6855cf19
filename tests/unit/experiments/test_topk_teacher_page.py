"""The table of largest logits in `docs/losses.md`."""

from __future__ import annotations

import json

from experiments.topk_teacher import page
from experiments.topk_teacher.__main__ import MODES, Sums, variants_of


def test_the_page_has_the_table_of_its_result() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written() == text, "run: python -m experiments.topk_teacher.page"


def test_the_result_has_every_variant() -> None:
    modes = json.loads(page.RESULT.read_text(encoding="utf-8"))["modes"]
    assert modes and modes.keys() <= MODES.keys()
    for mode, measured in modes.items():
        assert list(measured["variants"]) == [name for name, *_ in variants_of(mode)]


def test_sums_of_equal_gradients() -> None:
    import torch

    sums = Sums()
    for value in (1.0, 2.0):
        sums.add(
            value, {"chunk_mass_t0": 0.5, "chain_start_t0": value}, torch.full((2,), value), torch.full((2,), value)
        )
    assert (sums.value, sums.mass, sums.square, sums.product) == (3.0, 1.0, 10.0, 10.0)
    assert sums.parts == {"chain_start_t0": 3.0}
