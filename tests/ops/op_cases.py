"""For every op: small odd inputs, how its batch is cut, how it is padded, and which input has a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.chain_tables import draw_tables, draw_text
from xtoken_core.chain.tables import ChainTables
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.events import SideTokens
from xtoken_core.ops.chain.reference import ChainOptions, ChainSettings
from xtoken_core.ops.chain_topk.reference import ChainTopKSettings
from xtoken_core.ops.gold.reference import GoldOptions, TokenPartition
from xtoken_core.ops.p_kl.reference import PKLOptions
from xtoken_core.ops.sparse_projection.matrix import ProjectionMatrix
from xtoken_core.ops.token_kl.reference import TokenKLOptions
from xtoken_core.topk_logits import largest_logits
from xtoken_core.transports.ring import TopKSettings

Inputs = dict[str, Any]
B, T_S, T_T, P, V_S, V_T = 3, 7, 9, 5, 37, 41
P_CHAIN = T_T
"""Chunks of a drawn text, at most one for each position."""


@dataclass(frozen=True)
class OpCase:
    """One op. `batched` inputs have the batch first; `seen` is the part of a padded call that must not change."""

    make: Callable[[torch.dtype, torch.device], Inputs]
    batched: tuple[str, ...]
    padded: Callable[[Inputs], Inputs]
    seen: Callable[[Tensor], Tensor]
    differentiable: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def outputs(op: Any, inputs: Inputs, *, fp32: bool = False) -> tuple[Tensor, ...]:
    """The op's outputs, always as a tuple."""
    result = (op.forward_fp32 if fp32 else op)(*inputs.values())
    return tuple(result) if isinstance(result, tuple) else (result,)


def gradient(op: Any, inputs: Inputs, name: str, *, fp32: bool = False, seed: int = 3) -> Tensor:
    """The gradient of a fixed random combination of the differentiable outputs."""
    leaf = inputs[name].detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=leaf.device)
    generator = torch.Generator().manual_seed(seed)
    for value in outputs(op, {**inputs, name: leaf}, fp32=fp32):
        if value.requires_grad:
            weights = torch.rand(value.shape, generator=generator).to(value)
            total = total + (value * weights).double().sum()
    return torch.autograd.grad(total, leaf)[0]


