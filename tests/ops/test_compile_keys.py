"""Triton compiles a kernel once, not again for every number of positions, samples or chunks of a micro-batch."""

from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.chain_tables import draw_tables
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.events import SideTokens
from xtoken_core.ops.chain.reference import ChainSettings
from xtoken_core.ops.chain_topk.reference import ChainTopKSettings
from xtoken_core.ops.gold.reference import GoldOptions, TokenPartition
from xtoken_core.ops.p_kl.reference import PKLOptions
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.token_kl.reference import TokenKLOptions

pytest.importorskip("triton")
keys = pytest.importorskip("tests.support.compile_keys", reason="Triton has another way to bind arguments")
from xtoken_core.compat.embedding.triton import embedding_backward  # noqa: E402
from xtoken_core.ops.chain.triton import TritonChainOp  # noqa: E402
from xtoken_core.ops.chain_topk.triton import TritonChainTopKOp  # noqa: E402
from xtoken_core.ops.chunk_mean.triton import TritonChunkMeanOp  # noqa: E402
from xtoken_core.ops.cross_entropy.triton import TritonCrossEntropyOp  # noqa: E402
from xtoken_core.ops.gold import triton as gold_triton  # noqa: E402
from xtoken_core.ops.gold.triton import TritonGoldCrossEntropyOp, TritonGoldOp  # noqa: E402
from xtoken_core.ops.p_kl.triton import TritonPKLCrossEntropyOp, TritonPKLOp  # noqa: E402
from xtoken_core.ops.select_topk_columns.triton import TritonSelectTopkColumnsOp  # noqa: E402
from xtoken_core.ops.sparse_projection.triton import TritonSparseProjectionOp  # noqa: E402
from xtoken_core.ops.token_kl.triton import TritonTokenKLOp  # noqa: E402

V_S, V_T, HEAD, K = 96, 160, 112, 24
BATCHES = [
    (1, 48, 32, 16), (1, 47, 33, 21), (2, 48, 32, 16), (3, 7, 9, 5), (16, 16, 16, 16), (1, 1, 1, 1), (4, 1, 15, 2),
    (2, 15, 1, 1), (5, 31, 64, 3), (8, 2, 2, 2), (1, 400, 257, 130), (1, 128, 512, 80),
]  # fmt: skip
"""Samples, positions of both sides, chunks: multiples of 16 and others, and ones."""


class Drawn:
    """A micro-batch; integer inputs begin anywhere, as slices of a packed row do. Logits are `[B, T, V]`."""

    def __init__(self, number: int) -> None:
        self.B, self.T_s, self.T_t, self.P = BATCHES[number]
        self.number = number

    def ids(self, T: int, high: int) -> Tensor:
        begin = self.number % 4
        return torch.zeros(self.B * T + begin, dtype=torch.int64)[begin:].view(self.B, T).clamp(max=high)

    def logits(self, T: int, V: int) -> Tensor:
        logits = torch.zeros(self.B, T, V, dtype=torch.bfloat16)
        # A single row can have any stride from sample to sample; that of a long one does not fit 32 bits.
        return logits.as_strided(logits.shape, (2**33, V, 1)) if self.B == 1 and self.number % 2 else logits

    @property
    def student(self) -> Tensor:
        return self.logits(self.T_s, HEAD).requires_grad_()

    @property
    def teacher(self) -> Tensor:
        return self.logits(self.T_t, V_T)

    def sides(self) -> tuple[SideTokens, SideTokens]:
        student, teacher = (SideTokens(*(self.ids(T, 4) for _ in range(4))) for T in (self.T_s, self.T_t))
        return student, teacher

    @property
    def chunks(self) -> tuple[Tensor, Tensor]:
        return self.ids(self.T_s, self.P), self.ids(self.T_t, self.P)


@cache
def tables():
    return draw_tables(V_S, V_T)


@cache
def partition():
    common = torch.arange(40)
    return TokenPartition(
        common, common + 3, torch.arange(40, V_S), torch.cat([torch.arange(3), torch.arange(43, V_T)])
    )


@cache
def projection():
    indices = torch.arange(V_S).unsqueeze(1) + torch.arange(3)
    return ProjectionMatrix.from_topk(indices, torch.rand(V_S, 3), student_vocab_size=V_S, teacher_vocab_size=V_T)


def chain(x: Drawn):
    return TritonChainOp()(x.student, x.teacher, *x.sides(), tables(), ChainSettings(x.P, with_cross_entropy=True))


def chain_topk(x: Drawn):
    listed = torch.zeros(x.B, x.T_t, 20)
    given = listed, listed.long(), listed[..., 0].clone()
    return TritonChainTopKOp()(x.student, *given, *x.sides(), tables(), ChainTopKSettings(x.P))


