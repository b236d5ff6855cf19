"""Hashes of byte strings that add up: the hash of a text is the sum of its tokens' hashes, each moved to its place."""

from __future__ import annotations

import numpy as np

# Seeded, so that every worker has the same hashes and a collision, if ever, is the same one everywhere.
_RANDOM = np.random.default_rng(0x70C3)
_BYTE_CODES = _RANDOM.integers(0, 2**64, size=256, dtype=np.uint64)
# Odd: it has an inverse modulo 2^64, and no power of it becomes 0.
_BASE = int(_RANDOM.integers(0, 2**64, dtype=np.uint64)) | 1
_BACK = np.uint64(pow(_BASE, -1, 2**64))
_POWERS = [np.ones(1, dtype=np.uint64)]


def hash_powers(count: int) -> np.ndarray:
    """Return `[n]` uint64, n at least `count`: powers of the hash's base, modulo 2^64.

    The hash of bytes b_0 b_1 … is the sum of `code[b_i] * base^i`: that of a text is the sum of its tokens' hashes,
    each times the power of the token's position. Different texts agree in it by chance once in about 2^64.
    """
    if len(_POWERS[0]) < count:
        # At least doubled, so that texts of growing length cost a logarithmic number of computations.
        factors = np.full(max(count, 2 * len(_POWERS[0])), _BASE, dtype=np.uint64)
        factors[0] = 1
        _POWERS[0] = np.cumprod(factors)
    return _POWERS[0]


def prefix_hashes(data: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return `[N]` uint64: at each byte of some strings, the hash of its string up to and with that byte.

    Args:
        data: `[N]` uint8, the strings one after the other.
        lengths: `[n]` int64, their lengths; they add up to `N`.
    """
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)  # [N]
    codes = _BYTE_CODES[data]  # [N]
    # Positions count from the beginning of each string, so that a token's hash does not depend on its neighbours.
    codes *= hash_powers(int(lengths.max(initial=0)) + 1)[np.arange(len(data)) - begins]
    # Sums wrap modulo 2^64, so that a difference of two of them is exact.
    sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(codes)])  # [N + 1]
    hashes: np.ndarray = sums[1:] - sums[begins]
    return hashes


def without_space(hashes: np.ndarray) -> np.ndarray:
    """Return `[n]` uint64: the hashes that strings which begin with a space have without it."""
    # Without its first byte every other byte moves back by one: multiply by the inverse of the base.
    shorter: np.ndarray = (hashes - _BYTE_CODES[ord(" ")]) * _BACK
    return shorter
