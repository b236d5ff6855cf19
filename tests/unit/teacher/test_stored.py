"""Teachers that are read from stores: their slots hold what the models sent that the stores were made of."""

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
from xtoken_core.teacher_store.shards import digest_of
from xtoken_core.teacher_store.store import MissingRecordError, TeacherStore, parts_of
from xtoken_core.teacher_store.writing import ShardWriter
from xtoken_core.topk_logits import largest_logits, read_topk, write_topk
from xtoken_services.common.batches.step_plan import ring_shape, topk_settings
from xtoken_services.common.text.run_order import record_of
from xtoken_services.teacher.base import RefusedSamplesError, TeacherBatch
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
PACKED = PackedRow(LENGTHS, 20)


def batch_of(
    ids: list[torch.Tensor],
    positions: tuple[int, ...] = (0, 1, 2),
    dead: tuple[int, ...] = (),
    row: PackedRow | None = None,
) -> TeacherBatch:
    """A micro-batch of these samples; those in a row lie one after the other."""
    width = WIDTH if row is None else row.width
    samples = ids if row is None else [torch.cat(ids)]
    padded = torch.stack([torch.nn.functional.pad(own, (0, width - len(own))) for own in samples])
    return TeacherBatch(positions, padded, row, LENGTHS, dead)


def test_the_head_and_the_padded_hidden_states_are_those_of_the_model(stored: Stored) -> None:
    teacher = StoredTeacher(stored.run, 0, CPU)
    head, slot = torch.empty(WIDER, HIDDEN), torch.full((3, WIDTH, HIDDEN), torch.nan)
    with teacher.head_in(head):
        assert head.equal(stored.head)
    teacher.write(batch_of(stored.ids), slot)
    last = stored.hidden[-1][-1]
    for row, (length, hidden) in enumerate(zip(LENGTHS, stored.hidden, strict=True)):
        assert slot[row, :length].equal(hidden)
        assert slot[row, length:].equal(last.expand(WIDTH - length, -1)), "padding repeats a token"
    nbytes = sum(entry.size for entry in teacher.store.entries.values())
    assert teacher.new_requests()._replace(waited_s=0.0) == RequestCounts(3, 0, nbytes)
    assert teacher.new_requests() == RequestCounts()
    assert ring_shape(stored.run, 0).max_rows == 0, "maxima are not stored"
    teacher.close()


def test_largest_logits_of_a_packed_row_are_those_of_the_model(stored: Stored) -> None:
    teacher = StoredTeacher(stored.run, 1, CPU)
    slot = torch.full((1, 20, ring_shape(stored.run, 1).width), torch.nan)
    teacher.write(batch_of(stored.ids, row=PACKED), slot)
    found = read_topk(slot, topk_settings(stored.run, 1))
    for part, logits in zip(PACKED.slices(), stored.logits, strict=True):
        largest = logits.topk(TOPK)
        assert found.values[0, part].equal(largest.values)
        assert found.ids[0, part].equal(largest.indices)
        torch.testing.assert_close(found.log_z[0, part], logits.logsumexp(-1))
    teacher.close()


def test_a_dead_sample_needs_no_record_and_any_other_its_own(stored: Stored) -> None:
    teacher = StoredTeacher(stored.run, 0, CPU)
    slot = torch.full((3, WIDTH, HIDDEN), torch.nan)
    teacher.write(batch_of(stored.ids, (0, 7, 2), dead=(7,)), slot)
    assert slot[0, : LENGTHS[0]].equal(stored.hidden[0])
    assert bool(slot.isfinite().all())
    missing = record_of(stored.run, 7)
    with pytest.raises(MissingRecordError, match=f"record {missing} of the text is not in the store"):
        teacher.write(batch_of(stored.ids, (0, 7, 2)), slot)
    other = [stored.ids[0], stored.ids[1] + 1, stored.ids[2]]
    with pytest.raises(MissingRecordError, match=f"record {record_of(stored.run, 1)} of the text has other tokens"):
        teacher.write(batch_of(other), slot)
    teacher.close()


def test_samples_with_tokens_that_the_teacher_does_not_have_are_refused_by_name(stored: Stored) -> None:
    teacher = StoredTeacher(stored.run, 0, CPU)
    ids = [stored.ids[0], stored.ids[1].clone(), stored.ids[2]]
    ids[1][2] = WIDER
    with pytest.raises(
        RefusedSamplesError, match=f"token ids beyond the head of .* \\({teacher.head_width} rows\\)"
    ) as caught:
        teacher.write(batch_of(ids), torch.empty(3, WIDTH, HIDDEN))
    assert caught.value.samples == [1]
    teacher.close()
