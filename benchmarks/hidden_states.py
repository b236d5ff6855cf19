"""Times the losses from hidden states on one GPU beside the matrix products alone, and writes the figures as JSON.

    python -m benchmarks.hidden_states [--only p_kl,gold] [--small] [--out FILE]

The products are those that any such loss needs: the student's logits, the gradients of its hidden states and of its
head, and the teacher's logits; each whole, by the matrix library. Beside them stand the products that the loss itself
makes, likewise whole: with column maxima the teacher's head at the compared tokens alone, without them that and the
whole head, with dynamic scaling the student's logits twice. Loss and products are timed in turn, and the medians of
the rounds count. Memory is the peak above hidden states, weights and batch, the gradients included. A loss whose tests
have not passed on this GPU gets no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.chain_tables import draw_tables, draw_text
from benchmarks.gpu_tests import RESULTS, machine, passed
from benchmarks.harness import command_line, write_result
from benchmarks.operators import HIDDEN_TESTS
from benchmarks.timing import head_products, peak_bytes, timed_by_events
from benchmarks.whole_losses import batch_of
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection, LossTeacher

REPEATS, ROUNDS = 10, 3


@dataclass(frozen=True)
class Shape:
    """The sizes of a run of this file."""

    samples: int = 4
    tokens: int = 2048
    student_vocab: int = 128_256
    student_width: int = 2048
    teacher_vocab: int = 151_936
    teacher_width: int = 2560
    vocab_topk: int = 8192


SMALL = Shape(2, 96, 1024, 64, 1536, 96, 128)
LONG = "_one_sample"
"""Ends the name of a row whose tokens are one sample's."""


@dataclass(frozen=True)
class Row:
    """One loss. Times in milliseconds, memory in bytes; None where tests fail."""

    loss: str
    tests_pass: bool
    ms: float | None = None
    products_ms: float | None = None
    ratio: float | None = None
    own_products_ms: float | None = None
    own_ratio: float | None = None
    peak_bytes: int | None = None
    blocks: int | None = None


