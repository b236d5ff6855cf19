"""What a teacher's output costs its producer: time and memory of a micro-batch, by what is sent of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtoken_core.transports.ring import TOPK_SCALARS, TopKSettings
from xtoken_services.teacher.model import CHUNK_TOKENS, TeacherModel

SORTED_K = 64
"""Tokens that the comparison with a sort of whole rows selects."""
WARM, ROUNDS = 3, 15
SETTLE_S = 0.5
"""Seconds of passes before the first measured one: clocks and caches."""


def token_ids(directory: Path, text: Path, rows: int, length: int) -> Tensor:
    """Return `[rows, length]` ids of a text's first documents, without padding.

    Args:
        directory: The model's directory, with its tokenizer.
        text: Documents, `.jsonl` with the field `text`; shorter ones are repeated.
        rows: Rows.
        length: Tokens of a row.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids: list[int] = []
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    while len(ids) < rows * length:
        for document in documents:
            ids += tokenizer(document)["input_ids"]
            if len(ids) >= rows * length:
                break
    return torch.tensor(ids[: rows * length]).view(rows, length)


def measure(
    directory: Path,
    text: Path,
    device: torch.device,
    *,
    sizes: tuple[int, ...],
    tokens: int,
    length: int,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Return seconds and bytes of a micro-batch for every content.

    Args:
        directory: The teacher's directory.
        text: Documents that it reads.
        device: Where it computes; bfloat16 on a GPU, float32 otherwise.
        sizes: Numbers of largest logits.
        tokens: Tokens of a micro-batch.
        length: Tokens of one of its rows.
        rounds: Measured passes of each content.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TeacherModel(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device))
    rows = max(1, tokens // length)
    ids = token_ids(directory, text, rows, length)
    vocab = len(AutoTokenizer.from_pretrained(directory))
    forms: dict[str, Any] = {}
    for name, write, slot_bytes in _forms(model, ids, vocab, sizes):
        forms[name] = _timed(write, device, rounds) | {"slot_bytes": slot_bytes}
    return {"rows": rows, "length": length, "tokens": ids.numel(), "vocabulary": vocab, "forms": forms}


def _forms(
    model: TeacherModel, ids: Tensor, vocab: int, sizes: tuple[int, ...]
) -> Iterator[tuple[str, Callable[[], object], int]]:
    """Yield name, pass and bytes of the slot of every content."""
    head, device = model.head, model.device
    yield "forward pass alone", partial(model.hidden, ids), 0
    hidden = torch.empty(*ids.shape, head.shape[1], dtype=head.dtype, device=device)
    yield "hidden", partial(model.write_hidden, ids, hidden, None), hidden.nbytes
    logits = torch.empty(*ids.shape, model.head_width, dtype=head.dtype, device=device)
    yield "logits", partial(model.write_logits, ids, logits), logits.nbytes
    for k in sizes:
        largest = torch.empty(*ids.shape, 2 * k + TOPK_SCALARS, device=device)
        yield f"topk {k}", partial(model.write_topk, ids, largest, TopKSettings(k, vocab)), largest.nbytes
    yield f"sorted {SORTED_K}", partial(_sorted, model, ids, vocab), 0


@torch.inference_mode()
def _sorted(model: TeacherModel, ids: Tensor, vocab: int) -> None:
    """Select the largest logits by `torch.topk` over whole rows, and sum these: what `write_topk` avoids."""
    hidden = model.hidden(ids).flatten(0, 1)
    for start in range(0, len(hidden), CHUNK_TOKENS):
        logits = hidden[start : start + CHUNK_TOKENS] @ model.head[:vocab].t()
        logits.topk(SORTED_K, dim=-1)
        logits.float().logsumexp(-1)


def _timed(write: Callable[[], object], device: torch.device, rounds: int) -> dict[str, float]:
    """Return the median of a pass's seconds, and the bytes that it takes beside weights and slot."""

    def once() -> float:
        _synchronize(device)
        began = time.perf_counter()
        write()
        _synchronize(device)
        return time.perf_counter() - began

    began, passes = time.perf_counter(), 0
    while passes < WARM or time.perf_counter() - began < SETTLE_S:
        once()
        passes += 1
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    seconds = [once() for _ in range(rounds)]
    made = {"seconds": median(seconds), "seconds_least": min(seconds)}
    if device.type == "cuda":
        made["peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
    return made


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
