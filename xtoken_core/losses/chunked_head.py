"""Losses of a student whose head is multiplied block by block; values and gradients are computed together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from xtoken_core.losses.common import Divergence, LossInput, Pairing, ReadTokens
from xtoken_core.losses.known_gradients import halved, with_gradients
from xtoken_core.losses.lazy_logits import HeadProjection, HeadRows
from xtoken_core.losses.masks import next_token_targets
from xtoken_core.losses.objective import ComparedTeacher, Metrics, Objective, Values, first_with_cross_entropy
from xtoken_core.losses.token_blocks import TeacherBlocks, TokenBlocks
from xtoken_core.ops import get_op

HALF = (torch.bfloat16, torch.float16)


class Gradients(NamedTuple):
    """The gradients of a head's operands; None where none is wanted."""

    hidden: Float[Tensor, "B T H"] | None
    weight: Float[Tensor, "V H"] | tuple[Tensor, Tensor] | None
    bias: Float[Tensor, " V"] | None


class ChunkedHead:
    """One micro-batch's comparison of a student's head with its teachers, in blocks of positions."""

    def __init__(
        self,
        batch: Mapping[str, Tensor],
        student: HeadProjection,
        teachers: Sequence[ComparedTeacher],
        blocks: TokenBlocks,
        *,
        trains_on_kd: bool,
    ) -> None:
        """Store the operands; nothing is computed yet.

        Args:
            batch: Holds the student's own tokens.
            student: The student's hidden states `[B, T_s, H]` and head `[V, H]`.
            teachers: The teachers it is compared with.
            blocks: Positions of every block, on the device of the head.
            trains_on_kd: True if gradients go through the divergences.
        """
        self.student, self.teachers, self.blocks, self.trains_on_kd = student, teachers, blocks, trains_on_kd
        self.rows = HeadRows(student.detach())
        self.teacher_rows = [teacher.rows() for teacher in teachers]
        self.targets = next_token_targets(batch)
        self.with_tokens = first_with_cross_entropy(teachers) if trains_on_kd else None

    def loss(self, objective: Objective, *, linear: bool) -> tuple[Float[Tensor, ""], Metrics]:
        """Compute the loss and its metrics, and the gradients of the operands that require one; backward scales these.

        Args:
            objective: The loss as a function of the values.
            linear: True if its gradient does not depend on the values: one pass over the blocks is enough then.
        """
        with torch.autocast(self.student.device.type, enabled=False):
            return self._loss(objective, linear)

    def _loss(self, objective: Objective, linear: bool) -> tuple[Float[Tensor, ""], Metrics]:
        head = self.student
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in head.operands if x is not None)):
            with torch.no_grad():
                return objective(self.values())
        # The weight of each chunk and token in the loss is the gradient of the reduction by its inputs. A linear
        # reduction has the same one everywhere, so it is taken at zero and the blocks are multiplied only once.
        with torch.no_grad():
            start = Values.zeros(self.teachers, self.targets, head.dtype) if linear else self.values()
        upstream = objective.upstream(start)
        with torch.no_grad():
            values, gradients = self.values_and_gradients(upstream)
            loss, metrics = objective(values)
        return with_gradients(head.operands, loss, gradients), metrics

    def values(self) -> Values:
        """Compute every divergence and cross-entropy, without gradients."""
        blocks = [self._block(n, self.rows(rows), overwrite=False) for n, rows in enumerate(self.blocks.rows)]
        return self._assemble(blocks)

    def values_and_gradients(self, upstream: Sequence[Tensor]) -> tuple[Values, Gradients]:
        """Compute the values, and the gradients of the sum of `upstream` times the differentiable ones.

        Args:
            upstream: One tensor for each of `Values.differentiable`, in their shapes.
        """
        head = self.student
        wanted = [x is not None and x.requires_grad for x in head.operands]
        sums = GradientSums(self.rows, head, wanted)
        # With a single reader its gradient may take the memory of the block's logits.
        only = len(self.teachers) == 1 and self.with_tokens is not None
        blocks = []
        for n, rows in enumerate(self.blocks.rows):
            states = self.rows.states(rows)
            logits = self.rows.of(states).requires_grad_()  # [1, R, V], the same memory for every block
            weights = self._upstream(n, upstream)
            with torch.enable_grad():
                values = self._block(n, logits, overwrite=only, upstream=weights)
            sums.add(self._gradient(logits, values, weights), states, rows)
            blocks.append(values.detached())
            del values  # its graph holds tensors as large as the logits, and the next block needs that memory
        return self._assemble(blocks), sums.result()

    def _block(self, n: int, logits: Tensor, *, overwrite: bool, upstream: Sequence[Tensor] | None = None) -> Values:
        """Compute the values of one block: chunks as the block numbers them, positions in its order."""
        targets = _at(self.targets, self.blocks.rows[n])
        divergences, tokens = [], None
        for (teacher, side), (rows, gathered) in zip(self._sides(), self.teacher_rows, strict=True):
            with nullcontext() if self.trains_on_kd else torch.no_grad():
                pairing, both = _pairing(teacher, side, n, self.blocks.rows[n], targets), teacher is self.with_tokens
                # Not bound to a name: the teacher's block is freed before the next teacher's is multiplied.
                divergence = teacher.loss.compare(
                    LossInput(pairing, logits, rows(side.rows[n]), teacher.columns, gathered, overwrite, both)
                )
            tokens = tokens or divergence.tokens
            divergences.append(divergence)
        if tokens is None:
            of_losses = upstream[-1] if upstream and not self.trains_on_kd else None
            op = get_op("cross_entropy", logits.device)
            tokens = op(logits, targets, overwrite=logits.requires_grad, upstream=of_losses)
        return Values(tuple(divergences), *tokens)

    def _upstream(self, n: int, upstream: Sequence[Tensor]) -> list[Tensor]:
        """Return a block's part of the gradients of `Values.differentiable`."""
        indices = [self._indices(side)[n] for teacher, side in self._sides() for _ in range(teacher.loss.parts)]
        weights = []
        for whole, rows in zip(upstream, [*indices, self.blocks.rows[n]], strict=True):
            padded = torch.cat([whole.flatten(), whole.new_zeros(1)])  # padding indices read the 0 behind the end
            weights.append(padded.index_select(0, rows.clamp(max=whole.numel())).unsqueeze(0))
        return weights

    def _gradient(self, logits: Tensor, values: Values, weights: Sequence[Tensor]) -> Tensor:
        """Compute the gradient `[R, V]` of a block's logits, whose memory it may take."""
        outputs = values.differentiable
        # The divergences have no graph then: asking for their gradient would raise.
        if not self.trains_on_kd:
            return _gradient(outputs[-1:], logits, weights[-1:])
        if self.with_tokens is not None:
            return _gradient(outputs, logits, weights)
        # The cross-entropy overwrites the logits with its gradient, so it comes after the divergences have read them.
        of_divergences = _gradient(outputs[:-1], logits, weights[:-1])
        return _gradient(outputs[-1:], logits, weights[-1:]).add_(of_divergences)

    def _sides(self) -> list[tuple[ComparedTeacher, TeacherBlocks]]:
        return list(zip(self.teachers, self.blocks.teachers, strict=True))

    def _indices(self, side: TeacherBlocks) -> Tensor:
        """Return the indices of the blocks' values in the flattened shape of the whole."""
        return self.blocks.rows if side.chunks is None else side.chunks

    def _assemble(self, blocks: Sequence[Values]) -> Values:
        """Scatter the values of all blocks to their positions; 0 where no block has one."""
        divergences = []
        by_teacher = zip(*(b.divergences for b in blocks), strict=True)
        for (teacher, side), pieces in zip(self._sides(), by_teacher, strict=True):
            indices, shape = self._indices(side), teacher.shape
            parts = [_scattered(each, indices, shape) for each in zip(*(d.parts for d in pieces), strict=True)]
            known: dict[str, Any] = {}
            for name in ("agrees", "mass", "unreachable"):
                if getattr(pieces[0], name) is not None:
                    known[name] = _scattered([getattr(d, name) for d in pieces], indices, shape)
            divergences.append(Divergence(tuple(parts), **known))
        B, T = self.targets.shape
        losses, hits = ([getattr(b, name) for b in blocks] for name in ("losses", "hits"))
        rows = self.blocks.rows
        return Values(tuple(divergences), _scattered(losses, rows, (B, T)), _scattered(hits, rows, (B, T)))