def chunked(T: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw chunks of one to three tokens on each side, `[T]` each; most have one."""
    sizes = torch.multinomial(torch.tensor([0.8, 0.15, 0.05]), 2 * T, replacement=True, generator=generator) + 1
    sides = [torch.repeat_interleave(torch.arange(T), side) for side in sizes.view(2, T)]
    student, teacher = (side[:T] for side in sides)
    pairs = min(int(student[-1]), int(teacher[-1]))
    return tuple(torch.where(side < pairs, side, -1) for side in (student, teacher))


def random_batch(shape: Shape, generator: torch.Generator) -> tuple[dict[str, Tensor], LossTeacher]:
    """Draw random tokens and chunks, on the CPU, and a random projection."""
    B, T = shape.samples, shape.tokens
    sides = [torch.stack(side) for side in zip(*(chunked(T, generator) for _ in range(B)), strict=True)]
    indices = torch.randint(shape.teacher_vocab, (shape.student_vocab, 4), generator=generator)
    weights = torch.rand(shape.student_vocab, 4, generator=generator)
    weights, indices[::2, 1:] = weights / weights.sum(1, keepdim=True), -1
    weights[::2] = torch.tensor([1.0, 0, 0, 0])
    ids = torch.randint(shape.student_vocab, (B, T), generator=generator)
    return batch_of(ids, sides, T), LossTeacher(shape.teacher_vocab, indices, weights)


def chain_batch(shape: Shape) -> tuple[dict[str, Tensor], LossTeacher]:
    """Return text and chain tables as in `benchmarks.chain_tables`, on the CPU."""
    tables = draw_tables(shape.student_vocab, shape.teacher_vocab)
    texts = [draw_text(tables, shape.tokens, seed) for seed in range(shape.samples)]
    ids, sides = (
        [torch.cat([getattr(text, name)[k] for text in texts]) for k in (0, 1)] for name in ("ids", "chunk_id")
    )
    mask = torch.ones(shape.samples, shape.tokens, dtype=torch.int64)
    batch = batch_of(ids[0], sides, max(text.chunks for text in texts))
    batch |= {"teacher_input_ids": ids[1], "teacher_token_mask": mask}
    return batch, LossTeacher(shape.teacher_vocab, tables=tables)


class Workload:
    """A micro-batch of random hidden states, heads and chunks, and what is done with it."""

    def __init__(self, shape: Shape, config: LossConfig, device: torch.device, *, maxima: bool) -> None:
        """Draw everything.

        Args:
            shape: The sizes.
            config: The loss's settings.
            device: Where.
            maxima: True if column maxima come along.
        """
        generator = torch.Generator().manual_seed(0)
        B, T = shape.samples, shape.tokens
        if config.mode == "chain":
            host, teacher = chain_batch(shape)
        else:
            host, teacher = random_batch(shape, generator)
        self.loss = CrossTokenizerDistillationLoss(
            config, student_vocab_size=shape.student_vocab, teachers=[teacher], device=device
        )
        self.blocks = self.loss.token_blocks(host, [T]).to(device)
        self.batch = {name: x.to(device) for name, x in host.items()}
        on_device = torch.Generator(device).manual_seed(0)

        def random(*size: int, scale: float) -> Tensor:
            return torch.randn(size, device=device, dtype=torch.bfloat16, generator=on_device) * scale

        self.hidden = random(B, T, shape.student_width, scale=1.0).requires_grad_()
        self.weight = random(shape.student_vocab, shape.student_width, scale=shape.student_width**-0.5).requires_grad_()
        hidden = random(B, T, shape.teacher_width, scale=1.0)
        weight = random(shape.teacher_vocab, shape.teacher_width, scale=shape.teacher_width**-0.5)
        self.teacher = HeadProjection(hidden, weight)
        if maxima:
            of_samples = [HeadProjection(hidden[b : b + 1], weight).logits().amax(1) for b in range(B)]
            self.teacher = HeadProjection(hidden, weight, column_maxima=torch.cat(of_samples))

    def step(self) -> tuple[Tensor, ...]:
        """Compute the loss and the gradients of hidden states and head."""
        loss, _ = self.loss(self.batch, HeadProjection(self.hidden, self.weight), [self.teacher], blocks=self.blocks)
        return loss, *torch.autograd.grad(loss, (self.hidden, self.weight))

    def products(self, *, own: bool) -> Callable[[], None]:
        """Return the matrix products of a step, each as one.

        Args:
            own: Those that this loss makes, instead of those of any such loss.
        """
        x, w = self.hidden.detach().flatten(0, 1), self.weight.detach()
        y, u = self.teacher.hidden.flatten(0, 1), self.teacher.weight
        part = self.loss.losses[0]
        some = own and part.compares_subset
        heads = [u] if not some or self.teacher.column_maxima is None else []
        heads += [u[: part.config.vocab_topk]] if some else []
        twice = own and part.config.dynamic_loss_scaling
        return head_products(x, w, [(y, head) for head in heads], logits_times=1 + twice)


CONFIGS: dict[str, tuple[LossConfig, bool]] = {
    "p_kl": (LossConfig(mode="p_kl"), True),
    "p_kl_without_maxima": (LossConfig(mode="p_kl"), False),
    "p_kl_dynamic_scaling": (LossConfig(mode="p_kl", dynamic_loss_scaling=True), True),
    "p_kl_full_vocabulary": (LossConfig(vocab_topk=None), False),
    "gold": (LossConfig(mode="gold"), False),
    "chain": (LossConfig(mode="chain"), False),
    "cross_entropy_alone": (LossConfig(mode="p_kl", kl_loss_weight=0.0, ce_loss_scale=1.0), True),
}
"""Settings, and whether the teacher sends its column maxima."""


def measure(name: str, shape: Shape, device: torch.device) -> Row:
    """Measure one loss beside its products."""
    base = name.removesuffix(LONG)
    if base != name:
        shape = Shape(1, shape.samples * shape.tokens, *list(asdict(shape).values())[2:])
    config, maxima = CONFIGS[base]
    config = config.model_copy(update={"vocab_topk": shape.vocab_topk}) if config.vocab_topk else config
    load = Workload(shape, config, device, maxima=maxima)
    peak = peak_bytes(load.step)
    timed = load.step, load.products(own=False), load.products(own=True)
    rounds = [[timed_by_events(each, repeats=REPEATS) for each in timed] for _ in range(ROUNDS)]
    ms, products, own = (median(times) for times in zip(*rounds, strict=True))
    return Row(name, True, ms, products, ms / products, own, ms / own, peak, len(load.blocks.rows))


def tests_pass() -> bool:
    """Return whether the tests of these losses passed on this GPU with the kernels as they are."""
    if not RESULTS.exists():
        return False
    report = json.loads(RESULTS.read_text())
    here = report["gpu"] == torch.cuda.get_device_name()
    return here and passed(report, lambda name: name.startswith(HIDDEN_TESTS))


def main() -> int:
    """Measure, print, write."""
    parser = command_line(__doc__, "hidden_states")
    parser.add_argument("--only", default=",".join([*CONFIGS, f"p_kl{LONG}"]), help="names, separated by commas")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that everything runs")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU: torch sees none")
    device, shape, rows = torch.device("cuda"), SMALL if arguments.small else Shape(), []
    passing = tests_pass()
    for name in arguments.only.split(","):
        row = measure(name, shape, device) if passing else Row(name, False)
        torch.cuda.empty_cache()
        rows.append(row)
        if row.ms is None:
            print(f"{name:24} its tests have not passed: not timed", flush=True)
        else:
            print(
                f"{name:24} {row.ms:8.2f} ms  products {row.products_ms:8.2f} ms  {row.ratio:5.2f} times  "
                f"own products {row.own_products_ms:8.2f} ms  {row.own_ratio:5.2f} times  "
                f"peak {row.peak_bytes / 2**30:5.2f} GiB  {row.blocks} blocks",
                flush=True,
            )
    report = {**machine(), "shape": asdict(shape), "rows": [asdict(row) for row in rows]}
    write_result(arguments.out, report)
    return 0 if passing else 1


if __name__ == "__main__":
    raise SystemExit(main())
