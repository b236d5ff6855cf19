"""Coverage of a teacher's tokens and probability by a projection."""

from __future__ import annotations

import torch

from xtoken_core.projection.coverage import named_tokens, unnamed_fraction, unreachable_mass
from xtoken_core.projection.files import TopKProjection

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
