"""The batch of a trainer, and what names its rows."""

import numpy as np
import pytest
import torch

import xtoken_core.data_plane
from xtoken_core.data_plane import BatchedDataDict, KVBatchMeta


@pytest.fixture
def batch():
    return BatchedDataDict(
        {
            "ids": torch.arange(8).view(4, 2),
            "jagged": torch.nested.nested_tensor([torch.arange(n) for n in (1, 0, 3, 2)], layout=torch.jagged),
            "tags": np.array(["a", "b", "c", "d"], dtype=object),
            "list": [0, 1, 2, 3],
            "step": 7,
        }
    )


def rows(batch):
    return (
        batch["ids"].tolist(),
        [row.tolist() for row in batch["jagged"].unbind()],
        batch["tags"].tolist(),
        batch["list"],
        batch["step"],
    )


def test_a_batch_is_a_dict_with_a_number_of_rows(batch):
    assert isinstance(batch, dict) and batch.size == 4 and BatchedDataDict().size == 0
    batch["short"] = torch.ones(3)
    with pytest.raises(ValueError, match="'short': 3"):
        _ = batch.size


def test_slice_and_select_take_every_column(batch):
    expected = ([[2, 3], [4, 5]], [[], [0, 1, 2]], ["b", "c"], [1, 2], 7)
    assert rows(batch.slice(1, 3)) == expected
    assert rows(batch.select([1, 2])) == expected
    assert rows(batch.select([2, 0, 2])) == (
        [[4, 5], [0, 1], [4, 5]],
        [[0, 1, 2], [0], [0, 1, 2]],
        ["c", "a", "c"],
        [2, 0, 2],
        7,
    )
    assert batch.slice(1, 3)["ids"].data_ptr() == batch["ids"][1:].data_ptr()
    assert batch.slice(4, 9).size == 0 and batch.select([]).size == 0


def test_to_moves_the_tensors_only(batch):
    moved = batch.to("meta")
    assert moved["ids"].is_meta and moved["tags"] is batch["tags"] and moved["step"] == 7
    assert not batch["ids"].is_meta


def test_meta_counts_its_rows():
    assert KVBatchMeta("train", [3, 5], ["ids"], [1, 2]).size == 2
    with pytest.raises(ValueError, match="2 ids but 1 lengths"):
        KVBatchMeta("train", [3, 5], lengths=[1])


def test_every_public_name_is_there():
    for name in xtoken_core.data_plane.__all__:
        assert getattr(xtoken_core.data_plane, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = xtoken_core.data_plane.nothing
