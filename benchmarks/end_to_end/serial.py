"""The plain serial loop: teacher, student, loss, backward, one sample after the other, in one process.

It is what one writes first: eager Hugging Face models, whole logits, the loss in plain PyTorch operations (the
package's reference backends, or for gold a public one), AdamW's fused step. Its batches are collated before the clock
starts.

A public loss of gold's kind for the serial loop: TRL's GOLD, divergence on shared tokens, sorted L1 on the rest.

It is what one has today without this package. It is not the same loss: it compares probabilities of chunks, not means
of log-probabilities, and sorts all that is not shared.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.end_to_end.assets import Assets
from xtoken_core import schema
from xtoken_core.alignment import TokenAligner, token_table
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config.loss import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher
from xtoken_core.ops.registry import ENVIRONMENT, op_names
from xtoken_core.projection import get_topk_projection

IGNORED = -100
CE_WEIGHT = 0.1


def serial_loop(
    assets: Assets,
    loss: LossConfig,
    *,
    context: int,
    samples: int,
    steps: int,
    warmup: int,
    checkpointing: bool,
    public: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Train `steps` steps of `samples` samples, with the package's own loss or (`public`) TRL's.

    Returns:
        After the warm-up, unpadded student tokens per second; and the peak of allocated memory above parameters,
        gradients and optimiser state, in bytes (0 on the CPU).
    """
    os.environ[ENVIRONMENT] = ",".join(f"{name}=reference" for name in op_names())
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).to(device)
        for place in (assets.student, assets.teacher)
    )
    student.train()
    if checkpointing:
        student.gradient_checkpointing_enable({"use_reentrant": False})
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=device.type == "cuda")
    batches = _batches(assets, context, samples * (steps + warmup))
    objective = PublicGold(assets, device) if public else _objective(assets, loss, device)
    standing, rows = 0, []
    for step in range(steps + warmup):
        if step == 1 and device.type == "cuda":
            standing = torch.cuda.memory_allocated() + sum(p.numel() * p.element_size() for p in student.parameters())
            torch.cuda.reset_peak_memory_stats()
        began, tokens = time.perf_counter(), 0
        for batch in itertools.islice(batches, samples):
            moved = {name: value.to(device) for name, value in batch.items() if isinstance(value, torch.Tensor)}
            tokens += int(batch[schema.INPUT_LENGTHS.name].sum())
            with torch.no_grad():
                signal = teacher(input_ids=moved["teacher_input_ids"], use_cache=False).logits
            logits = student(input_ids=moved[schema.INPUT_IDS.name], use_cache=False).logits
            value, _ = objective(moved, logits, [signal])
            (value / samples).backward()
            del signal, logits, value
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rows.append((tokens, time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() - standing if device.type == "cuda" else 0
    kept = rows[warmup:]
    rate = sum(tokens for tokens, _ in kept) / sum(seconds for _, seconds in kept)
    return {"tokens_per_second": rate, "peak_bytes_above_state": peak}


def _batches(assets: Assets, context: int, count: int) -> Any:
    """Return `count` collated micro-batches of one sample."""
    ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (assets.student, assets.teacher))
    collator = CrossTokenizerCollator(
        student_tokenizer=ours,
        teacher_tokenizer=theirs,
        aligner=TokenAligner(ours, theirs),
        ctx_length_student=context,
        ctx_length_teacher=context,
    )
    with assets.text.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in itertools.islice(file, count)]
    return iter([collator([record]) for record in records])


def _objective(assets: Assets, loss: LossConfig, device: torch.device) -> CrossTokenizerDistillationLoss:
    vocabularies = [len(AutoTokenizer.from_pretrained(place)) for place in (assets.student, assets.teacher)]
    teacher = LossTeacher(vocabularies[1], *get_topk_projection(assets.projection, device))
    return CrossTokenizerDistillationLoss(loss, student_vocab_size=vocabularies[0], teachers=[teacher], device=device)


class PublicGold:
    """TRL's loss, called as the package's own is by the serial loop.

    Args:
        assets: Whose tokenizers.
        device: Where it computes.

    Raises:
        SystemExit: TRL is not installed.
    """

    def __init__(self, assets: Assets, device: torch.device) -> None:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        try:
            from trl.experimental.gold.gold_config import GOLDConfig
            from trl.experimental.gold.gold_trainer import ULDLoss
        except ImportError as error:
            raise SystemExit(f"{error}: this loop has TRL's loss: pip install -e '.[bench]'") from error
        settings = {field.name: field.default for field in dataclasses.fields(GOLDConfig)}
        settings |= {"uld_use_hybrid_loss": True, "uld_crossentropy_weight": CE_WEIGHT}
        ours, theirs = (AutoTokenizer.from_pretrained(place) for place in (assets.student, assets.teacher))
        self._loss = ULDLoss(
            SimpleNamespace(**settings), student_tokenizer=ours, teacher_tokenizer=theirs, device=device
        )
        self._lengths = [torch.from_numpy(token_table(t).pool.lengths).to(device) for t in (ours, theirs)]

    def __call__(
        self, batch: Mapping[str, Tensor], logits: Float[Tensor, "B T V"], signals: list[Float[Tensor, "B T_t V_t"]]
    ) -> tuple[Float[Tensor, ""], None]:
        """Compute the loss of a collated batch; there are no metrics."""
        ids = [batch[name] for name in (schema.INPUT_IDS.name, schema.TEACHER_INPUT_IDS.name)]
        kept = [batch[name] for name in (schema.INPUT_LENGTHS.name, schema.TEACHER_INPUT_LENGTHS.name)]
        labels = [_labels(tokens, length) for tokens, length in zip(ids, kept, strict=True)]
        offsets = [_offsets(tokens, lengths) for tokens, lengths in zip(ids, self._lengths, strict=True)]
        value: Tensor = self._loss(
            logits, signals[0], *labels, *ids, student_byte_offsets=offsets[0], teacher_byte_offsets=offsets[1]
        )
        return value.reshape(()), None


def _labels(tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Int[Tensor, "B T"]:
    """Return the tokens, without padding."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens.masked_fill(places >= lengths[:, None], IGNORED)


def _offsets(tokens: Int[Tensor, "B T"], lengths: Int[Tensor, " V"]) -> Int[Tensor, "B T 2"]:
    """Return the bytes of the text that each token covers."""
    ends = lengths[tokens].cumsum(dim=1)
    return torch.stack([ends - lengths[tokens], ends], dim=-1)
