"""Training from scratch with cross-entropy alone: both teachers, and the students that every method starts from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from experiments.digits.settings import Scratch, Shape
from experiments.digits.text import read_texts

_SAY_EVERY = 250
_EMBEDDING_RATE = 3.0


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
    model = new_model(tokenizer, family, shape).to(device)
    model.train()
    began = time.monotonic()
    losses = []
    batches = packed(tokenizer, read_texts(texts), settings, seed, device)
    for step, loss in enumerate(_optimise(model, batches, settings, device)):
        if (step + 1) % _SAY_EVERY == 0 or step + 1 == settings.steps:
            losses.append({"step": step + 1, "loss": loss.item(), "seconds": time.monotonic() - began})
            print(f"{directory.name}: {json.dumps(losses[-1])}", flush=True)
    partial = directory.with_name(directory.name + ".part")
    model.float().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    told = {"parameters": sum(p.numel() for p in model.parameters()), "losses": losses}
    (partial / "scratch.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
    partial.rename(directory)


def new_model(tokenizer: Any, family: str, shape: Shape) -> PreTrainedModel:
    """Random weights."""
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
    if family == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    return LlamaForCausalLM(LlamaConfig(**common))


def packed(
    tokenizer: Any, documents: list[str], settings: Scratch, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """Documents one after the other, each between BOS and EOS, shuffled anew when all are used.

    Yields:
        `[rows, context]` int64.
    """
    encoded = [e.ids for e in tokenizer.backend_tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
    closed = [torch.tensor([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]) for ids in encoded]
    generator = torch.Generator().manual_seed(seed)
    width = settings.rows * settings.context
    while True:
        order = torch.randperm(len(closed), generator=generator).tolist()
        stream = torch.cat([closed[i] for i in order]).to(device)
        for start in range(0, len(stream) - width + 1, width):
            yield stream[start : start + width].view(settings.rows, settings.context)


def _optimise(
    model: PreTrainedModel, batches: Iterator[Tensor], settings: Scratch, device: torch.device
) -> Iterator[Tensor]:
    """AdamW with warm-up and cosine; yields each step's loss, on the device."""
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() > 1 and p is not embedding]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": [embedding], "weight_decay": 0.0, "scale": _EMBEDDING_RATE},
        {"params": matrices, "weight_decay": 0.1, "scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
    ]
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=on_gpu)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * rate(step, settings)
        ids = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def rate(step: int, settings: Scratch) -> float:
    """The learning rate of a step."""
    warm = min(1.0, (step + 1) / settings.warmup)
    done = max(0, step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * warm * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
