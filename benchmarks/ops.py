"""Times every op's backends on one GPU, the reference beside them, and writes the figures as JSON.

    python -m benchmarks.ops [--out benchmarks/results/ops.json] [--only p_kl,cross_entropy] [--small]

A backend whose contract tests have not passed on this GPU with the sources as they are (`benchmarks/gpu_tests.py`) gets
a row without a time. Times are medians over replays of a CUDA graph, so that they are the GPU's and not Python's; where
a backend cannot be captured they are medians over CUDA events, and the row says so. Small inputs are several sets that
one graph goes through, with outputs of their own, so that no cache holds them. Rows named `_loss` are whole losses
as the trainer calls them. Memory is the peak above the inputs. The share is of a copy's bandwidth in the same run, for
the bytes that must move: inputs once and gradients once, whatever a backend reads again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.chain_tables import draw_tables, draw_text, side_tokens
from benchmarks.gpu_tests import RESULTS, backend_passes, losses_pass, machine
from benchmarks.harness import command_line, write_result
from benchmarks.timing import copy_bandwidth, nbytes, peak_bytes, timed_by_events, timed_by_graph, waits_for_the_device
from benchmarks.whole_losses import CONFIGS, OPS_OF, whole_loss
from xtoken_core.losses.masks import whole_chunks
from xtoken_core.ops.chain_topk.reference import ChainTopKSettings
from xtoken_core.ops.gold.reference import GoldOptions, TokenPartition
from xtoken_core.ops.p_kl.reference import PKLOptions
from xtoken_core.ops.registry import BACKENDS, load_backend
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings


@dataclass(frozen=True)
class Shape:
    """The sizes of a run of this file."""

    tokens: int = 2048
    student_vocab: int = 128_256
    teacher_vocab: int = 151_936
    vocab_topk: int = 8192
    moe_tokens: int = 65_536
    embedding_ids: int = 16_384
    embedding_width: int = 4096
    listed: int = 64


SMALL = Shape(64, 1024, 1536, 128, 512, 256, 64)


@dataclass(frozen=True)
class Row:
    """One backend at one shape. Times in milliseconds, memory in bytes; None where its tests fail."""

    op: str
    backend: str
    tests_pass: bool
    timed_by: str | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    peak_bytes: int | None = None
    least_bytes: int | None = None
    share_of_copy: float | None = None


@dataclass(frozen=True)
class Workload:
    """One op's inputs. `least_bytes` is what a forward and backward must move at least.

    `others` are further inputs of the same kind, with what is differentiated by, for inputs that a cache would hold.
    """

    arguments: tuple
    differentiable: Tensor | None
    least_bytes: int
    others: tuple[tuple[tuple, Tensor], ...] = ()

    @property
    def sets(self) -> tuple[tuple[tuple, Tensor | None], ...]:
        """Every set of arguments with what is differentiated by."""
        return ((self.arguments, self.differentiable), *self.others)


def projection_rows(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw a random projection with four entries a row."""
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.student_vocab, 4)
    indices = torch.randint(shape.teacher_vocab, size, device=device, generator=generator)
    return indices, torch.rand(size, device=device, generator=generator)


