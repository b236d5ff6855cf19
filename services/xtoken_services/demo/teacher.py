"""The demo's models: a teacher trained from scratch on this machine, and a randomly initialised student."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from xtoken_core.dataset import DataIndex, Record, record_at
from xtoken_core.evaluation import evaluate
from xtoken_services.common.files.jsonl import JsonLines
from xtoken_services.demo.specs import EVAL_BYTES

Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class ModelSize:
    """Width and depth of a small Llama-like model; its head is 64 wide and its embedding tied."""

    hidden: int
    layers: int


TEACHER_SIZE = ModelSize(hidden=256, layers=4)
STUDENT_SIZE = ModelSize(hidden=256, layers=2)
_INITIAL_RANGE = 0.05
_EMBEDDING_RATE = 10.0


@dataclass(frozen=True)
class TeacherTraining:
    """Training of the teacher.

    Attributes:
        steps: Optimiser steps.
        rows: Sequences of a step.
        context_length: Tokens of a sequence; documents follow each other in it, each between BOS and EOS.
        learning_rate: At its highest, after the warm-up; it then falls to a tenth along a cosine. The embedding
            learns ten times as fast: in so short a training most of its rows are seen a few times only.
        warmup_steps: Steps over which it rises.
        eval_every: Steps between two evaluations; one follows the last step.
        eval_bytes: How much held-out text one reads.
        seed: Of the weights and of the order of documents.
        threads: torch's.
    """

    steps: int = 180
    rows: int = 4
    context_length: int = 256
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    eval_every: int = 60
    eval_bytes: int = EVAL_BYTES
    seed: int = 0
    threads: int = 2


def new_model(tokenizer: PreTrainedTokenizerBase, size: ModelSize, *, seed: int, positions: int) -> LlamaForCausalLM:
    """Return a Llama-like model with random weights from a seed and a head as wide as the tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=_INITIAL_RANGE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def write_student(
    directory: Path, tokenizer_dir: Path, *, size: ModelSize = STUDENT_SIZE, seed: int = 0, positions: int = 512
) -> Path:
    """Write a randomly initialised student and its tokenizer as a Hugging Face directory."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    new_model(tokenizer, size, seed=seed, positions=positions).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def train_teacher(
    directory: Path,
    tokenizer_dir: Path,
    train: Path,
    heldout: Path,
    *,
    size: ModelSize = TEACHER_SIZE,
    training: TeacherTraining = TeacherTraining(),
    progress: Progress | None = None,
) -> Path:
    """Train a teacher from scratch on the CPU and write it, its tokenizer and its curves.

    Args:
        directory: Gets the Hugging Face model, `steps.jsonl` and `eval.jsonl`.
        tokenizer_dir: The teacher's tokenizer.
        train: Documents, as `{"text": ...}` lines.
        heldout: Documents to evaluate on.
        size: Of the model.
        training: How long, how fast.
        progress: Gets every line of `steps.jsonl` and `eval.jsonl` as it is written.

    Returns:
        `directory`.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    model = new_model(tokenizer, size, seed=training.seed, positions=2 * training.context_length)
    held = list(DataIndex.build([heldout], field="text", cache_dir=directory / "index").documents())
    batches = packed_batches(tokenizer, train, directory / "index", training)
    steps, evals = JsonLines(directory / "steps.jsonl"), JsonLines(directory / "eval.jsonl")
    for file in (steps, evals):
        file.path.unlink(missing_ok=True)

    def report(file: JsonLines, line: dict[str, Any]) -> None:
        file.append(line)
        if progress is not None:
            progress(line)

    threads = torch.get_num_threads()
    torch.set_num_threads(min(training.threads, os.cpu_count() or 1))
    try:
        for line in _optimise(model, batches, training):
            report(steps, line)
            done = line["step"] + 1
            if done % training.eval_every == 0 or done == training.steps:
                report(evals, {"step": done, **_evaluation(model, tokenizer, held, training)})
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def packed_batches(
    tokenizer: PreTrainedTokenizerBase, train: Path, cache_dir: Path, training: TeacherTraining
) -> Iterator[Int[Tensor, "rows context"]]:
    """Yield batches of shuffled documents, each between BOS and EOS, without end.

    Yields:
        `[rows, context_length]` int64.
    """
    index = DataIndex.build([train], field="text", cache_dir=cache_dir)
    width = training.rows * training.context_length
    ids: list[int] = []
    position = 0
    while True:
        while len(ids) < width:
            number = record_at(position, records=len(index), seed=training.seed, shuffle=True)
            (record,) = index.read([number])
            if isinstance(record, Record):
                text = tokenizer(record.document, add_special_tokens=False)["input_ids"]
                ids += [tokenizer.bos_token_id, *text, tokenizer.eos_token_id]
            position += 1
        yield torch.tensor(ids[:width]).view(training.rows, training.context_length)
        del ids[:width]


def _optimise(
    model: LlamaForCausalLM, batches: Iterator[Int[Tensor, "rows context"]], training: TeacherTraining
) -> Iterator[dict[str, Any]]:
    """Train with AdamW, warm-up and cosine decay; yield one line of `steps.jsonl` after every step."""
    model.train()
    embedding = [model.get_input_embeddings().weight]
    others = [p for p in model.parameters() if p is not embedding[0]]
    groups = [{"params": embedding, "scale": _EMBEDDING_RATE}, {"params": others, "scale": 1.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)
    began = time.monotonic()
    for step in range(training.steps):
        rate = _learning_rate(step, training)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        ids = next(batches)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        targets = ids[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        yield {
            "step": step,
            "loss": loss.item(),
            "ce_loss": loss.item(),
            "accuracy": (logits.argmax(-1) == targets).float().mean().item(),
            "grad_norm": norm.item(),
            "learning_rate": rate,
            "tokens": ids.numel(),
            "seconds": now - began,
            "tokens_per_second": ids.numel() / (now - began),
        }
        began = time.monotonic()


def _learning_rate(step: int, training: TeacherTraining) -> float:
    warm = min(1.0, (step + 1) / max(1, training.warmup_steps))
    left = max(0, step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
    return training.learning_rate * warm * (0.1 + 0.9 * (1 + math.cos(math.pi * left)) / 2)


def _evaluation(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, held: list[str], training: TeacherTraining
) -> dict[str, Any]:
    result = evaluate(
        model,
        tokenizer,
        held,
        context_length=training.context_length,
        batch_tokens=training.rows * training.context_length,
        device="cpu",
        max_bytes=training.eval_bytes,
    )
    return asdict(result)
