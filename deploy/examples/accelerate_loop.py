"""xtoken's loss in a loop of accelerate: `accelerate launch accelerate_loop.py STUDENT TEACHER TEXT.txt OUT`."""

import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtoken
from xtoken.integrations import DistillationCollator, distillation_loss, step_counts

STEPS, ROWS, MICRO_BATCHES, CONTEXT = 20, 2, 2, 128


def train(student_dir: str, teacher_dir: str, text: str, out: str) -> list[float]:
    """Train the student on the lines of a text, write it to `out`, and return the loss of every step."""
    accelerator = Accelerator()
    tokenizers = [AutoTokenizer.from_pretrained(directory) for directory in (student_dir, teacher_dir)]
    student, teacher = (AutoModelForCausalLM.from_pretrained(d, dtype="float32") for d in (student_dir, teacher_dir))
    pair = xtoken.TokenizerPair(*tokenizers, context_length=CONTEXT, mode="alm", device=accelerator.device)
    lines = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]
    loader = DataLoader(lines, batch_size=ROWS, shuffle=True, collate_fn=DistillationCollator(pair))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    teacher.to(accelerator.device).eval()
    losses = []
    while len(losses) < STEPS:
        batches = iter(loader)
        while len(losses) < STEPS and (step := list(islice(batches, MICRO_BATCHES))):
            counts, loss = step_counts(step, accelerator), 0.0
            for number, batch in enumerate(step):
                wait = number + 1 < len(step)
                with accelerator.no_sync(student) if wait else nullcontext():
                    part, metrics, _ = distillation_loss(
                        pair, teacher, student, batch, counts, processes=accelerator.num_processes
                    )
                    accelerator.backward(part)
                loss += part.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            accelerator.print(f"step {len(losses)}: loss {loss:.4f}, cross-entropy {metrics['ce_loss']:.4f}")
    if accelerator.is_main_process:
        accelerator.unwrap_model(student).save_pretrained(out)
        tokenizers[0].save_pretrained(out)
    return losses


if __name__ == "__main__":
    train(*sys.argv[1:5])