def logits(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw student and teacher logits in bfloat16, and chunks of one token on each side."""
    torch.manual_seed(0)
    student = torch.randn(1, shape.tokens, shape.student_vocab, device=device, dtype=torch.bfloat16)
    teacher = torch.randn(1, shape.tokens, shape.teacher_vocab, device=device, dtype=torch.bfloat16)
    chunks = torch.arange(shape.tokens, device=device).unsqueeze(0)
    return student.requires_grad_(), teacher, chunks


def make_p_kl(shape: Shape, device: torch.device, k: int) -> Workload:
    """Make the workload of P-KL over `k` teacher tokens."""
    student, teacher, chunks = logits(shape, device)
    indices, weights = projection_rows(shape, device)
    W = ProjectionMatrix.from_topk(
        indices, weights, student_vocab_size=shape.student_vocab, teacher_vocab_size=shape.teacher_vocab
    )
    columns = torch.randperm(shape.teacher_vocab, device=device)[:k].sort().values
    least = 2 * nbytes(student) + 2 * shape.tokens * k
    return Workload((student, teacher, W, columns, chunks, chunks, PKLOptions(shape.tokens)), student, least)


def make_gold(shape: Shape, device: torch.device) -> Workload:
    """Make the workload of gold with half of the smaller vocabulary common."""
    student, teacher, chunks = logits(shape, device)
    common = min(shape.student_vocab, shape.teacher_vocab) // 2
    ids = torch.arange(max(shape.student_vocab, shape.teacher_vocab), device=device)
    partition = TokenPartition(
        ids[:common], ids[:common], ids[common : shape.student_vocab], ids[common : shape.teacher_vocab]
    )
    options = GoldOptions(shape.tokens, uncommon_topk=shape.vocab_topk)
    return Workload(
        (student, teacher, partition, chunks, chunks, options), student, 2 * nbytes(student) + nbytes(teacher)
    )


def make_chain_topk(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of the `listed` largest logits of the teacher, tables and text as in `benchmarks.chain`."""
    student, teacher, _ = logits(shape, device)
    tables = draw_tables(shape.student_vocab, shape.teacher_vocab)
    text = draw_text(tables, shape.tokens)
    tables = tables.to(device)
    usable = torch.ones(1, text.chunks, dtype=torch.bool, device=device)
    ids, chunks = ([x.to(device) for x in each] for each in (text.ids, text.chunk_id))
    sides = [side_tokens(i, c, usable & whole_chunks(c, text.chunks)) for i, c in zip(ids, chunks, strict=True)]
    topk = TopKSettings(shape.listed, shape.teacher_vocab, 1.0)
    largest = largest_logits(teacher, sides[1].predicted, topk)
    listed = largest.with_own(sides[1].predicted, sides[1].chunk >= 0)
    lists = listed.log_probs(), listed.ids, listed.log_rest.exp()
    settings = ChainTopKSettings(text.chunks)
    least = 2 * nbytes(student) + sum(nbytes(x) for x in lists)
    return Workload((student, *lists, *sides, tables, settings), student, least)


def with_cross_entropy(load: Workload, shape: Shape, device: torch.device) -> Workload:
    """Return a workload with the cross-entropy of every position."""
    targets = torch.randint(shape.student_vocab, (1, shape.tokens), device=device)
    return Workload((*load.arguments[:-1], targets, load.arguments[-1]), load.differentiable, load.least_bytes)


def make_cross_entropy(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of one sequence of student logits."""
    student, _, chunks = logits(shape, device)
    return Workload((student, chunks % shape.student_vocab), student, 2 * nbytes(student))


def make_chunk_mean(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of float32 rows over the student's vocabulary, two positions a chunk."""
    x = torch.randn(1, shape.tokens, shape.student_vocab, device=device, requires_grad=True)
    chunks = torch.arange(shape.tokens, device=device).unsqueeze(0) // 2
    return Workload((x, chunks, shape.tokens // 2), x, 3 * nbytes(x))


def make_sparse_projection(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of float32 rows over the student's vocabulary, four entries a student token."""
    x = torch.rand(shape.tokens, shape.student_vocab, device=device, requires_grad=True)
    W = ProjectionMatrix.from_topk(
        *projection_rows(shape, device), student_vocab_size=shape.student_vocab, teacher_vocab_size=shape.teacher_vocab
    )
    return Workload((x, W), x, 2 * nbytes(x) + 2 * 4 * shape.tokens * shape.teacher_vocab)


def make_select(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of the columns of one sequence of teacher logits."""
    _, teacher, _ = logits(shape, device)
    return Workload((teacher, shape.vocab_topk), None, nbytes(teacher))


def make_largest_logits(shape: Shape, device: torch.device, k: int) -> Workload:
    """Make a workload of the largest logits of one sequence of the teacher's."""
    _, teacher, chunks = logits(shape, device)
    least = nbytes(teacher) + shape.tokens * k * 12
    return Workload((teacher, chunks % shape.teacher_vocab, k, shape.teacher_vocab), None, least)


def make_multihot(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of the top 8 of 128 experts, int64 indices, float32 probabilities, eight sets."""
    sets = []
    for _ in range(8):
        indices = torch.rand(shape.moe_tokens, 128, device=device).topk(8).indices
        probs = torch.rand(shape.moe_tokens, 8, device=device, requires_grad=True)
        sets.append(((indices, probs, 128), probs))
    least = 2 * (nbytes(indices) + nbytes(probs)) + shape.moe_tokens * 128 * 5 + nbytes(probs)
    return Workload(*sets[0], least, tuple(sets[1:]))


def make_whole_loss(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of both sides' logits."""
    student, teacher, _ = logits(shape, device)
    return Workload((student, teacher), student, 2 * nbytes(student) + nbytes(teacher))


def make_embedding(shape: Shape, device: torch.device) -> Workload:
    """Make a workload of a bfloat16 table; the backward writes its whole gradient."""
    size = (shape.teacher_vocab, shape.embedding_width)
    weight = torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(shape.teacher_vocab, (shape.embedding_ids,), device=device)
    rows = shape.embedding_ids * shape.embedding_width * 2
    return Workload((ids, weight), weight, nbytes(weight) + 4 * rows)


WORKLOADS: dict[str, tuple[str, Callable[[Shape, torch.device], Workload]]] = {
    "p_kl": ("p_kl", lambda s, d: make_p_kl(s, d, s.vocab_topk)),
    "p_kl_full_vocabulary": ("p_kl", lambda s, d: make_p_kl(s, d, s.teacher_vocab)),
    "p_kl_cross_entropy": ("p_kl_cross_entropy", lambda s, d: with_cross_entropy(make_p_kl(s, d, s.vocab_topk), s, d)),
    "p_kl_cross_entropy_full_vocabulary": (
        "p_kl_cross_entropy",
        lambda s, d: with_cross_entropy(make_p_kl(s, d, s.teacher_vocab), s, d),
    ),
    "gold": ("gold", make_gold),
    "chain_topk": ("chain_topk", make_chain_topk),
    "gold_cross_entropy": ("gold_cross_entropy", lambda s, d: with_cross_entropy(make_gold(s, d), s, d)),
    "cross_entropy": ("cross_entropy", make_cross_entropy),
    "select_topk_columns": ("select_topk_columns", make_select),
    **{
        f"largest_logits_k{k}": ("largest_logits", lambda s, d, k=k: make_largest_logits(s, d, k))  # type: ignore[misc]
        for k in (16, 64, 256)
    },
    "chunk_mean": ("chunk_mean", make_chunk_mean),
    "sparse_projection": ("sparse_projection", make_sparse_projection),
    "indices_to_multihot": ("indices_to_multihot", make_multihot),
    "embedding": ("embedding", make_embedding),
    **{name: (name, make_whole_loss) for name in CONFIGS},
}


def measure(name: str, backend: str, shape: Shape, device: torch.device, bandwidth: float) -> Row:
    """Measure forward and backward of one backend."""
    op_name, make = WORKLOADS[name]
    load = make(shape, device)
    if op_name in CONFIGS:
        op: Any = whole_loss(name, backend, shape.tokens, (shape.student_vocab, shape.teacher_vocab), device)
    else:
        op = load_backend(BACKENDS[op_name][backend])
        if op_name == "cross_entropy":  # as a loss calls it: with the gradient's factors, known before
            op = partial(op, upstream=torch.ones(load.arguments[1].shape, device=device))

    return Row(name, backend, True, **timed(f"{name} {backend}", op, load, bandwidth))


def timed(name: str, op: Callable[..., Any], load: Workload, bandwidth: float) -> dict[str, Any]:
    """Return the times of forward and backward, the peak of memory and the fraction of a copy, as fields of `Row`."""

    def run(arguments: tuple) -> list[Tensor]:
        result = op(*arguments)
        return [x for x in (result if isinstance(result, tuple) else (result,)) if x.requires_grad]

    upstream = [torch.ones_like(x) for x in run(load.arguments)]

    def forward() -> list:
        return [op(*arguments) for arguments, _ in load.sets]

    def both() -> list:
        kept = []
        for arguments, differentiable in load.sets:
            outputs = run(arguments)
            kept.append((outputs, torch.autograd.grad(outputs, differentiable, upstream) if outputs else None))
        return kept

    peak = peak_bytes(both) // len(load.sets)
    captured = not waits_for_the_device(both)
    if captured:
        forward_ms, both_ms = (timed_by_graph(function, len(load.sets)) for function in (forward, both))
    else:
        print(f"{name}: waits for the device and cannot be captured")
        forward_ms, both_ms = (timed_by_events(function) / len(load.sets) for function in (forward, both))
    return {
        "timed_by": "graph" if captured else "events",
        "forward_ms": forward_ms,
        "backward_ms": both_ms - forward_ms,
        "peak_bytes": peak,
        "least_bytes": load.least_bytes,
        "share_of_copy": load.least_bytes / bandwidth / both_ms * 1e3,
    }


def line(row: Row) -> str:
    """Format a row for printing."""
    if not row.tests_pass:
        return f"{row.op:36} {row.backend:10} its tests have not passed: not timed"
    return (
        f"{row.op:36} {row.backend:10} forward {row.forward_ms:8.3f} ms  backward {row.backward_ms:8.3f} ms  "
        f"peak {row.peak_bytes / 2**30:6.2f} GiB  {row.share_of_copy:5.0%} of a copy"
    )


def main() -> int:
    """Measure, print, write."""
    parser = command_line(__doc__, "ops")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="names, separated by commas")
    parser.add_argument("--small", action="store_true", help="small shapes, to see that everything runs")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it needs a CUDA GPU: torch sees none")
    device, shape = torch.device("cuda"), SMALL if arguments.small else Shape()
    if not RESULTS.exists():
        parser.error("run benchmarks.gpu_tests first: no backend has been tested on this GPU")
    tests = json.loads(RESULTS.read_text())
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}: a copy moves {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for name in arguments.only.split(","):
        ops = OPS_OF.get(name, (WORKLOADS[name][0],))
        for backend in ("reference", "triton") if name in CONFIGS else BACKENDS[ops[0]]:
            if name.endswith("in_place") and backend == "reference":
                continue
            same_gpu = tests["gpu"] == torch.cuda.get_device_name()
            passing = same_gpu and all(backend_passes(tests, op, backend) for op in ops)
            passing = passing and (name not in CONFIGS or losses_pass(tests, backend))
            row = measure(name, backend, shape, device, bandwidth) if passing else Row(name, backend, False)
            torch.cuda.empty_cache()
            rows.append(row)
            print(line(row), flush=True)
    report = {
        **machine(),
        "copy_bytes_per_second": bandwidth,
        "shape": asdict(shape),
        "rows": [asdict(row) for row in rows],
    }
    write_result(arguments.out, report)
    return 0 if all(row.tests_pass for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
