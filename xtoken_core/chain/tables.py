"""The chain tables as tensors: what a loss needs to know about a pair of tokenizers before any batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

T = TypeVar("T", bound="TensorFields")

BROKEN, KEPT, JOINED = 0, 1, 2
"""What follows from the split of two tokens' text: the first is cut into other pieces, it is a word's end, or both are
parts of one word, so that the model decides. `JOINED + k` with k > 0: that word ends inside the second token's own
first word, after its k-th shorter beginning."""


class TensorFields:
    """A dataclass of tensors, numbers and such dataclasses, by dotted names."""

    def flat(self, prefix: str = "") -> dict[str, Tensor]:
        """Return every tensor by its dotted name; a number becomes a tensor without dimensions."""
        found: dict[str, Tensor] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value, name = getattr(self, field.name), prefix + field.name
            if isinstance(value, TensorFields):
                found |= value.flat(name + ".")
            else:
                found[name] = value if isinstance(value, Tensor) else torch.tensor(value)
        return found

    @classmethod
    def of_flat(cls: type[T], tensors: Mapping[str, Tensor], prefix: str = "") -> T:
        """Build the object from the tensors of `flat`.

        Raises:
            KeyError: One is missing.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            # Annotations are strings here, so the class is looked up by its name.
            part = _PARTS.get(str(field.type))
            name = prefix + field.name
            if part is not None:
                values[field.name] = part.of_flat(tensors, name + ".")
            else:
                values[field.name] = int(tensors[name]) if field.type == "int" else tensors[name]
        return cls(**values)

    def to(self: T, device: torch.device | str) -> T:
        """Copy all tensors to a device."""
        # A tensor without dimensions is a number, which is read back on the host.
        moved = {name: value.to(device) if value.dim() else value for name, value in self.flat().items()}
        return self.of_flat(moved)


@dataclass(frozen=True)
class LiveTable(TensorFields):
    """The tokens x of one side that may follow the tokens w of the other; see `live_sets.LiveSets`."""

    tail: Int[Tensor, " V_w"]
    head: Int[Tensor, " V_x"]
    state: UInt8[Tensor, "tails heads"]
    position: Int[Tensor, "K V_x"]
    point: Int[Tensor, " R"]
    low: Int[Tensor, " R"]
    high: Int[Tensor, " R"]
    rule_start: Int[Tensor, " V_w_plus_1"]
    tail_start: Int[Tensor, " V_w"]
    tail_count: Int[Tensor, " V_w"]
    right: Int[Tensor, " V_w"]
    width: int
    depth: int

    @cached_property
    def most_rules(self) -> int:
        """The most rules that one token w has, those of its right spine included."""
        counts, at = (self.rule_start[1:] - self.rule_start[:-1]).long(), torch.arange(len(self.right))
        counts, right, tail_count = counts.cpu(), self.right.cpu().long(), self.tail_count.cpu().long()
        # All right spines at once, one step of each per turn, on the host: this runs once.
        for _ in range(self.depth):
            known = at.clamp(min=0)
            counts += torch.where(at >= 0, tail_count[known], 0)
            at = torch.where(at >= 0, right[known], -1)
        return int(counts.max()) if len(counts) else 0


@dataclass(frozen=True)
class SideTable(TensorFields):
    """One side's tokens: classes, spellings by the other side, nodes (see `paths.PieceTrie`), live sets.

    Attributes:
        root: `[V]` int32 class of each token; `ChainTables.classes` where it has none.
        spelling_start: `[V + 1]` int32, where a token's pieces begin.
        piece: `[n]` int32 ids of the other side.
        node: `[n]` int32, the node reached with each piece; -1 = every token ends there, or an end without a term.
        status: `[V]` uint8, why a token has no spelling; see `spelling`.
    """

    root: Int[Tensor, " V"]
    spelling_start: Int[Tensor, " V_plus_1"]
    piece: Int[Tensor, " n"]
    node: Int[Tensor, " n"]
    member_start: Int[Tensor, " N_plus_1"]
    member: Int[Tensor, " m"]
    member_slot: Int[Tensor, " m"]
    slot_start: Int[Tensor, " N_plus_1"]
    slot_class: Int[Tensor, " S"]
    bare_space: Bool[Tensor, " N"]
    status: UInt8[Tensor, " V"]
    live: LiveTable

    @cached_property
    def most_members(self) -> int:
        """The most tokens that share a node."""
        return int(self.member_start.diff().max()) if len(self.bare_space) else 0

    @cached_property
    def most_slots(self) -> int:
        """The most classes that a node has."""
        return int(self.slot_start.diff().max()) if len(self.bare_space) else 0


@dataclass(frozen=True)
class ChainTables(TensorFields):
    """Everything static about a pair of tokenizers.

    Attributes:
        student: The student's tokens.
        teacher: The teacher's tokens.
        classes: How many root classes there are; the number itself is the class of tokens without a root.
        common: How many of them are common text tokens.
    """

    student: SideTable
    teacher: SideTable
    classes: int
    common: int

    def read_sizes(self) -> None:
        """Read the sizes of the largest groups, which waits for the device; later uses do not."""
        for side in (self.student, self.teacher):
            # Cached properties: reading them now keeps the first step from waiting for the device.
            _ = side.most_members, side.most_slots, side.live.most_rules


_PARTS: dict[str, type[TensorFields]] = {"LiveTable": LiveTable, "SideTable": SideTable}
