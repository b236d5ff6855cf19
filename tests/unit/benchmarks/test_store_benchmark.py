"""Sizes and rates of stores: what is measured comes back, bit for bit, and the page shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.store import LENGTH, measure
from experiments.stored_teacher import page
from xtoken_core.teacher_store.identity import StoreIdentity

K, RECORDS = 4, 6
IDENTITY = StoreIdentity(
    text="", records=RECORDS, append_eos=False, tokenizer="", context_length=LENGTH, model="", dtype="bfloat16",
    fp8=False, vocab_size=1000, content="topk", topk=K,
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


def test_distillkits_rows_are_shown_beside_ours() -> None:
    form: dict[str, Any] = {
        "bytes_per_token": 60.6, "bytes_per_token_raw": 144.0, "write_tokens_per_second": 5.0,
        "read_tokens_per_second": 7.0,
    }  # fmt: skip
    kit = {
        "bytes_per_token": 68.0, "mean_error": 1e-3, "largest_error": 5e-3, "pack_tokens_per_second": 2000.0,
        "unpack_tokens_per_second": 3000.0,
    }  # fmt: skip
    result = {
        "model": "m", "vocabulary": 1000, "machine": {"processor": "p", "cores": 2}, "load_average": 0.5,
        "distillkit": "a61c2e7d25", "forms": {"topk 16": form | {"distillkit": {"float16": kit}}},
    }  # fmt: skip
    shown = page.render_sizes(result)
    assert "| 16 largest | 61 | 144 | 5 | 7 |" in shown
    assert "| 16 largest | 16 bits | 68 | 61 | 1.0e-03 | 5.0e-03 | 2,000 | 3,000 |" in shown
    assert "DistillKit" not in page.render_sizes(result | {"forms": {"topk 16": form}})
