"""A training loop of one's own with xtoken's loss: `python own_loop.py STUDENT TEACHER TEXT.txt OUT`, on a CPU."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtoken

STEPS, ROWS, CONTEXT = 20, 4, 128


def train(student_dir: str, teacher_dir: str, text: str, out: str) -> list[float]:
    """Train the student on the lines of a text, write it to `out`, and return the loss of every step."""
    tokenizers = [AutoTokenizer.from_pretrained(directory) for directory in (student_dir, teacher_dir)]
    student, teacher = (AutoModelForCausalLM.from_pretrained(d, dtype="float32") for d in (student_dir, teacher_dir))
    pair = xtoken.TokenizerPair(*tokenizers, context_length=CONTEXT, mode="alm", kl_loss_weight=1.0, ce_loss_scale=1.0)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]
    losses = []
    for step in range(STEPS):
        batch = pair.collate([lines[(step * ROWS + row) % len(lines)] for row in range(ROWS)])
        with torch.no_grad():
            theirs = teacher(batch["teacher_input_ids"]).logits
        loss, metrics = pair.loss(batch, student(batch["input_ids"]).logits, theirs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {loss:.4f}, cross-entropy {metrics['ce_loss']:.4f}")
    student.save_pretrained(out)
    tokenizers[0].save_pretrained(out)
    return losses


if __name__ == "__main__":
    train(*sys.argv[1:5])
