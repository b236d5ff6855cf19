"""A tiny student that writes text: its completions are mostly valid UTF-8."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_run import documents


def train_briefly(directory: Path, *, steps: int = 40) -> None:
    """Train the model in a directory on documents by cross-entropy, in place."""
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    texts = documents(steps * 8, seed=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        rows = tokenizer(texts[step * 8 : step * 8 + 8])["input_ids"]
        ids = torch.full((8, 48), -100)
        for at, row in enumerate(rows):
            ids[at, : len(row[:47])] = torch.tensor(row[:47])
            ids[at, len(row[:47])] = tokenizer.eos_token_id
        loss = model(input_ids=ids.clamp(min=0), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
