"""A padded batch of a loss as one packed row."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tests.support.columns import columns_of
from xtoken_services.common.batches.packed_batch import packed_batch


def packed_whole(batch: Mapping[str, Tensor], logits: Sequence[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Pack a batch with its padding, so that each sample is as long as it was; lay each side's logits out likewise."""
    rows = [{name: column[b].numpy() for name, column in batch.items()} for b in range(len(logits[0]))]
    widths = [x.shape[0] * x.shape[1] for x in logits]
    packed = packed_batch(columns_of(rows), widths=widths, pad_ids=[0] * len(logits))
    return packed.data, [x.detach().flatten(0, 1).unsqueeze(0) for x in logits]