class GradientSums:
    """The gradients of a head's operands, summed block by block in their order; the weight's and bias's in float32."""

    def __init__(self, rows: HeadRows, head: HeadProjection, wanted: Sequence[bool]) -> None:
        """Allocate the sums.

        Args:
            rows: The head's rows, for the weight in the dtype in which it is multiplied.
            head: The operands.
            wanted: True for each of hidden states, weight and bias that requires a gradient.
        """
        self.head, self.multiplier = head, rows.weight
        # Sums over many blocks: in bfloat16 the small addends of late blocks would vanish.
        exact = torch.float32 if head.dtype in HALF else head.dtype
        H, V = head.weight.shape[1], head.weight.shape[0]
        device = head.device
        # [B * T + 1, H]; zeros, since positions that no loss reads are in no block and have gradient 0.
        self.hidden = head.hidden.new_zeros(head.hidden.shape[:2].numel() + 1, H) if wanted[0] else None
        # Not cleared: the first block overwrites it (`onto`), which saves a pass over [V, H]. In two parts where it is
        # rounded in the end: the result then takes the memory of the first.
        sizes = halved(V) if head.weight.dtype in HALF and exact == torch.float32 else (V,)
        self.weight = [torch.empty(n, H, dtype=exact, device=device) for n in sizes] if wanted[1] else []
        self.bias = torch.zeros(V, dtype=exact, device=device) if wanted[2] else None
        self.blocks = 0

    def add(self, gradient: Float[Tensor, "R V"], states: Float[Tensor, "R H"], rows: Tensor) -> None:
        """Add one block.

        Args:
            gradient: The gradient of its logits.
            states: Its hidden states, which are overwritten.
            rows: `[R]` int64 indices of its positions in the flattened batch; beyond it: padding.
        """
        begin = 0
        for part in self.weight:
            add_product(part, gradient[:, begin : begin + len(part)].t(), states, onto=self.blocks > 0)
            begin += len(part)
        if self.hidden is not None:
            # A position is in one block only, so a copy is enough; padding rows all write the extra last row.
            indices = rows.clamp(max=self.hidden.shape[0] - 1)
            self.hidden.index_copy_(0, indices, torch.mm(gradient, self.multiplier, out=states))
        if self.bias is not None:
            self.bias += gradient.sum(0, dtype=self.bias.dtype)
        self.blocks += 1

    def result(self) -> Gradients:
        """Return the sums."""
        hidden = None if self.hidden is None else self.hidden[:-1].view(self.head.hidden.shape)
        match self.weight:
            case [first, second]:
                return Gradients(hidden, (first, second), self.bias)
            case [whole]:
                return Gradients(hidden, whole, self.bias)
        return Gradients(hidden, None, self.bias)


