"""Slots and rings: generations, and who shares what."""

import pytest

from xtoken_core.queue.run.slots import RegisteredRing, Rings, SlotState, SlotTable
from xtoken_core.queue.samples import Samples
from xtoken_core.wire import QueueError


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(Samples([]), teachers=1, slots=2)


@pytest.fixture
def ring(table: SlotTable) -> RegisteredRing:
    return table.rings.announce(0, 0, "teacher", "trainer", b"handle")


def test_slots_are_filled_from_the_lowest_free_one(ring: RegisteredRing) -> None:
    assert ring.free_slot() == 0
    ring.fill(0, lease=7, ids=(1, 2))
    assert ring.free_slot() == 1
    ring.fill(1, lease=8, ids=(3,))
    assert ring.free_slot() is None


def test_every_filling_has_its_own_generation(ring: RegisteredRing) -> None:
    first = ring.fill(0, 7, (1,)).generation
    ring.slots[0].free()
    assert ring.fill(0, 8, (2,)).generation == first + 1
    assert ring.slots[1].generation == 0


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.FILLING, SlotState.FULL])
def test_only_a_slot_that_is_read_is_released(table: SlotTable, ring: RegisteredRing, state: SlotState) -> None:
    slot = ring.fill(0, 7, (1,))
    slot.state = state
    assert not table.release(ring, 0, slot.generation)
    assert slot.state == state
    slot.state = SlotState.READING
    assert table.release(ring, 0, slot.generation)
    assert slot.state == SlotState.FREE


def test_the_release_of_an_older_filling_changes_nothing(table: SlotTable, ring: RegisteredRing) -> None:
    old = ring.fill(0, 7, (1,)).generation
    ring.slots[0].free()
    ring.fill(0, 8, (2,)).state = SlotState.READING
    assert not table.release(ring, 0, old)
    assert ring.slots[0].state == SlotState.READING


def test_a_slot_that_does_not_exist_is_named(table: SlotTable, ring: RegisteredRing) -> None:
    with pytest.raises(QueueError, match="has 2 slots, none is number 2"):
        table.release(ring, 2, 0)


def test_ring_numbers_are_never_reused() -> None:
    rings = Rings(slots=1)
    old = rings.announce(0, 0, "teacher/1", "trainer", b"")
    new = rings.announce(0, 0, "teacher/2", "trainer", b"")
    assert new.id != old.id
    assert rings.get(new.id) is new
    with pytest.raises(QueueError, match="is closed") as caught:
        rings.get(old.id)
    assert caught.value.code == "ring_closed"


def test_rings_of_a_session() -> None:
    rings = Rings(slots=1)
    first = rings.announce(0, 0, "t0", "r0", b"")
    second = rings.announce(1, 0, "t1", "r0", b"")
    assert rings.of_session("r0") == [first, second]
    assert rings.of_session("t1") == [second]
    rings.drop(first)
    assert rings.of_session("r0") == [second]