def chain_generated(x: Drawn, beta: float | None = None):
    form = Generated(x.ids(x.T_s, 1) == 0, beta)
    return TritonChainOp()(x.student, x.teacher, *x.sides(), tables(), ChainSettings(x.P, generated=form))


def chain_jsd(x: Drawn):
    return chain_generated(x, 0.5)


def chain_topk_generated(x: Drawn):
    listed = torch.zeros(x.B, x.T_t, 20)
    given = listed, listed.long(), listed[..., 0].clone()
    settings = ChainTopKSettings(x.P, generated=Generated(x.ids(x.T_s, 1) == 0))
    return TritonChainTopKOp()(x.student, *given, *x.sides(), tables(), settings)


def gold(x: Drawn):
    student = x.student[..., :V_S]
    return TritonGoldOp()(student, x.teacher, partition(), *x.chunks, GoldOptions(x.P))


def gold_cross_entropy(x: Drawn):
    targets = x.ids(x.T_s, HEAD)
    options = GoldOptions(x.P, uncommon_topk=16)
    return TritonGoldCrossEntropyOp()(x.student, x.teacher, partition(), *x.chunks, targets, options)


def gold_picked(x: Drawn):
    with patch.object(gold_triton, "SPARE", 4):
        return gold_cross_entropy(x)


def p_kl(x: Drawn):
    student = x.student[..., :V_S]
    return TritonPKLOp()(student, x.teacher, projection(), torch.arange(K), *x.chunks, PKLOptions(x.P))


def p_kl_cross_entropy(x: Drawn):
    targets, columns = x.ids(x.T_s, HEAD), torch.arange(K)
    options = PKLOptions(x.P)
    return TritonPKLCrossEntropyOp()(x.student, x.teacher, projection(), columns, *x.chunks, targets, options)


def token_kl(x: Drawn):
    teacher = torch.zeros(x.B, x.T_s, V_T, dtype=torch.bfloat16)
    return TritonTokenKLOp()(x.student, teacher, x.ids(x.T_s, HEAD), TokenKLOptions(V_S))


def cross_entropy(x: Drawn):
    return TritonCrossEntropyOp()(x.student, x.ids(x.T_s, HEAD))


def cross_entropy_known(x: Drawn):
    return TritonCrossEntropyOp()(x.student, x.ids(x.T_s, HEAD), upstream=torch.ones(x.B, x.T_s))


def chunk_mean(x: Drawn):
    return TritonChunkMeanOp()(x.student, x.chunks[0], x.P)


def select_topk_columns(x: Drawn):
    return (TritonSelectTopkColumnsOp()(x.teacher, K),)


def sparse_projection(x: Drawn):
    return (TritonSparseProjectionOp()(x.student[..., :V_S].float(), projection()),)


def sparse_projection_of_columns(x: Drawn):
    begin = x.number % 4
    columns = torch.zeros(V_S * x.B * x.T_s + begin)[begin:].view(V_S, x.B * x.T_s)
    return (TritonSparseProjectionOp()(columns.t().requires_grad_(), projection()),)


def embedding(x: Drawn):
    ids = x.ids(x.T_s, V_S).flatten()
    return (embedding_backward(ids, torch.zeros(len(ids), 64), V_S),)


OPS = [
    chain, chain_topk, chain_generated, chain_jsd, chain_topk_generated,
    gold, gold_cross_entropy, gold_picked, p_kl, p_kl_cross_entropy, token_kl,
    cross_entropy, cross_entropy_known, chunk_mean, select_topk_columns, sparse_projection,
    sparse_projection_of_columns, embedding,
]  # fmt: skip


def launch(op, x: Drawn) -> None:
    """Record the launches of values and gradient."""
    results = [value for value in op(x) if value.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(value) for value in results])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_the_keys_of_one_micro_batch_are_those_of_all(op):
    with keys.recording() as one:
        launch(op, Drawn(0))
    with keys.recording() as recorder:
        for number in range(len(BATCHES)):
            launch(op, Drawn(number))
    assert recorder.kernels
    assert recorder.count() == one.count(), recorder.differences()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_strides_and_widths_are_known_to_be_aligned(op):
    """Loads of several adjacent logits at once depend on it."""
    with keys.recording() as recorder:
        launch(op, Drawn(0))
    known = {
        (kernel, name): specialized
        for kernel, name, value, specialized in recorder.arguments()
        if (name.startswith("V") or "stride" in name) and isinstance(value, int) and value % 16 == 0
    }
    assert known or op in (embedding,)
    assert all(specialized[1] and "D" in specialized[1] for specialized in known.values()), known
