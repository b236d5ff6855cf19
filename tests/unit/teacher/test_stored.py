"""Teachers that are read from stores: their slots hold what the models sent that the stores were made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.packing import PackedRow
from xtoken_core.served_requests import RequestCounts
from xtoken_core.teacher_store.codec import pack
from xtoken_core.teacher_store.identity import StoreIdentity, identity_of
from xtoken_core.teacher_store.shards import ShardWriter, digest_of
from xtoken_core.teacher_store.store import MissingRecordError, TeacherStore, parts_of
from xtoken_core.topk_logits import largest_logits, read_topk, write_topk
from xtoken_services.common.batches.step_plan import ring_shape, topk_settings
from xtoken_services.common.text.run_order import record_of
from xtoken_services.teacher.stored import StoredTeacher

LENGTHS = (5, 8, 3)
WIDTH = 8
V, WIDER, HIDDEN, TOPK = 60, 64, 16, 4


class Stored(NamedTuple):
    """A run of one step whose two teachers are read from stores, and what these hold.

    Attributes:
        run: The run.
        ids: Teachers' token ids, by position.
        hidden: Of the first teacher, by position; its head has more rows than its vocabulary.
        head: The first teacher's.
        logits: Of the second teacher, by position.
    """

    run: ResolvedRun
    ids: list[torch.Tensor]
    hidden: list[torch.Tensor]
    head: torch.Tensor
    logits: list[torch.Tensor]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    made = resolved_run(tmp_path, teachers=2, positions=8)
    raw = made.spec.model_dump()
    contents = {"content": "hidden"}, {"content": "topk", "topk": TOPK}
    for number, (teacher, content) in enumerate(zip(raw["teacher"], contents, strict=True)):
        teacher |= content | {"store": str(tmp_path / f"store-{number}"), "dtype": "float32"}
    raw["loss"] |= {"mode": "alm", "vocab_topk": None}
    models = tuple(model.model_copy(update={"hidden_size": HIDDEN}) for model in made.teachers)
    run = made.model_copy(update={"spec": RunSpec.model_validate(raw), "teachers": models})
    rng = torch.Generator().manual_seed(3)
    head = torch.randn(WIDER, HIDDEN, generator=rng)
    (tmp_path / "teacher-0").mkdir()
    save_file({"lm_head.weight": head}, tmp_path / "teacher-0" / "model.safetensors")
    ids = [torch.randint(V, (n,), generator=rng) for n in LENGTHS]
    hidden = [torch.randn(n, HIDDEN, generator=rng) for n in LENGTHS]
    logits = [torch.randn(n, V, generator=rng) for n in LENGTHS]
    largest = []
    for own, each in zip(ids, logits, strict=True):
        slot = torch.empty(1, len(own), identity_of(run, 1).width)
        write_topk(largest_logits(each[None], own.roll(-1)[None], topk_settings(run, 1)), slot)
        largest.append(slot[0])
    for number, values in enumerate((hidden, largest)):
        write_store(run, number, ids, values)
    return Stored(run, ids, hidden, head, logits)


def write_store(run: ResolvedRun, teacher: int, ids: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """The records of a run's first positions."""
    identity: StoreIdentity = identity_of(run, teacher)
    shard = ShardWriter(TeacherStore.create(str(run.spec.teacher[teacher].store), identity).files, 1 << 20)
    for position, (own, rows) in enumerate(zip(ids, values, strict=True)):
        frame = pack([np.ascontiguousarray(part) for part in parts_of(rows.numpy(), identity)])
        shard.add(record_of(run, position), len(own), digest_of(own.numpy().tobytes()), frame)
    shard.flush()


CPU = torch.device("cpu")
PADDED = [(row, slice(0, length)) for row, length in enumerate(LENGTHS)]
PACKED = [(0, part) for part in PackedRow(LENGTHS, 20).slices()]


def test_the_head_and_the_padded_hidden_states_are_those_of_the_model(stored: Stored) -> None:
    teacher = StoredTeacher(stored.run, 0, CPU)
    head, slot = torch.empty(WIDER, HIDDEN), torch.full((3, WIDTH, HIDDEN), torch.nan)
    with teacher.head_in(head):
        assert head.equal(stored.head)
    teacher.read_into(slot, (0, 1, 2), stored.ids, PADDED)
    last = stored.hidden[-1][-1]
    for row, (length, hidden) in enumerate(zip(LENGTHS, stored.hidden, strict=True)):
        assert slot[row, :length].equal(hidden)
        assert slot[row, length:].equal(last.expand(WIDTH - length, -1)), "padding repeats a token"
    nbytes = sum(entry.size for entry in teacher.store.entries.values())
    assert replace(teacher.new_reads(), waited_s=0.0) == RequestCounts(3, 0, nbytes)
    assert teacher.new_reads() == RequestCounts()
    assert ring_shape(stored.run, 0).max_rows == 0, "maxima are not stored"
    teacher.close()


def test_largest_logits_of_a_packed_row_are_those_of_the_model(stored: Stored) -> None:
    teacher = StoredTeacher(stored.run, 1, CPU)
    slot = torch.full((1, 20, ring_shape(stored.run, 1).width), torch.nan)
    teacher.read_into(slot, (0, 1, 2), stored.ids, PACKED)
    found = read_topk(slot, topk_settings(stored.run, 1))
    for (_, part), logits in zip(PACKED, stored.logits, strict=True):
        largest = logits.topk(TOPK)
        assert found.values[0, part].equal(largest.values)
        assert found.ids[0, part].equal(largest.indices)
        torch.testing.assert_close(found.log_z[0, part], logits.logsumexp(-1))
    teacher.close()


def test_a_dead_sample_needs_no_record_and_any_other_its_own(stored: Stored) -> None:
    teacher = StoredTeacher(stored.run, 0, CPU)
    slot = torch.full((3, WIDTH, HIDDEN), torch.nan)
    teacher.read_into(slot, (0, 7, 2), [stored.ids[0], stored.ids[1][:0], stored.ids[2]], PADDED)
    assert slot[0, : LENGTHS[0]].equal(stored.hidden[0])
    assert bool(slot.isfinite().all())
    missing = record_of(stored.run, 7)
    with pytest.raises(MissingRecordError, match=f"record {missing} of the text is not in the store"):
        teacher.read_into(slot, (0, 7, 2), stored.ids, PADDED)
    other = [stored.ids[0], stored.ids[1] + 1, stored.ids[2]]
    with pytest.raises(MissingRecordError, match=f"record {record_of(stored.run, 1)} of the text has other tokens"):
        teacher.read_into(slot, (0, 1, 2), other, PADDED)
    teacher.close()
