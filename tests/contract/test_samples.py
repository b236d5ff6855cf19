"""TensorDicts in and out, and a trainer's three calls, on the queue in memory and on a real one."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.contract.peers import Place
from tests.support.memory_queue import MemoryQueue
from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane import (
    KVBatchMeta,
    get_samples,
    kv_first_write,
    put_samples,
    read_columns,
    to_nested_by_length,
    write_columns,
)
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m

LENGTHS = torch.tensor([3, 0, 5])
IDS = torch.arange(1, 16).reshape(3, 5)


@pytest.fixture(params=["memory", "tcp"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "memory":
        made = Place("library", memory=MemoryQueue())
    else:
        made = Place("library", address=request.getfixturevalue("tcp_queue"))
    yield made
    made.leave()


@pytest.fixture
def client(place: Place) -> TaskClient:
    found: TaskClient = place.worker().client
    return found


@pytest.fixture
def partition(place: Place, client: TaskClient) -> str:
    name = place.name("p")
    client.open(name, [m.TaskDef(name="train", requires=["input_ids"])])
    return name


def lengths_of(client: TaskClient, meta: KVBatchMeta, field: str) -> list[int]:
    column = (client.get(meta.partition, meta.ids, [field]) or {})[field]
    assert column.offsets is not None, f"{field} is {column.kind}"
    return [column.offsets[row + 1] - column.offsets[row] for row in range(column.rows)]


def test_a_tensordict_comes_back(client: TaskClient, partition: str) -> None:
    td = TensorDict(
        {
            "input_ids": to_nested_by_length(IDS, LENGTHS),
            "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
            "image": torch.randn(3, 2, 4).to(torch.bfloat16),
            "origin": NonTensorStack(*(NonTensorData(v) for v in ({"line": 1}, None, "x"))),
        },
        batch_size=[3],
    )
    meta = put_samples(client, partition, [7, 8, 9], td)
    assert (meta.ids, meta.fields, meta.lengths) == ([7, 8, 9], list(td.keys()), [3, 0, 5])
    back = get_samples(client, meta)
    assert back.batch_size == torch.Size([3])
    assert [row.tolist() for row in back["input_ids"].unbind()] == [[1, 2, 3], [], [11, 12, 13, 14, 15]]
    assert torch.equal(back["sample_mask"], td["sample_mask"])
    assert torch.equal(back["image"], td["image"])
    assert back["origin"] == [{"line": 1}, None, "x"]
    some = get_samples(client, KVBatchMeta(partition, [9, 7]), ["input_ids"])
    assert [row.tolist() for row in some["input_ids"].unbind()] == [[11, 12, 13, 14, 15], [1, 2, 3]]


@pytest.mark.parametrize("batch", [1, 3], ids=["one-row", "three-rows"])
def test_per_token_writes_have_equal_row_lengths(client: TaskClient, partition: str, batch: int) -> None:
    ids, lengths, tokens = [4, 5, 6][-batch:], LENGTHS[-batch:], IDS[-batch:]
    meta = kv_first_write(client, partition, ids, {"input_ids": tokens}, lengths=lengths)
    meta = write_columns(client, meta, {"logprobs": tokens * 0.5})
    wide = torch.nn.functional.pad(tokens, [0, 3])
    meta = write_columns(client, meta, {"reference": wide}, per_token=["reference"])
    td = TensorDict({"mask": to_nested_by_length(tokens > 2, lengths)}, batch_size=[batch])
    put_samples(client, partition, ids, td)
    for field in (*meta.fields, "mask"):
        assert lengths_of(client, meta, field) == lengths.tolist()
    assert meta.fields == ["input_ids", "logprobs", "reference"]


def test_columns_are_read_padded_or_jagged(client: TaskClient, partition: str) -> None:
    origins = np.empty(3, dtype=object)
    origins[:] = ["a", {"b": 1}, None]
    meta = kv_first_write(client, partition, [0, 1, 2], {"input_ids": IDS, "origin": origins}, lengths=LENGTHS)
    batch = read_columns(client, meta, pad_value_dict={"input_ids": -1}, pad_to_seqlen=6)
    expected = [[1, 2, 3, -1, -1, -1], [-1] * 6, [11, 12, 13, 14, 15, -1]]
    assert batch["input_ids"].tolist() == expected
    assert list(batch["origin"]) == ["a", {"b": 1}, None]
    jagged = read_columns(client, meta, ["input_ids"], layout="jagged")
    assert jagged["input_ids"].is_nested
    assert list(jagged) == ["input_ids"]


def test_without_lengths_everything_is_rectangular(client: TaskClient, partition: str) -> None:
    meta = kv_first_write(client, partition, [0, 1, 2], {"input_ids": IDS}, lengths=None)
    assert torch.equal(read_columns(client, meta)["input_ids"], IDS)


def test_only_named_per_token_columns_are_jagged(client: TaskClient, partition: str) -> None:
    fields = {"input_ids": IDS, "image": torch.randn(3, 5)}
    meta = kv_first_write(client, partition, [0, 1, 2], fields, lengths=LENGTHS, per_token=["input_ids"])
    assert torch.equal(read_columns(client, meta)["image"], fields["image"])
    assert lengths_of(client, meta, "input_ids") == [3, 0, 5]
    with pytest.raises(ValueError, match="'narrow'"):
        write_columns(client, meta, {"narrow": IDS[:, :4]}, per_token=["narrow"])
    with pytest.raises(ValueError, match="elsewhere"):
        write_columns(client, meta, {"x": IDS}, per_token=["elsewhere"])


def test_rows_and_ids_must_agree(client: TaskClient, partition: str) -> None:
    with pytest.raises(ValueError, match="2 ids for 3 rows"):
        put_samples(client, partition, [0, 1], TensorDict({"x": IDS}, batch_size=[3]))
    with pytest.raises(QueueError) as refused:
        get_samples(client, KVBatchMeta(partition, [0]), ["input_ids"])
    assert refused.value.code == "unknown_sample"
    with pytest.raises(TimeoutError):
        get_samples(client, KVBatchMeta(partition, [0]), ["input_ids"], wait_s=0.05)


def test_a_put_waits_for_room() -> None:
    queue = MemoryQueue(memory_limit=1 << 16)
    with queue.connect() as producer, queue.connect() as consumer:
        producer.hello("p", "producer", incarnation=1)
        consumer.hello("c", "consumer", incarnation=1)
        producer.open("p", [m.TaskDef(name="read", requires=["x"])])
        block = TensorDict({"x": torch.zeros(1, 5000)}, batch_size=[1])
        seen: list[int] = []

        def consume() -> None:
            while len(seen) < 12 and (claimed := consumer.claim("p", "read", count=1, wait_s=20.0)):
                seen.extend(claimed[0].ids)
                consumer.ack("p", "read", claimed[0].ids)

        thread = threading.Thread(target=consume)
        for i in range(3):
            put_samples(producer, "p", [i], block)
        with pytest.raises(QueueError) as refused:
            put_samples(producer, "p", [3], block, wait_s=0.05)
        assert refused.value.code == "no_room"
        thread.start()
        for i in range(3, 12):
            put_samples(producer, "p", [i], block, wait_s=20.0)
        thread.join(20.0)
        assert seen == list(range(12))
