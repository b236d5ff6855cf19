"""A tiny model that has learnt from text."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_run import documents


def train_briefly(
    directory: Path, *, steps: int = 40, texts: Sequence[str] = (), width: int = 48, rate: float = 1e-2
) -> None:
    """Train the model in a directory by cross-entropy, in place; by default its completions are then mostly UTF-8.

    Args:
        directory: The model.
        steps: Steps of 8 texts.
        texts: Each is read once, from the first on; documents of words if left out.
        width: Tokens of a text at most.
        rate: The learning rate.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    texts = texts or documents(steps * 8, seed=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        rows = tokenizer(texts[step * 8 : step * 8 + 8])["input_ids"]
        ids = torch.full((8, width), -100)
        for at, row in enumerate(rows):
            ids[at, : len(row[: width - 1])] = torch.tensor(row[: width - 1])
            ids[at, len(row[: width - 1])] = tokenizer.eos_token_id
        loss = model(input_ids=ids.clamp(min=0), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
