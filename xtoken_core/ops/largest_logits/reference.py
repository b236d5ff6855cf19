"""The reference of `largest_logits`, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.ops.numerics import Op

GROUP = 64
"""Adjacent tokens whose largest logit and sum are computed first: only groups with one of the largest are searched."""


class LargestLogits(NamedTuple):
    """Largest logits, normalisers and the own log-probability of every position; float32, or float64 of float64 logits.

    Attributes:
        ids: The tokens with the largest logits, largest first.
        values: Their logits.
        log_z: Log-normaliser over the whole vocabulary, at temperature 1.
        log_z_scaled: That of the logits divided by the temperature.
        log_rest: Logarithm of the mass of all unlisted tokens, at the temperature; -inf where there are none.
        own: Log-probability of the token that the position predicts, at temperature 1; listed or not.
    """

    ids: Int[Tensor, "B T k"]
    values: Float[Tensor, "B T k"]
    log_z: Float[Tensor, "B T"]
    log_z_scaled: Float[Tensor, "B T"]
    log_rest: Float[Tensor, "B T"]
    own: Float[Tensor, "B T"]


def largest_logits(
    logits: Float[Tensor, "B T V_m"], targets: Int[Tensor, "B T"], k: int, vocab_size: int, temperature: float = 1.0
) -> LargestLogits:
    """Select the largest logits of every position: descending, of equal ones the lowest ids, NaN as the largest.

    The k largest lie in the k groups of tokens with the largest maxima, so that the whole row is read for maxima and
    sums alone. No gradient.

    Args:
        logits: At least `V` wide; any floating dtype, float32 inside, float64 stays.
        targets: The token that each position predicts; any id where it predicts none.
        k: Maximum of tokens; `min(k, V)` are returned.
        vocab_size: Leading columns of the logits that are tokens, `V`.
        temperature: What the logits are divided by for `log_z_scaled` and `log_rest`.
    """
    logits, V, T = logits.detach(), vocab_size, temperature
    dtype = torch.promote_types(logits.dtype, torch.float32)
    groups = logits[..., : V - V % GROUP].view(*logits.shape[:2], V // GROUP, GROUP)
    maxima = groups.amax(-1)  # [B, T, groups]
    chosen = _first_largest(maxima, min(k, maxima.shape[-1])).sort(-1).values  # candidates in order of ids
    in_chosen = groups.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, GROUP)).flatten(-2)
    candidates = torch.cat([in_chosen, logits[..., V - V % GROUP : V]], -1).to(dtype)  # [B, T, candidates]
    token = torch.arange(V, device=logits.device)
    first, last = token[:GROUP], token[V - V % GROUP :].expand(*chosen.shape[:2], -1)
    # The id of each candidate: of the chosen groups, and of the last tokens, which fill no group.
    tokens = torch.cat([(chosen.unsqueeze(-1) * GROUP + first[: groups.shape[-1]]).flatten(-2), last], -1)
    at = _first_largest(candidates, min(k, V))
    values = candidates.gather(-1, at)

    def log_sums(temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-normaliser and the logarithm of each group's part of it before normalising."""
        of_group = _group_log_sums(groups, maxima.to(dtype), temperature)
        beyond = candidates[..., in_chosen.shape[-1] :] / temperature
        return torch.cat([of_group, beyond], -1).logsumexp(-1), of_group

    log_z, of_group = log_sums(1.0)
    log_z_scaled, of_group = (log_z, of_group) if T == 1.0 else log_sums(T)
    # Summed over the other tokens themselves: as a difference from 1 a small rest would lose its digits.
    others = (candidates / T).scatter(-1, at, -torch.inf)
    log_rest = torch.cat([of_group.scatter(-1, chosen, -torch.inf), others], -1).logsumexp(-1) - log_z_scaled
    own = logits.gather(-1, targets.clamp(0, V - 1).unsqueeze(-1)).squeeze(-1).to(dtype) - log_z
    return LargestLogits(tokens.gather(-1, at), values, log_z, log_z_scaled, log_rest, own)


def _first_largest(x: Float[Tensor, "B T n"], k: int) -> Int[Tensor, "B T k"]:
    """Return the indices of the k largest values, descending, of equal ones the first; NaN is the largest."""
    if x.dtype == torch.float64:
        return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    # `topk` takes any of equal values: as integers in the order of the floats, with the index below, none are equal.
    bits = (x.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(x.isnan(), 0x7FFFFFFF).long()
    return ((keys << 32) - torch.arange(x.shape[-1], device=x.device)).topk(k, dim=-1).indices


def _group_log_sums(
    groups: Float[Tensor, "B T G n"], maxima: Float[Tensor, "B T G"], temperature: float
) -> Float[Tensor, "B T G"]:
    """Return the logarithm of the sum of `exp(logit / temperature)` over each group."""
    shift = torch.where(torch.isfinite(maxima), maxima, 0.0)
    parts = groups.to(maxima.dtype, copy=True).sub_(shift.unsqueeze(-1))
    if temperature != 1.0:
        parts.div_(temperature)
    return parts.exp_().sum(-1).log() + shift / temperature


class NativeLargestLogitsOp(Op):
    """Reference backend. It computes in float32 (float64 stays) and its selection is exact, so both paths agree."""

    forward = staticmethod(largest_logits)
