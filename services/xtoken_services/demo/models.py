"""The demo's models before their training: a teacher and a student with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEACHER_LAYERS, STUDENT_LAYERS = 4, 2
_INITIAL_RANGE = 0.05


def write_model(
    directory: Path, tokenizer_dir: Path, *, layers: int, hidden: int = 256, seed: int = 0, positions: int = 512
) -> Path:
    """Write a small Llama-like model with random weights from a seed, and its tokenizer, as a Hugging Face directory.

    Its head is as wide as the tokenizer and tied to the embedding; attention heads are 64 wide.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=_INITIAL_RANGE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
