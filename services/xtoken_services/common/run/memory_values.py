"""Values that the estimate of a run's memory and the settings that fit it have in common."""

from __future__ import annotations

from xtoken_core.config.train import OptimizerName
from xtoken_core.wire.columns import ITEM_SIZES

FLOAT32 = ITEM_SIZES["float32"]
COPIES = 4
"""Values that a student keeps per weight: the weight, its gradient, AdamW's two moments."""
FEWER: dict[OptimizerName, int] = {"adamw": 0, "adamw8bit": 1, "muon": 1, "adafactor": 2}
"""Values per weight that an optimiser keeps less than AdamW. Muon keeps one moment of most weights, Adafactor next to
none; that Muon leaves embedding and head to AdamW is not counted."""
BLOCK_ROWS = 2048
"""Positions of a block of a head that is multiplied block by block."""
GIB = 1 << 30
