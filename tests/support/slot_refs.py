"""References to rows of a slot, in the per-sample form of the public edge."""

from xtoken_core.transports.compat import SampleSlotRef


def slot_refs(ring: int, slot: int, generation: int, rows: int) -> list[SampleSlotRef]:
    """Return one reference per row of a micro-batch in a slot."""
    return [SampleSlotRef(ring=ring, slot=slot, row=row, generation=generation) for row in range(rows)]
