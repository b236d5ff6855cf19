"""Order of training: a pseudo-random permutation of the records per epoch, computed and not stored."""

from __future__ import annotations

import hashlib
from functools import lru_cache

_ROUNDS = 10
_MASK = (1 << 64) - 1


def record_at(position: int, *, records: int, seed: int, shuffle: bool) -> int:
    """Return the number of the record at a position.

    Position `p = epoch * records + index`; every epoch holds each record once. Shuffled, an epoch's order is a
    Feistel network over the smallest even number of bits that holds `records`, walked along its cycles until it
    falls below `records` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): a bijection in
    constant memory, with fewer than four walks expected.

    Args:
        position: From 0.
        records: Number of records.
        seed: Of the run; each epoch mixes its own number in.
        shuffle: False keeps the data's own order in every epoch.

    Raises:
        ValueError: `position` is negative or `records` is not positive.
    """
    if position < 0 or records < 1:
        raise ValueError(f"no record stands at position {position} of {records} records")
    epoch, index = divmod(position, records)
    if not shuffle or records == 1:
        return index
    half = ((records - 1).bit_length() + 1) // 2
    keys = _round_keys(seed, epoch)
    while True:
        index = _feistel(index, half, keys)
        if index < records:
            return index


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Return 64-bit keys, one per round, independent between seeds and epochs."""
    return tuple(
        int.from_bytes(hashlib.sha256(f"xtoken-order/{seed}/{epoch}/{r}".encode()).digest()[:8], "little")
        for r in range(_ROUNDS)
    )


def _feistel(value: int, half: int, keys: tuple[int, ...]) -> int:
    """Apply a Feistel network: a bijection on `2 * half` bits."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right, key) >> (64 - half))
    return left << half | right


def _mix(value: int, key: int) -> int:
    """Apply splitmix64's finaliser (Steele, Lea and Flood, 2014) to value and key; its high bits are mixed best."""
    x = (value * 0x9E3779B97F4A7C15 + key) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
