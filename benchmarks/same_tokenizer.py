"""Times KL and cross-entropy between models that share a tokenizer, from hidden states, beside Liger's loss.

    python -m benchmarks.same_tokenizer [--out FILE] [--small]

8,192 tokens, both models 4,096 wide, one vocabulary of 128,256, bfloat16: the loss and the gradients of hidden states
and head, ours, `LigerFusedLinearJSDLoss` (liger-kernel; `beta` 0 is the forward KL, weights as ours), compiled by
`torch.compile` as is its default, and not compiled; and the four matrix products alone. In further rows the divergence
alone, beside `LigerFusedLinearKLDivLoss`, which takes the teacher's probabilities (its product and softmax are in the
row), and `LigerFusedLinearJSD`, in Triton and in CuTe. All are timed in turn in one process, and the medians of the
rounds count. Memory is the peak above hidden states, weights and targets. The losses' values are printed beside each
other. Without liger-kernel its rows are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu_tests import machine
from benchmarks.harness import command_line, write_result
from benchmarks.timing import head_products, peak_bytes, timed_by_events
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection, LossTeacher

REPEATS, ROUNDS = 6, 3
LIGER = "liger-kernel"


@dataclass(frozen=True)
class Shape:
    """The sizes of a run of this file."""

    tokens: int = 8192
    width: int = 4096
    vocab: int = 128_256


SMALL = Shape(64, 32, 512)


@dataclass(frozen=True)
class Row:
    """One loss. Times in milliseconds, memory in bytes; `ratio` is its time over that of the products alone."""

    name: str
    ms: float
    ratio: float
    peak_bytes: int
    value: float


class Workload:
    """Random hidden states, heads and tokens."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        """Draw them."""
        generator = torch.Generator(device).manual_seed(0)

        def random(*size: int, scale: float) -> Tensor:
            return torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) * scale

        T, H, V = shape.tokens, shape.width, shape.vocab
        self.hidden = random(T, H, scale=1.0).requires_grad_()
        self.weight = random(V, H, scale=H**-0.5).requires_grad_()
        self.teacher_hidden, self.teacher_weight = random(T, H, scale=1.0), random(V, H, scale=H**-0.5)
        self.ids = torch.randint(V, (T,), device=device, generator=generator)
        self.loss, self.alone = (
            CrossTokenizerDistillationLoss(
                LossConfig(vocab_topk=None, kl_loss_weight=0.5, ce_loss_scale=scale),
                student_vocab_size=V,
                teachers=[LossTeacher(V)],
                device=device,
            )
            for scale in (0.5, 0.0)
        )
        mask = torch.ones(1, T, dtype=torch.int64)
        host = {"input_ids": self.ids.cpu()[None], "token_mask": mask, "sample_mask": torch.ones(1)}
        self.blocks = self.loss.token_blocks(host, [T]).to(device)
        self.batch = {name: values.to(device) for name, values in host.items()}

    def ours(self, loss: CrossTokenizerDistillationLoss) -> tuple[Tensor, ...]:
        """Compute our loss and its gradients."""
        student = HeadProjection(self.hidden[None], self.weight)
        teacher = HeadProjection(self.teacher_hidden[None], self.teacher_weight)
        value, _ = loss(self.batch, student, [teacher], blocks=self.blocks)
        return value, *torch.autograd.grad(value, (self.hidden, self.weight))

    def liger_kl_div(self) -> tuple[Tensor, ...]:
        """Compute Liger's KL to given probabilities, and its gradients."""
        from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss

        target = (self.teacher_hidden @ self.teacher_weight.t()).softmax(-1)
        value = 0.5 * LigerFusedLinearKLDivLoss()(self.hidden, self.weight, target)
        return value, *torch.autograd.grad(value, (self.hidden, self.weight))

    def liger_jsd(self, kernels: str) -> tuple[Tensor, ...]:
        """Compute Liger's KL of both sides' states with one of its sets of kernels, and its gradients."""
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

        sides = self.hidden, self.weight, self.teacher_hidden, self.teacher_weight
        value = 0.5 * LigerFusedLinearJSDFunction.apply(*sides, None, 0.0, -100, 1.0, None, kernels, "default")
        return value, *torch.autograd.grad(value, (self.hidden, self.weight))

    def liger(self, *, compiled: bool) -> Callable[[], tuple[Tensor, ...]]:
        """Return Liger's loss with its gradients."""
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.0, compiled=compiled)
        targets = torch.cat([self.ids[1:], self.ids.new_full((1,), -100)])

        def run() -> tuple[Tensor, ...]:
            value = loss(self.hidden, self.weight, self.teacher_hidden, self.teacher_weight, targets)
            return value, *torch.autograd.grad(value, (self.hidden, self.weight))

        return run

    def products(self) -> Callable[[], None]:
        """Return the four matrix products, each as one."""
        sides = [(self.teacher_hidden, self.teacher_weight)]
        return head_products(self.hidden.detach(), self.weight.detach(), sides)


def main() -> int:
    """Measure, print, write."""
    parser = command_line(__doc__, "same_tokenizer")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that everything runs")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU: torch sees none")
    shape = SMALL if arguments.small else Shape()
    load = Workload(shape, torch.device("cuda"))
    losses: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "ours": partial(load.ours, load.loss),
        "ours, KL alone": partial(load.ours, load.alone),
    }
    if find_spec("liger_kernel"):
        losses |= {
            f"{LIGER}, compiled": load.liger(compiled=True),
            LIGER: load.liger(compiled=False),
            f"{LIGER}, fused_linear_kl_div, KL alone": load.liger_kl_div,
            f"{LIGER}, fused_linear_jsd, KL alone": partial(load.liger_jsd, "nvidia-triton"),
            f"{LIGER}, fused_linear_jsd in CuTe, KL alone": partial(load.liger_jsd, "nvidia-cutedsl"),
        }
    measured: dict[str, tuple[int, float]] = {}
    for name, run in list(losses.items()):
        try:
            measured[name] = peak_bytes(run), float(run()[0].detach())
            torch.cuda.empty_cache()
        except Exception as error:  # a library that cannot run here: the others count
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            del losses[name]
    timed = [load.products(), *losses.values()]
    rounds = [[timed_by_events(run, repeats=REPEATS) for run in timed] for _ in range(ROUNDS)]
    products, *times = (median(each) for each in zip(*rounds, strict=True))
    rows = [Row(name, ms, ms / products, *measured[name]) for name, ms in zip(losses, times, strict=True)]
    print(f"products alone {products:.2f} ms")
    for row in rows:
        peak = row.peak_bytes / 2**30
        print(f"{row.name:24} {row.ms:8.2f} ms {row.ratio:5.2f} times  peak {peak:5.2f} GiB  loss {row.value:.4f}")
    liger = version(LIGER) if find_spec("liger_kernel") else None
    found = {"liger": liger, "shape": asdict(shape), "products_ms": products, "rows": [asdict(row) for row in rows]}
    write_result(arguments.out, {**machine(), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
