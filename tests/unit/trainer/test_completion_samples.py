"""Completions for the page: the same sample of a padded and of a packed micro-batch."""

import torch

from xtoken_core.packing import PackedRow
from xtoken_services.trainer.completion_samples import _of_sample

COLUMNS = ("input_ids", "packed_sample", "input_lengths", "chunks")


def test_tokens_of_a_sample_in_padded_and_packed_rows() -> None:
    padded = {
        "input_ids": torch.tensor([[5, 6, 0], [7, 8, 9]]),
        "chunks": torch.tensor([[-1, 0, -1], [-1, 0, 1]]),
        "input_lengths": torch.tensor([2, 3]),
    }
    packed = {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9, 0]]),
        "chunks": torch.tensor([[-1, 0, -1, 1, 2, -1]]),
        "packed_sample": PackedRow((2, 3), 6).samples(),
        "input_lengths": torch.tensor([2, 3]),
    }
    assert _of_sample(padded, 0, COLUMNS) == ([5, 6], [-1, 0])
    assert _of_sample(padded, 1, COLUMNS) == ([7, 8, 9], [-1, 0, 1])
    assert _of_sample(packed, 1, COLUMNS) == ([7, 8, 9], [-1, 1, 2])
