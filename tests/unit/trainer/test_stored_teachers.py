"""Teachers that the trainer reads from stores: their logits are those of the models that the stores were made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.columns import columns_of
from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.losses.lazy_logits import HeadProjection
from xtoken_core.plan import MicroBatch
from xtoken_core.teacher_store.codec import pack
from xtoken_core.teacher_store.identity import StoreIdentity, identity_of
from xtoken_core.teacher_store.shards import ShardWriter, digest_of
from xtoken_core.teacher_store.store import TeacherStore, parts_of
from xtoken_core.topk_logits import TopKLogits, largest_logits, write_topk
from xtoken_services.common.batches.step_plan import topk_settings
from xtoken_services.common.text.run_order import record_of
from xtoken_services.trainer.stored_teachers import StoredTeachers

LENGTHS = (5, 8, 3)
WIDTH = 8
V, WIDER, HIDDEN, TOPK = 60, 64, 16, 4


class Stored(NamedTuple):
    """A run of one step whose two teachers are read from stores, and what these hold.

    Attributes:
        run: The run.
        batch: Its micro-batch of three samples.
        ids: Teachers' token ids, by position.
        hidden: Of the first teacher, by position; its head has more rows than its vocabulary.
        head: The first teacher's.
        logits: Of the second teacher, by position.
    """

    run: ResolvedRun
    batch: MicroBatch
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
    return Stored(run, MicroBatch((0, 1, 2), (WIDTH,) * 3), ids, hidden, head, logits)


def write_store(run: ResolvedRun, teacher: int, ids: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """The records of a run's first positions."""
    identity: StoreIdentity = identity_of(run, teacher)
    shard = ShardWriter(TeacherStore.create(str(run.spec.teacher[teacher].store), identity).files, 1 << 20)
    for position, (own, rows) in enumerate(zip(ids, values, strict=True)):
        frame = pack([np.ascontiguousarray(part) for part in parts_of(rows.numpy(), identity)])
        shard.add(record_of(run, position), len(own), digest_of(own.numpy().tobytes()), frame)
    shard.flush()


@pytest.fixture
def reader(stored: Stored) -> Iterator[StoredTeachers]:
    worker: Any = SimpleNamespace(run=stored.run, queue=None)
    found = StoredTeachers(worker, torch.device("cpu"), rank=0)
    yield found
    found.close()


def test_logits_are_those_of_the_models(stored: Stored, reader: StoredTeachers) -> None:
    columns = columns_of([{f"teacher_{t}_input_ids": own.numpy() for t in (0, 1)} for own in stored.ids])
    values = reader.take(stored.batch, columns, dead=[])
    by_head, by_list = (reader.logits(teacher, values[teacher]) for teacher in (0, 1))
    assert isinstance(by_head, HeadProjection) and isinstance(by_list, TopKLogits)
    assert by_head.shape == by_list.shape == (len(LENGTHS), WIDTH, V)
    whole = by_head.logits()
    for row, length in enumerate(LENGTHS):
        expected = stored.hidden[row] @ stored.head[:V].T
        torch.testing.assert_close(whole[row, :length], expected)
        largest = stored.logits[row].topk(TOPK)
        torch.testing.assert_close(by_list.values[row, :length], largest.values)
        assert by_list.ids[row, :length].equal(largest.indices)
        torch.testing.assert_close(by_list.log_z[row, :length], stored.logits[row].logsumexp(-1))
    assert reader.metrics({})["store_hits"] == 2 * len(LENGTHS)
