"""Training from scratch with cross-entropy alone: both teachers, and the students that every method starts from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from experiments.digits.settings import Scratch, Shape
from experiments.digits.text import read_texts

_SAY_EVERY = 250
_EMBEDDING_RATE = 3.0
_EAGER_STEPS = 10
_ATTENTION = "sdpa_without_mask"
AttentionInterface.register(_ATTENTION, sdpa_attention_forward)  # causal, and no mask is made or looked into


def train_from_scratch(
    directory: Path, tokenizer_dir: Path, texts: Path, *, family: str, shape: Shape, settings: Scratch, seed: int
) -> None:
    """Train a model and write it, its tokenizer and `scratch.json` to a directory, which appears whole.

    Args:
        directory: Must not exist.
        tokenizer_dir: Its tokenizer.
        texts: What to train on.
        family: `llama` or `qwen3`.
        shape: Its size.
        settings: How long, how fast.
        seed: Of the weights and the order of documents.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    torch.manual_seed(seed)
    model = new_model(tokenizer, family, shape)
    model.to(device)  # type: ignore[arg-type]  # the stub's decorator loses `self`
    model.train()
    began = time.monotonic()
    losses = []
    batches = packed(tokenizer, read_texts(texts), settings, seed, device)
    for step, loss in enumerate(_optimise(model, batches, settings, device)):
        if (step + 1) % _SAY_EVERY == 0 or step + 1 == settings.steps:
            losses.append({"step": step + 1, "loss": loss.item(), "seconds": time.monotonic() - began})
            print(f"{directory.name}: {json.dumps(losses[-1])}", flush=True)
    partial = directory.with_name(directory.name + ".part")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    record = {"parameters": sum(p.numel() for p in model.parameters()), "losses": losses}
    (partial / "scratch.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    partial.rename(directory)


def new_model(tokenizer: Any, family: str, shape: Shape) -> PreTrainedModel:
    """Create a model with random weights."""
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.hidden * 11 // 4,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.hidden // 64,
        "num_key_value_heads": shape.hidden // 64,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.03,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    families: dict[str, Callable[[], PreTrainedModel]] = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**common)),
    }
    model = families[family]()
    model.set_attn_implementation(_ATTENTION)
    return model


def packed(
    tokenizer: Any, documents: list[str], settings: Scratch, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """Yield rows that begin with a document and continue with others, each between BOS and EOS, reshuffled after all.

    Yields:
        `[rows, context]` int64.
    """
    encoded = [e.ids for e in tokenizer.backend_tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
    closed = [[tokenizer.bos_token_id, *ids, tokenizer.eos_token_id] for ids in encoded]
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows: list[list[int]] = []
        row: list[int] = []
        for place in torch.randperm(len(closed), generator=generator).tolist():
            row += closed[place]
            if len(row) >= settings.context:
                rows.append(row[: settings.context])
                row = []
        stacked = torch.tensor(rows).to(device)
        for start in range(0, len(rows) - settings.rows + 1, settings.rows):
            yield stacked[start : start + settings.rows]


def _optimise(
    model: PreTrainedModel, batches: Iterator[Tensor], settings: Scratch, device: torch.device
) -> Iterator[Tensor]:
    """Train by AdamW with warm-up and cosine; yield each step's loss, on the device, valid until the next."""
    on_gpu = device.type == "cuda"
    optimizer, groups = _optimizer(model, on_gpu)
    ids = torch.zeros(settings.rows, settings.context, dtype=torch.int64, device=device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu, cache_enabled=False):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    replay = None
    for number in range(settings.steps):
        for group, scale in groups:
            group["lr"].fill_(scale * rate(number, settings))
        ids.copy_(next(batches))
        if on_gpu and number == _EAGER_STEPS:
            replay = _captured(step, optimizer)
        if replay is not None:
            yield replay()
        else:
            yield step()
            optimizer.zero_grad()


def _optimizer(
    model: PreTrainedModel, on_gpu: bool
) -> tuple[torch.optim.Optimizer, list[tuple[dict[str, Any], float]]]:
    """Create AdamW whose learning rates are tensors; return it and its groups with the factors of their rates."""
    embedding: Any = model.get_input_embeddings().weight
    parts = (
        ([embedding], 0.0, _EMBEDDING_RATE),
        ([p for p in model.parameters() if p.dim() > 1 and p is not embedding], 0.1, 1.0),
        ([p for p in model.parameters() if p.dim() == 1], 0.0, 1.0),
    )
    device = embedding.device
    groups = [
        {"params": some, "weight_decay": decay, "lr": torch.tensor(0.0, device=device)} for some, decay, _ in parts
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=on_gpu or None, capturable=on_gpu)
    return optimizer, [(group, scale) for group, (_, _, scale) in zip(optimizer.param_groups, parts, strict=True)]


def _captured(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
    """Capture the step as a CUDA graph, since the launches of its kernels take longest in so small a model."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def rate(step: int, settings: Scratch) -> float:
    """Return the learning rate of a step."""
    warm = min(1.0, (step + 1) / settings.warmup)
    done = max(0, step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
