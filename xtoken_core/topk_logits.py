"""A teacher's logits by their largest values: made by the teacher, carried in a slot, read by the losses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from xtoken_core.ops.registry import get_op
from xtoken_core.transports.ring import TopKSettings


@dataclass(frozen=True)
class TopKLogits:
    """The largest logits of every position; the rest of its mass belongs to tokens that are not listed.

    Attributes:
        ids: Listed tokens, distinct; -1 = empty entry.
        values: Their logits; -inf in an empty entry.
        log_z: Log-normaliser over the whole vocabulary, at temperature 1.
        log_z_scaled: That of the logits divided by `temperature`.
        log_rest: Logarithm of the mass of all other tokens, at `temperature`; -inf where there are none.
        own: Log-probability of the token that the position predicts, at temperature 1; listed or not.
        vocab_size: `V`, tokens of the vocabulary.
        temperature: The loss's.
    """

    ids: Int[Tensor, "B T k"]
    values: Float[Tensor, "B T k"]
    log_z: Float[Tensor, "B T"]
    log_z_scaled: Float[Tensor, "B T"]
    log_rest: Float[Tensor, "B T"]
    own: Float[Tensor, "B T"]
    vocab_size: int
    temperature: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(B, T, V)`: the shape of the logits that they stand for."""
        return self.ids.shape[0], self.ids.shape[1], self.vocab_size

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def listed(self) -> Bool[Tensor, "B T k"]:
        """False for empty entries."""
        return self.ids >= 0

    @property
    def unlisted(self) -> Int[Tensor, "B T"]:
        """Number of tokens that are not listed."""
        return self.vocab_size - self.listed.sum(-1)

    @property
    def columns(self) -> Int[Tensor, "B T k"]:
        """The listed tokens, `V` for empty entries: indices of an array with a spare last entry."""
        return torch.where(self.listed, self.ids, self.vocab_size)

    def detach(self) -> TopKLogits:
        """Return this object: a teacher's values have no gradient."""
        return self

    def log_probs(self) -> Float[Tensor, "B T k"]:
        """Return the listed tokens' log-probabilities at `temperature`."""
        return self.values / self.temperature - self.log_z_scaled.unsqueeze(-1)

    def own_scaled(self) -> Float[Tensor, "B T"]:
        """Return the log-probability at `temperature` of the token that each position predicts."""
        return (self.own + self.log_z) / self.temperature - self.log_z_scaled

    def log_equal_part(self) -> Float[Tensor, "B T"]:
        """Return the logarithm of an unlisted token's equal part of the rest; of 0, that of the smallest number."""
        part = self.log_rest.exp() / self.unlisted.clamp(min=1)
        return part.clamp(min=torch.finfo(part.dtype).tiny).log()

    def with_own(self, targets: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> TopKLogits:
        """Add an entry for the predicted token where it is not among the others.

        Args:
            targets: The token that each position predicts.
            valid: False where it predicts none.
        """
        added = valid & ~(self.ids == targets.unsqueeze(-1)).any(-1)
        own_mass = torch.where(added, self.own_scaled().exp(), 0.0)
        value = torch.where(added, self.own + self.log_z, -torch.inf)
        return replace(
            self,
            ids=torch.cat([self.ids, torch.where(added, targets, -1).unsqueeze(-1)], dim=-1),
            values=torch.cat([self.values, value.unsqueeze(-1)], dim=-1),
            log_rest=torch.where(added, (self.log_rest.exp() - own_mass).clamp(min=0.0).log(), self.log_rest),
        )

    def rows(self, rows: Int[Tensor, " R"]) -> TopKLogits:
        """Select positions, as one row `[1, R]`.

        Args:
            rows: Indices in the flattened `[B, T]`; those beyond it give the last position.
        """
        rows = rows.clamp(max=self.ids.shape[0] * self.ids.shape[1] - 1)
        names = ("ids", "values", "log_z", "log_z_scaled", "log_rest", "own")
        taken = {name: getattr(self, name).flatten(0, 1).index_select(0, rows).unsqueeze(0) for name in names}
        return replace(self, **taken)

    def column_maximum(self) -> Float[Tensor, " V"]:
        """Return each token's largest listed logit over all positions; -inf for one that is listed nowhere."""
        maximum = self.values.new_full((self.vocab_size + 1,), -torch.inf)
        return maximum.scatter_reduce(0, self.columns.flatten(), self.values.flatten(), "amax")[:-1]


def largest_logits(logits: Float[Tensor, "B T V_m"], targets: Int[Tensor, "B T"], settings: TopKSettings) -> TopKLogits:
    """Select the largest logits of every position, by the op `largest_logits` of their device.

    Args:
        logits: At least `V` wide; any floating dtype, float32 inside, float64 stays.
        targets: The token that each position predicts; any id where it predicts none.
        settings: What to select.
    """
    ids, values, log_z, log_z_scaled, log_rest, own = get_op("largest_logits", logits.device)(
        logits, targets, settings.k, settings.vocab_size, settings.temperature
    )
    return TopKLogits(ids, values, log_z, log_z_scaled, log_rest, own, settings.vocab_size, settings.temperature)


def write_topk(source: TopKLogits, out: Float[Tensor, "B T W"]) -> None:
    """Write positions into a slot: k logits, k ids as the bits of int32, then the four values beside them.

    They are one copy: to memory of the host several would each wait for the device.

    Args:
        source: What the teacher has selected.
        out: Float32, `TopKSettings.width` wide, contiguous in the last dimension, on any device.
    """
    scalars = torch.stack([source.log_z, source.log_z_scaled, source.log_rest, source.own], dim=-1)
    parts = source.values.float().view(torch.int32), source.ids.int(), scalars.float().view(torch.int32)
    out.view(torch.int32).copy_(torch.cat(parts, -1), non_blocking=True)


def read_topk(slot: Float[Tensor, "B T W"], settings: TopKSettings) -> TopKLogits:
    """Read positions from a slot or a copy of one; an id outside the vocabulary becomes an empty entry.

    Args:
        slot: As `write_topk` leaves it.
        settings: What the teacher selects.
    """
    k = settings.k
    ids = slot[..., k : 2 * k].view(torch.int32).long()
    listed = (ids >= 0) & (ids < settings.vocab_size)
    values = slot[..., :k].masked_fill(~listed, -torch.inf)
    log_z, log_z_scaled, log_rest, own = slot[..., 2 * k :].unbind(-1)
    return TopKLogits(
        ids.masked_fill(~listed, -1),
        values,
        log_z,
        log_z_scaled,
        log_rest,
        own,
        settings.vocab_size,
        settings.temperature,
    )
