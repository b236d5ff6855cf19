"""Random padded micro-batches: uneven lengths, chunks of several tokens, heads wider than their vocabularies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher

V_S = 23
STUDENT_HEAD = 26


@dataclass
class Case:
    """A micro-batch with its logits and teachers."""

    batch: dict[str, Tensor]
    student_logits: Tensor
    teachers: list[LossTeacher] = field(default_factory=list)
    teacher_logits: list[Tensor] = field(default_factory=list)

    def rows(self, chosen: list[int]) -> Case:
        """The same case with these samples only."""
        return Case(
            {name: column[chosen] for name, column in self.batch.items()},
            self.student_logits[chosen],
            self.teachers,
            [logits[chosen] for logits in self.teacher_logits],
        )


def make_case(
    *,
    lengths: tuple[int, ...] = (9, 7, 1, 9),
    same_tokenizer: tuple[bool, ...] = (False,),
    teacher_vocab: tuple[int, ...] = (31,),
    weights: tuple[float, ...] | None = None,
    sample_mask: tuple[float, ...] | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """A case with one teacher per entry of `same_tokenizer`; a sample of length 1 has no chunk after the shift."""
    torch.manual_seed(seed)
    B, T_s = len(lengths), max(lengths) + 1
    lengths_t = torch.tensor(lengths)
    batch = {
        "input_ids": torch.randint(V_S, (B, T_s)),
        "token_mask": (torch.arange(T_s) < lengths_t[:, None]).long(),
        "sample_mask": torch.tensor(sample_mask or [1.0] * B),
    }
    case = Case(batch, 2 * torch.randn(B, T_s, STUDENT_HEAD, dtype=dtype))
    many = len(same_tokenizer) > 1
    for place, same in enumerate(same_tokenizer):
        weight = weights[place] if weights else 1.0
        if same:
            case.teachers.append(LossTeacher(V_S, weight=weight))
            case.teacher_logits.append(2 * torch.randn(B, T_s, V_S + 2, dtype=dtype))
            continue
        V_t = teacher_vocab[place % len(teacher_vocab)]
        _add_teacher(case, lengths, V_t, f"{place}_" if many else "")
        indices, likelihoods = projection(V_t)
        case.teachers.append(LossTeacher(V_t, indices, likelihoods, weight=weight))
        case.teacher_logits.append(2 * torch.randn(B, T_s + 3, V_t + 5, dtype=dtype))
    return case


def loss_of(case: Case, config: LossConfig, **arguments: Any) -> CrossTokenizerDistillationLoss:
    """The loss for the case's teachers."""
    return CrossTokenizerDistillationLoss(config, student_vocab_size=V_S, teachers=case.teachers, **arguments)


def run(case: Case, config: LossConfig, **step: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The case's loss, the gradient of the student's logits and the metrics, under the step's denominators if given."""
    logits = case.student_logits.clone().requires_grad_()
    loss, metrics = loss_of(case, config)(case.batch, logits, case.teacher_logits, **step)
    loss.backward()
    return loss.detach(), logits.grad, metrics


def projection(V_t: int) -> tuple[Tensor, Tensor]:
    """A dense top-3 projection: pinned rows, normalised rows, empty rows, two students on one teacher token."""
    indices = torch.stack([torch.randperm(V_t)[:3] for _ in range(V_S)])
    likelihoods = torch.rand(V_S, 3).sort(dim=1, descending=True).values
    likelihoods = likelihoods / likelihoods.sum(1, keepdim=True)
    pinned = torch.arange(0, V_S, 3)
    indices[pinned, 1:], likelihoods[pinned] = -1, torch.tensor([1.0, 0.0, 0.0])
    indices[3, 0] = indices[0, 0]
    indices[7], likelihoods[7] = -1, 0.0
    return indices, likelihoods


def _add_teacher(case: Case, lengths: tuple[int, ...], V_t: int, infix: str) -> None:
    B, T_s = case.batch["input_ids"].shape
    T_t = T_s + 3
    P = T_s
    student_id = torch.full((B, T_s), -1)
    teacher_id = torch.full((B, T_t), -1)
    pair_valid = torch.zeros(B, P, dtype=torch.bool)
    pair_correct = torch.zeros(B, P, dtype=torch.bool)
    for b, length in enumerate(lengths):
        s = t = chunk = 0
        while s < length and t < T_t - 1:
            s_take, t_take = (int(torch.randint(1, 3, ())) for _ in range(2))
            student_id[b, s : min(s + s_take, length)] = chunk
            teacher_id[b, t : min(t + t_take, T_t - 1)] = chunk
            pair_valid[b, chunk] = True
            pair_correct[b, chunk] = bool(torch.rand(()) < 0.7)
            s, t, chunk = s + s_take, t + t_take, chunk + 1
        if length > 4:
            teacher_id[b, 2] = -1  # an insertion: a special without a counterpart
    case.batch |= {
        f"alignment_{infix}student_chunk_id": student_id,
        f"alignment_{infix}teacher_chunk_id": teacher_id,
        f"alignment_{infix}pair_valid": pair_valid,
        f"alignment_{infix}pair_is_correct": pair_correct,
        f"teacher_{infix}input_ids": torch.randint(V_t, (B, T_t)),
        f"teacher_{infix}token_mask": (teacher_id >= 0).long(),
    }
