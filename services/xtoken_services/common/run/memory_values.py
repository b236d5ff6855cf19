"""Values that the estimate of a run's memory and the settings that fit it have in common."""

from __future__ import annotations

from xtoken_core.wire.columns import ITEM_SIZES

FLOAT32 = ITEM_SIZES["float32"]
COPIES = 4
"""Values that a student keeps per weight: the weight, its gradient, AdamW's two moments."""
FEWER = {"adamw": 0, "adamw8bit": 1, "muon": 1, "adafactor": 2}
"""Values per weight that an optimiser keeps less than AdamW. Muon keeps one moment of most weights, Adafactor next to
none; that Muon leaves embedding and head to AdamW is not counted."""
BLOCK_ROWS = 2048
"""Positions of a block of a head that is multiplied block by block."""
GIB = 1 << 30


def state_bytes(weights: int, item: int, optimizer: str, *, masters: bool, copies: int = COPIES) -> int:
    """Return the bytes of a student's weights, gradients and moments.

    Args:
        weights: Their number.
        item: Bytes of one of them.
        optimizer: The optimiser; of an unknown one as many as of AdamW.
        masters: Weights of less than 4 bytes have float32 masters.
        copies: Values per weight with AdamW.
    """
    copies -= FEWER.get(optimizer, 0)
    return weights * (copies * FLOAT32 + item if masters and item < FLOAT32 else copies * item)