def rand(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def ids(*shape: int, high: int, device: torch.device, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def chunk_ids(T: int, device: torch.device) -> Tensor:
    rows = torch.full((B, T), -1)
    rows[0] = torch.arange(T) // 2
    rows[1, : T - 2] = torch.tensor([0, -1, 1, 1, 1, 2, 2, 4, 4])[: T - 2]
    rows[2, 1:3] = torch.tensor([0, 3])
    return rows.clamp(max=P - 1).to(device)


def projection(device: torch.device) -> ProjectionMatrix:
    indices = ids(V_S, 3, high=V_T, device=torch.device("cpu"), seed=11)
    indices[::4, 1:], indices[5] = -1, -1
    weights = torch.rand(V_S, 3, generator=torch.Generator().manual_seed(12))
    return ProjectionMatrix.from_topk(indices, weights, student_vocab_size=V_S, teacher_vocab_size=V_T).to(device)


def partition(device: torch.device) -> TokenPartition:
    common_s, common_t = torch.tensor([1, 4, 6, 20]), torch.tensor([3, 0, 40, 11])
    rest_s = torch.tensor([v for v in range(V_S) if v not in common_s])
    rest_t = torch.tensor([v for v in range(V_T) if v not in common_t])
    return TokenPartition(common_s, common_t, rest_s, rest_t).to(device)


def extend(x: Tensor, amount: int, dim: int, fill: float) -> Tensor:
    shape = list(x.shape)
    shape[dim] = amount
    return torch.cat([x, x.new_full(shape, fill)], dim=dim)


def _pad_chunked(inputs: Inputs) -> Inputs:
    padded = dict(inputs)
    for name in ("student_logits", "teacher_logits", "x"):
        if name in padded:
            padded[name] = extend(extend(padded[name], 4, 1, 3.0), 2, 0, -1.0)
    for name in ("student_chunk_id", "teacher_chunk_id", "chunk_id"):
        if name in padded:
            padded[name] = extend(extend(padded[name], 4, 1, -1), 2, 0, 1)
    return padded


def _logits(dtype: torch.dtype, device: torch.device) -> Inputs:
    return {
        "student_logits": rand(B, T_S, V_S, dtype=dtype, device=device, seed=1),
        "teacher_logits": rand(B, T_T, V_T, dtype=dtype, device=device, seed=2),
    }


def _chunks(device: torch.device) -> Inputs:
    return {"student_chunk_id": chunk_ids(T_S, device), "teacher_chunk_id": chunk_ids(T_T, device)}


def _p_kl(**settings: Any) -> Callable[[torch.dtype, torch.device], Inputs]:
    def make(dtype: torch.dtype, device: torch.device) -> Inputs:
        columns = torch.tensor([0, 2, 3, 5, 8, 13, 21, 34, 40], device=device)
        W = {"projection": projection(device), "columns": columns}
        return _logits(dtype, device) | W | _chunks(device) | {"options": PKLOptions(P, **settings)}

    return make


def _and_cross_entropy(make_inputs: Any, head: int, **settings: Any) -> Callable[[torch.dtype, torch.device], Inputs]:
    """An op's inputs with targets; the student's head is `head` wider than its vocabulary, and larger there."""
    return lambda dtype, device: _targets_of(make_inputs(**settings)(dtype, device), head, device)


def _targets_of(inputs: Inputs, head: int, device: torch.device) -> Inputs:
    options = inputs.pop("options")
    inputs["student_logits"] = extend(inputs["student_logits"], head, 2, 4.0)
    targets = ids(B, T_S, high=V_S + head, device=device, seed=10)
    targets[1, :3] = inputs["student_logits"][1, :3].argmax(-1)
    return inputs | {"targets": targets, "options": options}


def _pad_with_targets(inputs: Inputs) -> Inputs:
    return _pad_chunked(inputs) | {"targets": extend(extend(inputs["targets"], 4, 1, 1), 2, 0, 0)}


def _with_targets(make: Callable[[torch.dtype, torch.device], Inputs]) -> OpCase:
    batched = ("student_logits", "teacher_logits", "student_chunk_id", "teacher_chunk_id", "targets")
    return OpCase(make, batched, _pad_with_targets, lambda out: out[:B, :T_S], "student_logits")


def _token_kl(**settings: Any) -> OpCase:
    """Both heads are wider than the vocabulary, the student's larger there."""
    batched = ("student_logits", "teacher_logits", "targets")

    def make(dtype: torch.dtype, device: torch.device) -> Inputs:
        student = rand(B, T_S, V_S, dtype=dtype, device=device, seed=1)
        inputs = {
            "student_logits": extend(student, 5, 2, 4.0),
            "teacher_logits": rand(B, T_S, V_T, dtype=dtype, device=device, seed=2),
            "targets": ids(B, T_S, high=V_S + 5, device=device, seed=10),
        }
        inputs["targets"][1, :3] = inputs["student_logits"][1, :3].argmax(-1)
        inputs["teacher_logits"][0, :2, :V_S] = student[0, :2]
        return inputs | {"options": TokenKLOptions(V_S, **settings)}

    def pad(inputs: Inputs) -> Inputs:
        longer = {name: x for name, x in inputs.items() if name != "options"}
        return {name: extend(extend(x, 3, 1, 1), 1, 0, 0) for name, x in longer.items()} | {
            "options": inputs["options"]
        }

    return OpCase(make, batched, pad, lambda out: out[:B, :T_S], "student_logits")


def _gold(**settings: Any) -> Callable[[torch.dtype, torch.device], Inputs]:
    def make(dtype: torch.dtype, device: torch.device) -> Inputs:
        chunks = {"partition": partition(device)} | _chunks(device)
        return _logits(dtype, device) | chunks | {"options": GoldOptions(P, **settings)}

    return make


def _chunked(make: Callable[[torch.dtype, torch.device], Inputs]) -> OpCase:
    batched = ("student_logits", "teacher_logits", "student_chunk_id", "teacher_chunk_id")
    return OpCase(make, batched, _pad_chunked, lambda out: out[:B], "student_logits")


@cache
def drawn_tables() -> ChainTables:
    return draw_tables(V_S, V_T)


class BatchedSettings(ChainSettings):
    """Settings of which a part is of single samples."""

    def __getitem__(self, samples: slice) -> BatchedSettings:
        return with_rows(self, lambda at: at[samples])


class BatchedTopKSettings(ChainTopKSettings):
    """Likewise."""

    def __getitem__(self, samples: slice) -> BatchedTopKSettings:
        return with_rows(self, lambda at: at[samples])


def with_rows(settings: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The settings with other rows of generated text."""
    form = settings.generated
    return settings if form is None else replace(settings, generated=Generated(change(form.at), form.beta))


def drawn_form(beta: float | None, device: torch.device) -> Generated | None:
    """All but the second sample are generated text; with `beta` 0 none is."""
    rows = torch.tensor([True, False, True], device=device).unsqueeze(1).expand(B, T_T)
    return None if beta == 0 else Generated(rows, beta)


def _chain(beta: float | None = 0.0, **settings: Any) -> Callable[[torch.dtype, torch.device], Inputs]:
    """Three drawn texts; the student's head is wider than its vocabulary."""

    def make(dtype: torch.dtype, device: torch.device) -> Inputs:
        tables, T = drawn_tables(), T_T
        texts = [draw_text(tables, T, seed) for seed in range(B)]
        sides = []
        for k in (0, 1):
            ids = torch.cat([text.ids[k] for text in texts])
            chunk = torch.cat([text.chunk_id[k] for text in texts])
            # Position i predicts token i + 1: the first token of a text is predicted by none, nor is its chunk.
            shifted = extend(chunk[:, 1:], 1, 1, -1)
            shifted = torch.where(shifted == 0, -1, shifted)
            columns = shifted, extend(ids[:, 1:], 1, 1, 0), ids, chunk
            sides.append(SideTokens(*(x.to(device) for x in columns)))
        logits = {
            "student_logits": rand(B, T, V_S + 3, dtype=dtype, device=device, seed=1),
            "teacher_logits": rand(B, T, V_T + 2, dtype=dtype, device=device, seed=2),
        }
        form = BatchedSettings(T, generated=drawn_form(beta, device), **settings)
        rest = {"tables": drawn_tables().to(device), "settings": form}
        return logits | {"student": sides[0], "teacher": sides[1]} | rest

    return make


def _pad_chain(inputs: Inputs) -> Inputs:
    padded = _pad_chunked(inputs)
    for name in ("student", "teacher"):
        side = inputs[name]
        columns = (side.chunk, -1), (side.predicted, 0), (side.read, 0), (side.read_chunk, -1)
        longer = [extend(x, 4, 1, fill) for x, fill in columns]
        padded[name] = SideTokens(*(extend(x, 2, 0, int(x[0, -1])) for x in longer))
    padded["settings"] = with_rows(inputs["settings"], lambda at: extend(extend(at, 4, 1, True), 2, 0, False))
    return padded


def _chain_case(**settings: Any) -> OpCase:
    batched = ("student_logits", "teacher_logits", "student", "teacher", "settings")
    return OpCase(_chain(**settings), batched, _pad_chain, lambda out: out[:B, :T_T], "student_logits")


def _chain_topk(k: int, T: float = 1.0, conditioning: bool = True, beta: float | None = 0.0) -> OpCase:
    """The chain's texts with the teacher's k largest logits and the texts' own tokens; the head is padded twice."""
    batched = ("student_logits", "log_probs", "ids", "tail", "student", "teacher", "settings")
    options = ChainOptions(conditioning, True, True)
    base = _chain(temperature=T, options=options)

    def make(dtype: torch.dtype, device: torch.device) -> Inputs:
        inputs = base(dtype, device)
        teacher, tables = inputs["teacher"], inputs["tables"]
        largest = largest_logits(inputs["teacher_logits"], teacher.predicted, TopKSettings(k, V_T, T))
        listed = largest.with_own(teacher.predicted, teacher.chunk >= 0)
        settings = BatchedTopKSettings(P_CHAIN, options, T, generated=drawn_form(beta, device))
        given = {"log_probs": listed.log_probs(), "ids": listed.ids, "tail": listed.log_rest.exp()}
        sides = {"student": inputs["student"], "teacher": teacher}
        return {"student_logits": inputs["student_logits"]} | given | sides | {"tables": tables, "settings": settings}

    def pad(inputs: Inputs) -> Inputs:
        padded = _pad_chain(inputs)
        for name, fill in (("log_probs", -1.0), ("ids", -1), ("tail", 0.5)):
            padded[name] = extend(extend(inputs[name], 4, 1, fill), 2, 0, fill)
        return padded

    return OpCase(make, batched, pad, lambda out: out[:B, :T_T], "student_logits")


def _largest_logits(k: int, T: float = 1.0) -> OpCase:
    """A head that is wider than the vocabulary."""

    def make(dtype: torch.dtype, device: torch.device) -> Inputs:
        logits = extend(rand(B, T_T, V_T + 100, dtype=dtype, device=device, seed=1), 3, 2, 9.0)
        targets = ids(B, T_T, high=V_T, device=device, seed=10)
        settings = {"k": k, "vocab_size": V_T + 100, "temperature": T}
        return {"logits": logits, "targets": targets} | settings

    def pad(inputs: Inputs) -> Inputs:
        return inputs | {name: extend(extend(inputs[name], 4, 1, 1), 2, 0, 0) for name in ("logits", "targets")}

    return OpCase(make, ("logits", "targets"), pad, lambda out: out[:B, :T_T])


CASES: dict[str, dict[str, OpCase]] = {
    "embedding": {
        "": OpCase(
            lambda dtype, device: {
                "token_ids": ids(5, 6, high=9, device=device, seed=4),
                "weight": rand(13, 33, dtype=dtype, device=device, seed=5),
            },
            ("token_ids",),
            lambda inputs: inputs | {"token_ids": extend(inputs["token_ids"], 3, 1, 0)},
            lambda out: out[:, :6],
            "weight",
        )
    },
    "indices_to_multihot": {
        "": OpCase(
            lambda dtype, device: {
                "indices": ids(11, 3, high=9, device=device, seed=6) - 1,
                "probs": rand(11, 3, dtype=dtype, device=device, seed=7),
                "num_experts": 7,
            },
            ("indices", "probs"),
            lambda inputs: inputs | {n: extend(inputs[n], 5, 0, 1) for n in ("indices", "probs")},
            lambda out: out[:11],
            "probs",
        )
    },
    "sparse_projection": {
        "": OpCase(
            lambda dtype, device: {
                "x": rand(5, 3, V_S, dtype=dtype, device=device, seed=8),
                "projection": projection(device),
            },
            ("x",),
            lambda inputs: inputs | {"x": extend(inputs["x"], 2, 0, 1.0)},
            lambda out: out[:5],
            "x",
        )
    },
    "chunk_mean": {
        "": OpCase(
            lambda dtype, device: {
                "x": rand(B, T_T, 19, dtype=dtype, device=device, seed=9),
                "chunk_id": chunk_ids(T_T, device),
                "max_chunks": P,
            },
            ("x", "chunk_id"),
            _pad_chunked,
            lambda out: out[:B],
            "x",
        )
    },
    "cross_entropy": {
        "": OpCase(
            lambda dtype, device: {
                "logits": rand(B, T_S, V_S, dtype=dtype, device=device, seed=1),
                "targets": ids(B, T_S, high=V_S, device=device, seed=10),
            },
            ("logits", "targets"),
            lambda inputs: {name: extend(extend(x, 3, 1, 1), 1, 0, 0) for name, x in inputs.items()},
            lambda out: out[:B, :T_S],
            "logits",
        )
    },
    "largest_logits": {"": _largest_logits(30), "T2": _largest_logits(100, 2.0)},
    "token_kl": {"": _token_kl(), "reverse_T2": _token_kl(reverse=True, temperature=2.0)},
    "p_kl": {
        "": _chunked(_p_kl()),
        "reverse_T2": _chunked(_p_kl(reverse=True, temperature=2.0)),
        "prob": _chunked(_p_kl(teacher_average="prob")),
    },
    "p_kl_cross_entropy": {
        "": _with_targets(_and_cross_entropy(_p_kl, 0)),
        "wide_head_T2": _with_targets(_and_cross_entropy(_p_kl, 5, temperature=2.0)),
    },
    "chain": {
        "": _chain_case(),
        "T2": _chain_case(temperature=2.0, options=ChainOptions(False, True, True)),
        "reverse": _chain_case(beta=None),
        "jsd_T2": _chain_case(beta=0.3, temperature=2.0),
    },
    "chain_topk": {
        "": _chain_topk(6),
        "few": _chain_topk(3),
        "T2": _chain_topk(40, 2.0, conditioning=False),
        "reverse": _chain_topk(6, beta=None),
        "jsd_T2": _chain_topk(20, 2.0, beta=0.3),
    },
    "gold": {
        "cut": _chunked(_gold(uncommon_topk=6)),
        "reverse_T2": _chunked(_gold(uncommon_topk=100, reverse=True, temperature=2.0)),
        "untruncated": _chunked(_gold()),
    },
    "gold_cross_entropy": {
        "cut": _with_targets(_and_cross_entropy(_gold, 0, uncommon_topk=6)),
        "wide_head_T2": _with_targets(_and_cross_entropy(_gold, 5, uncommon_topk=100, temperature=2.0)),
    },
}
