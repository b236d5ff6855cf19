"""Frames of a store: every bit comes back, and nothing else is taken for a frame."""

import numpy as np
import pytest

from xtoken_core.teacher_store.codec import Array, pack, unpack
from xtoken_core.teacher_store.identity import StoreError


def of_all_kinds(tokens: int) -> list[Array]:
    """Random bits, bell-shaped values, infinities and small integers."""
    rng = np.random.default_rng(tokens)
    values = rng.normal(size=(tokens, 40)).astype(np.float32)
    values[:, 5] = -np.inf
    half = (rng.normal(size=(tokens, 64)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return [values, half, rng.integers(-1, 50_000, size=(tokens, 8), dtype=np.int32)]


@pytest.mark.parametrize("tokens", [0, 1, 7, 3000])
def test_every_bit_comes_back(tokens: int) -> None:
    arrays = of_all_kinds(tokens)
    read = [np.zeros_like(array) for array in arrays]
    unpack(pack(arrays), read)
    for array, again in zip(arrays, read, strict=True):
        assert again.tobytes() == array.tobytes()


def test_strided_arrays_are_filled() -> None:
    values = np.arange(60, dtype=np.float32).reshape(5, 12)
    parts = [values[:, :4], values[:, 4:8], values[:, 8:]]
    read = np.full((5, 20), -1, dtype=np.float32)
    unpack(pack([np.ascontiguousarray(part) for part in parts]), [read[:, :4], read[:, 4:8], read[:, 8:12]])
    assert (read[:, :12] == values).all()
    assert (read[:, 12:] == -1).all()


def test_exponents_are_deflated_and_mantissas_are_not() -> None:
    half = of_all_kinds(3000)[1]
    assert 0.5 * half.nbytes < len(pack([half])) < 0.85 * half.nbytes
    noise = np.random.default_rng(0).integers(0, 2**16, size=100_000, dtype=np.uint16)
    assert len(pack([noise])) == noise.nbytes + 2 * 5


@pytest.mark.parametrize("change", ["cut", "longer", "fewer", "empty"])
def test_other_bytes_are_refused(change: str) -> None:
    values = np.arange(100, dtype=np.int32)
    frame = pack([values])
    frame = {"cut": frame[:-1], "longer": frame + frame, "fewer": pack([values[:-1]]), "empty": b""}[change]
    with pytest.raises(StoreError):
        unpack(frame, [np.zeros_like(values)])


def test_a_plane_that_inflates_beyond_its_size_is_refused() -> None:
    with pytest.raises(StoreError, match="101 bytes where 100"):
        unpack(pack([np.zeros(1 << 22, dtype=np.uint8)]), [np.zeros(100, dtype=np.uint8)])
