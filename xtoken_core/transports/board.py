"""Headers of a ring's slots, in host memory that both processes map.

A header is generation, rows and width as int64. The generation is set to `NO_GENERATION` before a slot is refilled and
to its number after, so that a reader that checks again after its backward detects any refill. No torch.
"""

from __future__ import annotations

from xtoken_core.transports.ring import NO_GENERATION, PAGE, SLOT_HEADER_BYTES, RingShape, SignalError, StaleSignalError

_GENERATION, _ROWS, _WIDTH = range(3)
_FIELD_BYTES = 24


class Board:
    """The headers of a ring's slots.

    Args:
        memory: `shape.board_bytes` bytes, read-only for a trainer.
        shape: From the run's specification.
        name: The ring's, for errors.
    """

    def __init__(self, memory: memoryview, shape: RingShape, name: str) -> None:
        self.shape, self.name = shape, name
        self._memory = memory
        starts = [PAGE + slot * SLOT_HEADER_BYTES for slot in range(shape.slots)]
        self._slots = [memory[start : start + _FIELD_BYTES].cast("q") for start in starts]

    def format(self, canary: bytes) -> None:
        """Initialise the board of a new ring: its header, and no generation in any slot."""
        header = self.shape.header(canary)
        self._memory[: len(header)] = header
        for fields in self._slots:
            fields[_GENERATION] = NO_GENERATION

    def check_canary(self, canary: bytes) -> None:
        """Check that this is the ring that was announced.

        Raises:
            SignalError: If it is another, or one of another shape.
        """
        expected = self.shape.header(canary)
        if self._memory[: len(expected)] != expected:
            raise SignalError(f"ring {self.name} does not start with the canary and shape that were announced")

    def begin(self, slot: int, rows: int, width: int) -> None:
        """Invalidate a slot before it is filled.

        Raises:
            SignalError: If there is no such slot, or the micro-batch does not fit.
        """
        self.shape.slot_offset(slot)
        self.shape.check_batch(rows, width)
        fields = self._slots[slot]
        fields[_GENERATION] = NO_GENERATION
        fields[_ROWS], fields[_WIDTH] = rows, width

    def write_generation(self, slot: int, generation: int) -> None:
        """Mark a slot as holding this generation.

        Raises:
            SignalError: If there is no such slot or generation.
        """
        self.shape.slot_offset(slot)
        if generation < 0:
            raise SignalError(f"a generation is not negative; got {generation}")
        self._slots[slot][_GENERATION] = generation

    def check(self, slot: int, generation: int) -> None:
        """Check that a slot holds this generation.

        Raises:
            StaleSignalError: If it does not.
            SignalError: If there is no such slot.
        """
        self.shape.slot_offset(slot)
        held = self._slots[slot][_GENERATION]
        if held != generation or generation < 0:
            raise StaleSignalError(f"slot {slot} of ring {self.name} holds generation {held}, not {generation}")

    def check_filled(self, slot: int, generation: int, rows: int, width: int) -> None:
        """Check that a slot holds this generation, with at least `rows` rows of width `width`.

        Raises:
            StaleSignalError: If it holds another.
            SignalError: If it was filled in another shape.
        """
        self.check(slot, generation)
        filled_rows, filled_width = self._slots[slot][_ROWS], self._slots[slot][_WIDTH]
        if rows > filled_rows or width != filled_width:
            raise SignalError(
                f"slot {slot} holds {filled_rows} rows of {filled_width} tokens, the plan has {rows} of {width}: "
                "teacher and trainer do not plan alike"
            )
        self.shape.check_batch(rows, width)
