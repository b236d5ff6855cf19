"""Sizes and rates of stores: what is measured comes back, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.store import LENGTH, measure
from xtoken_core.teacher_store.identity import StoreIdentity

K, RECORDS = 4, 6
IDENTITY = StoreIdentity(
    text="", records=RECORDS, append_eos=False, tokenizer="", context_length=LENGTH, model="", dtype="bfloat16",
    vocab_size=1000, content="topk", topk=K,
)  # fmt: skip


def test_a_store_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    values = [rng.normal(size=(LENGTH, IDENTITY.width)).astype(np.float32) for _ in range(RECORDS)]
    found = measure(IDENTITY, values)
    assert found["tokens"] == RECORDS * LENGTH
    assert found["bytes_per_token_raw"] == 4 * IDENTITY.width
    assert 0 < found["bytes_per_token"] < 1.5 * found["bytes_per_token_raw"]
    assert found["pack_tokens_per_second"] >= found["write_tokens_per_second"] > 0
    assert not list(tmp_path.iterdir())