def add_product(
    total: Float[Tensor, "m n"], a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], *, onto: bool = True
) -> None:
    """Compute `total += a @ b` (or `total = a @ b`) in place, accumulated in the dtype of `total`.

    Args:
        total: float32 for half-precision factors, else in their dtype.
        a: First factor.
        b: Second factor.
        onto: False to overwrite `total`, which may be uninitialised.
    """
    beta = int(onto)
    if a.is_cuda and a.dtype != total.dtype:  # one product with float32 output, without copies of the factors
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def _gradient(outputs: Sequence[Tensor], logits: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return torch.autograd.grad(outputs, logits, weights)[0][0]


def _pairing(teacher: ComparedTeacher, side: TeacherBlocks, n: int, own_rows: Tensor, targets: Tensor) -> Pairing:
    of_teacher = teacher.pairing.teacher_targets
    of_teacher = None if of_teacher is None else _at(of_teacher, side.rows[n])
    if side.chunks is None or side.student_chunk_id is None or side.teacher_chunk_id is None:
        return Pairing(targets, of_teacher)
    student, own = side.student_chunk_id[n].unsqueeze(0), side.teacher_chunk_id[n].unsqueeze(0)
    read = teacher.pairing.read
    if read is not None:
        read = ReadTokens(
            _at(read.student_ids, own_rows),
            _at(read.teacher_ids, side.rows[n]),
            _at(read.student_chunk_id, own_rows),
            _at(read.teacher_chunk_id, side.rows[n]),
            None if read.generated is None else _at(read.generated, own_rows),
        )
    return Pairing(targets, of_teacher, student, own, side.chunks.shape[1], read)


def _at(whole: Tensor, rows: Tensor) -> Tensor:
    """Return `[1, R]` entries of a `[B, T]` tensor; an index beyond it gives the last entry."""
    return whole.flatten().index_select(0, rows.clamp(max=whole.numel() - 1)).unsqueeze(0)


def _scattered(parts: Sequence[Tensor], indices: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the blocks' values at their indices of a tensor of zeros; padding goes to an extra last entry."""
    values, size = torch.cat(list(parts)).flatten(), shape[0] * shape[1]
    whole = torch.zeros(size + 1, dtype=values.dtype, device=values.device)
    return whole.scatter(0, indices.flatten().clamp(max=size), values)[:size].view(shape)
