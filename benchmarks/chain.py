"""Times the chain divergence with cross-entropy on one GPU, forward and backward, and writes the figures as JSON.

    python -m benchmarks.chain [--out FILE] [--small] [--backends reference,triton]

Student logits `[1, 2048, 128256]` and teacher logits `[1, 2048, 151936]` in bfloat16, tables and text drawn as in
`benchmarks.chain_tables`. Times are medians over replays of a CUDA graph (over events where it cannot be captured), of
the whole loss as the trainer calls it; the forms other than the forward KL are on generated text, and are timed for the
kernels alone. Memory is the peak above the inputs. The bytes that must move are both sides'
logits and the gradient, each once; the fraction is of a copy's bandwidth in the same run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.chain_tables import DrawnText, draw_tables, draw_text
from benchmarks.gpu_tests import machine
from benchmarks.harness import command_line, write_result
from benchmarks.ops import Shape, Workload, timed
from benchmarks.timing import copy_bandwidth, nbytes
from benchmarks.whole_losses import batch_of
from xtoken_core.chain.tables import ChainTables
from xtoken_core.config.loss import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher
from xtoken_core.ops.registry import BACKENDS, ENVIRONMENT

SMALL = Shape(48, 1024, 1536)
FORMS: dict[str, dict[str, Any]] = {"forward": {}, "reverse": {"reverse_kl": True}, "jsd": {"beta": 0.5}}
"""Settings of the loss by form of the divergence."""


def chain_loss(
    tables: ChainTables, text: DrawnText, shape: Shape, device: torch.device, **settings: Any
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of both sides' logits that gives the loss of one sample, which is generated text."""
    loss = CrossTokenizerDistillationLoss(
        LossConfig(mode="chain", ce_loss_scale=1.0, **settings),
        student_vocab_size=shape.student_vocab,
        teachers=[LossTeacher(shape.teacher_vocab, tables=tables)],
        device=device,
    )
    masks = [(chunks >= 0).long() for chunks in text.chunk_id]
    batch = batch_of(text.ids[0], text.chunk_id, text.chunks) | {
        "token_mask": masks[0],
        "weights_version": torch.zeros(1, dtype=torch.int64),
        "teacher_input_ids": text.ids[1],
        "teacher_token_mask": masks[1],
    }
    batch = {name: values.to(device) for name, values in batch.items()}
    return lambda student, teacher: loss(batch, student, [teacher])[0]


def main() -> int:
    """Measure, print, write."""
    parser = command_line(__doc__, "chain")
    parser.add_argument("--backends", default=",".join(sorted(BACKENDS["chain"])), help="names, separated by commas")
    parser.add_argument("--small", action="store_true", help="a shape that takes no time, to try this file")
    arguments = parser.parse_args()
    device, shape = torch.device("cuda"), SMALL if arguments.small else Shape()
    bandwidth = copy_bandwidth(device)
    tables = draw_tables(shape.student_vocab, shape.teacher_vocab)
    torch.manual_seed(0)
    student, teacher = (
        torch.randn(1, shape.tokens, vocab, device=device, dtype=torch.bfloat16)
        for vocab in (shape.student_vocab, shape.teacher_vocab)
    )
    load = Workload((student.requires_grad_(), teacher), student, 2 * nbytes(student) + nbytes(teacher))
    rows, text = [], draw_text(tables, shape.tokens)
    for backend, form in product(arguments.backends.split(","), FORMS):
        if backend == "reference" and form != "forward":
            continue
        ops = ("chain", "cross_entropy")
        os.environ[ENVIRONMENT] = ",".join(f"{op}={backend}" for op in ops if backend in BACKENDS.get(op, {}))
        loss = chain_loss(tables, text, shape, device, **FORMS[form])
        name = backend if form == "forward" else f"{backend} {form}"
        row = {"name": name, **timed(name, loss, load, bandwidth)}
        row["both_ms"] = row["forward_ms"] + row.pop("backward_ms")
        rows.append(row)
        print(
            f"{name:32} forward {row['forward_ms']:8.3f} ms  both {row['both_ms']:8.3f} ms  ({row['timed_by']})  "
            f"peak {row['peak_bytes'] / 2**30:6.2f} GiB  {row['share_of_copy']:5.1%} of a copy",
            flush=True,
        )
        torch.cuda.empty_cache()
    report = {
        **machine(),
        "copy_bytes_per_second": bandwidth,
        "shape": {name: getattr(shape, name) for name in ("tokens", "student_vocab", "teacher_vocab")},
        "rows": rows,
    }
    write_result(arguments.out, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
