"""Transport names of an alignment, and stretches that two byte streams have in common."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import vocabularies as v
from tests.support.alignments import padded
from xtoken_core import schema
from xtoken_core.alignment import AlignmentBatch, TokenAligner, alignment_from_flat_batch
from xtoken_core.alignment.walks import matching_blocks


@pytest.fixture(scope="module")
def batch():
    tokenizer = v.byte_level()
    ids, mask = padded([tokenizer.encode("hello world"), tokenizer.encode("a")])
    return TokenAligner(tokenizer, tokenizer).align(ids, ids, student_attention_mask=mask, teacher_attention_mask=mask)


@pytest.mark.parametrize("teacher", [None, 0, 2])
def test_flat_fields_are_the_schemas_and_come_back(batch, teacher):
    flat = batch.flat(teacher)
    assert set(flat) == {schema.field_name(field, teacher) for field in schema.ALIGNMENT_FIELDS}
    for field in schema.ALIGNMENT_FIELDS:
        assert str(flat[schema.field_name(field, teacher)].dtype) == f"torch.{field.dtype}"
    again = alignment_from_flat_batch({**flat, "other": 1}, teacher)
    assert all(torch.equal(getattr(again, f.name), getattr(batch, f.name)) for f in fields(AlignmentBatch))


def test_a_missing_field_is_named(batch):
    flat = batch.flat()
    del flat["alignment_num_chunks"]
    with pytest.raises(KeyError, match="alignment_num_chunks"):
        alignment_from_flat_batch(flat)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5), st.binary(max_size=4)), max_size=3),
)
def test_blocks_are_equal_and_in_order(text, edits):
    other = bytearray(text)
    for at, removed, added in edits:
        other[at : at + removed] = added
    a, b = (np.frombuffer(bytes(x), dtype=np.uint8).astype(np.uint16) for x in (text, other))
    end_a = end_b = 0
    for i, j, size in matching_blocks(a, b):
        assert size > 0 and i >= end_a and j >= end_b
        assert np.array_equal(a[i : i + size], b[j : j + size])
        end_a, end_b = i + size, j + size
    if not edits:
        assert end_a == len(a)


def test_unknown_symbols_equal_nothing():
    a = np.array([1, 2, 300, 3, 4, 5, 6, 300], dtype=np.uint16)
    assert matching_blocks(a, a.copy()) == [(0, 0, 2), (3, 3, 4)]
