"""Order of training: a pseudo-random permutation of the records per epoch, computed and not stored."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

_ROUNDS = 10
_MASK = (1 << 64) - 1


def record_at(position: int, *, records: int, seed: int, shuffle: bool, source: int = 0) -> int:
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
        source: Number of the text in a mixture, from 1: texts of one length are not permuted alike.

    Raises:
        ValueError: `position` is negative or `records` is not positive.
    """
    if position < 0 or records < 1:
        raise ValueError(f"no record stands at position {position} of {records} records")
    epoch, index = divmod(position, records)
    if not shuffle or records == 1:
        return index
    half = ((records - 1).bit_length() + 1) // 2
    keys = _round_keys(seed, epoch, source)
    while True:
        index = _feistel(index, half, keys)
        if index < records:
            return index


def mixed_record_at(position: int, *, sources: Sequence[tuple[int, int]], seed: int, shuffle: bool) -> int:
    """Return the number of the record at a position of a mixture of texts.

    The samples of every source are spread evenly over an epoch, and read its records in an order of its own, which
    continues from epoch to epoch: all records of a source are read equally often, up to one.

    Args:
        position: From 0.
        sources: Per text its records and its samples in an epoch.
        seed: As for `record_at`.
        shuffle: As for `record_at`.

    Returns:
        The number among the records of all sources, those of the first source first.

    Raises:
        ValueError: As `record_at`.
    """
    samples = [count for _, count in sources]
    if position < 0 or min(samples) < 1:
        raise ValueError(f"no record stands at position {position} of a mixture with {samples} samples per epoch")
    epoch, index = divmod(position, sum(samples))
    source, index = _spread(index, samples)
    own = epoch * samples[source] + index
    number = record_at(own, records=sources[source][0], seed=seed, shuffle=shuffle, source=source + 1)
    return sum(records for records, _ in sources[:source]) + number


def _spread(index: int, samples: Sequence[int]) -> tuple[int, int]:
    """Return the source of an epoch's sample and its index among that source's samples.

    The first source gets the samples at which `index * count / total` passes a whole number; the others divide what is
    left in the same way. That is a bijection in constant memory and whole numbers.
    """
    total = sum(samples)
    for source, count in enumerate(samples[:-1]):
        before = index * count // total
        if (index + 1) * count // total > before:
            return source, before
        index -= before
        total -= count
    return len(samples) - 1, index


@lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int, source: int) -> tuple[int, ...]:
    """Return 64-bit keys, one per round, independent between seeds, epochs and sources."""
    name = f"xtoken-order/{seed}/{epoch}" + (f"/source-{source}" if source else "")
    return tuple(int.from_bytes(hashlib.sha256(f"{name}/{r}".encode()).digest()[:8], "little") for r in range(_ROUNDS))


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
