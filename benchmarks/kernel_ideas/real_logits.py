"""What a real teacher's logits in 8 bits change in the chain loss of a real student, as JSON.

    python -m benchmarks.kernel_ideas.real_logits --student DIR --teacher DIR --text FILE [--tokens 1024] [--out FILE]

Both models read the beginnings of the texts of a JSON Lines file. The loss is the divergence without cross-entropy, by
the reference on the CPU; its value and its gradient by the student's logits are compared with those of bfloat16 logits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_ideas.eight_bits_cases import errors
from xtoken import TokenizerPair

ROOT = Path(__file__).parents[2]
LENGTH = 128
"""Most tokens of a text on either side: many texts, and no long rows."""


def compared(
    models: Sequence[Any], tokenizers: Sequence[Any], texts: Sequence[str], length: int = LENGTH
) -> dict[str, Any]:
    """Return the rows of `errors` for a student and a teacher that read some texts.

    Args:
        models: Student and teacher, causal.
        tokenizers: Theirs.
        texts: What both read.
        length: Most tokens of a text on either side.
    """
    pair = TokenizerPair(*tokenizers, context_length=length, mode="chain", ce_loss_scale=0.0)
    batch = pair.collate(texts)
    with torch.no_grad():
        student, teacher = (
            model(input_ids=batch[ids]).logits.bfloat16()
            for model, ids in zip(models, ("input_ids", "teacher_input_ids"), strict=True)
        )
    rows = errors(lambda s, t: pair.loss(batch, s, t)[0], student.float(), teacher)
    log_p = torch.log_softmax(teacher.float(), dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[batch["teacher_token_mask"] > 0].mean().item()
    counts = {
        name: int(batch[f"{prefix}token_mask"].sum()) for name, prefix in (("student", ""), ("teacher", "teacher_"))
    }
    return {"rows": rows, "tokens": counts, "entropy": entropy}


def main(words: Sequence[str] | None = None) -> int:
    """Load, compare, print, write."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="JSON Lines with a field `text`")
    parser.add_argument("--tokens", type=int, default=1024, help="about as many of the student's")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "eight_bit_logits.json")
    arguments = parser.parse_args(words)
    folders = arguments.student, arguments.teacher
    tokenizers = [AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in folders]
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
        for folder in folders
    ]
    lines = arguments.text.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"][: 8 * LENGTH] for line in lines[: max(1, arguments.tokens // LENGTH)]]
    report = {
        "student": arguments.student.name,
        "teacher": arguments.teacher.name,
        "text": arguments.text.name,
        **compared(models, tokenizers, texts),
    }
    for row in report["rows"]:
        print(row, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
