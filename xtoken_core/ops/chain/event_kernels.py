"""The Triton kernels that find the events of the chain divergence, the same as `events`."""
# Triton has no types, and its kernels can carry none.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["R", "T", "P"], do_not_specialize_on_alignment=["chunk_ptr"])
def chain_bounds_kernel(chunk_ptr, first_ptr, last_ptr, R, T, P, BLOCK: tl.constexpr):
    """Store the first and the last position of every chunk of one side; entries without a chunk are left unchanged."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.load(chunk_ptr + row, mask=row < R, other=-1)
    # A chunk's positions are adjacent within a sample: its first has no neighbour of the chunk before it.
    before = tl.load(chunk_ptr + row - 1, mask=(row < R) & (row % T > 0), other=-1)
    after = tl.load(chunk_ptr + row + 1, mask=(row < R) & (row % T < T - 1), other=-1)
    inside = (chunk >= 0) & (chunk < P)
    group = row // T * P + chunk
    tl.store(first_ptr + group, row, mask=inside & (before != chunk))
    tl.store(last_ptr + group, row, mask=inside & (after != chunk))


@triton.jit(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=[
        "s_predicted_ptr",
        "t_predicted_ptr",
        "s_read_ptr",
        "t_read_ptr",
        "s_read_chunk_ptr",
        "t_read_chunk_ptr",
    ],
)
def chain_event_kernel(
    s_first_ptr,
    s_last_ptr,
    t_first_ptr,
    t_last_ptr,
    s_predicted_ptr,
    t_predicted_ptr,
    s_read_ptr,
    t_read_ptr,
    s_read_chunk_ptr,
    t_read_chunk_ptr,
    chunk_ptr,
    s_row_ptr,
    t_row_ptr,
    s_token_ptr,
    t_token_ptr,
    s_before_ptr,
    t_before_ptr,
    s_size_ptr,
    t_size_ptr,
    at_cut_ptr,
    event_of_row_ptr,
    event_of_teacher_row_ptr,
    chunks,
    BLOCK: tl.constexpr,
):
    """Store the start of every chunk that both sides have; padding has the first rows."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = chunk < chunks
    s_first = tl.load(s_first_ptr + chunk, mask=there, other=-1)
    t_first = tl.load(t_first_ptr + chunk, mask=there, other=-1)
    s_last = tl.load(s_last_ptr + chunk, mask=there, other=-2)
    t_last = tl.load(t_last_ptr + chunk, mask=there, other=-2)
    tl.store(s_size_ptr + chunk, tl.where(s_first >= 0, s_last - s_first + 1, 0), mask=there)
    tl.store(t_size_ptr + chunk, tl.where(t_first >= 0, t_last - t_first + 1, 0), mask=there)
    # Padding points at row 0 of both sides, which exists, so that nothing later needs a mask for addresses.
    valid = (s_first >= 0) & (t_first >= 0)
    s_row, t_row = tl.where(valid, s_first, 0), tl.where(valid, t_first, 0)
    s_chunk = tl.load(s_read_chunk_ptr + s_row, mask=valid, other=-1)
    t_chunk = tl.load(t_read_chunk_ptr + t_row, mask=valid, other=-1)
    # Both sides have cut the text here if the tokens read last end one chunk.
    tl.store(at_cut_ptr + chunk, (valid & (s_chunk >= 0) & (s_chunk == t_chunk)).to(tl.uint8), mask=there)
    tl.store(chunk_ptr + chunk, tl.where(valid, chunk, -1), mask=there)
    tl.store(s_row_ptr + chunk, s_row, mask=there)
    tl.store(t_row_ptr + chunk, t_row, mask=there)
    tl.store(s_token_ptr + chunk, tl.load(s_predicted_ptr + s_row, mask=there, other=0).to(tl.int32), mask=there)
    tl.store(t_token_ptr + chunk, tl.load(t_predicted_ptr + t_row, mask=there, other=0).to(tl.int32), mask=there)
    tl.store(s_before_ptr + chunk, tl.load(s_read_ptr + s_row, mask=there, other=0).to(tl.int32), mask=there)
    tl.store(t_before_ptr + chunk, tl.load(t_read_ptr + t_row, mask=there, other=0).to(tl.int32), mask=there)
    tl.store(event_of_row_ptr + s_row, chunk, mask=valid)
    tl.store(event_of_teacher_row_ptr + t_row, chunk, mask=valid)


@triton.jit
def spelled_so_far(predicted_ptr, piece_ptr, first, rank, start, end, valid):
    """Return whether a chunk's tokens up to a rank are a token's spelling."""
    kept = valid & (start + rank < end)
    for j in range(tl.max(tl.where(valid, rank, -1), axis=0) + 1):
        checked = kept & (j <= rank)
        predicted = tl.load(predicted_ptr + first + j, mask=checked, other=0)
        piece = tl.load(piece_ptr + start + j, mask=checked, other=0)
        kept = kept & ((predicted == piece) | (j > rank))
    return kept


@triton.jit(
    do_not_specialize=["R", "T", "P"],
    do_not_specialize_on_alignment=["chunk_ptr", "predicted_ptr", "holder_predicted_ptr"],
)
def chain_inner_kernel(
    chunk_ptr,
    predicted_ptr,
    holder_predicted_ptr,
    first_ptr,
    last_ptr,
    holder_first_ptr,
    holder_last_ptr,
    spelling_start_ptr,
    piece_ptr,
    spelled_node_ptr,
    bare_space_ptr,
    slot_start_ptr,
    event_chunk_ptr,
    holder_row_ptr,
    fresh_row_ptr,
    node_ptr,
    at_end_ptr,
    R,
    T,
    P,
    END_TERMS: tl.constexpr,
    BARE_SPACE: tl.constexpr,
    LEARNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the node at every position of the side that is fresh there; see `events.find_inner`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < R
    chunk = tl.load(chunk_ptr + row, mask=there, other=-1)
    inside = (chunk >= 0) & (chunk < P)
    group = tl.where(inside, row // T * P + chunk, 0).to(tl.int32)
    # The holder has the chunk as one token: its first position is its last.
    holder_row = tl.load(holder_first_ptr + group, mask=inside, other=-1)
    last = tl.load(holder_last_ptr + group, mask=inside, other=-2)
    valid = (holder_row >= 0) & (holder_row == last)
    first = tl.load(first_ptr + group, mask=valid, other=0)
    rank = tl.where(valid, row - first, 0)
    token = tl.load(holder_predicted_ptr + holder_row, mask=valid, other=0)
    start = tl.load(spelling_start_ptr + token, mask=valid, other=0)
    end = tl.load(spelling_start_ptr + token + 1, mask=valid, other=0)
    # The other side's tokens must be the token's spelling; context can move a cut, and then there is no node.
    kept = spelled_so_far(predicted_ptr, piece_ptr, first, rank, start, end, valid)
    node = tl.load(spelled_node_ptr + start + rank, mask=kept, other=-1)
    kept = kept & (node >= 0)
    at_end = row == tl.load(last_ptr + group, mask=valid, other=-1)
    if not END_TERMS:
        kept = kept & (row != tl.load(last_ptr + group, mask=valid, other=-1))
    if not BARE_SPACE:
        kept = kept & (tl.load(bare_space_ptr + node, mask=kept, other=1) == 0)
    if LEARNS:
        slots = tl.load(slot_start_ptr + node + 1, mask=kept, other=0) - tl.load(
            slot_start_ptr + node, mask=kept, other=0
        )
        kept = kept & (slots > 1)
    tl.store(event_chunk_ptr + row, tl.where(kept, group, -1), mask=there)
    tl.store(holder_row_ptr + row, tl.where(kept, holder_row, 0), mask=there)
    tl.store(fresh_row_ptr + row, tl.where(kept, row + 1, 0), mask=there)  # that has read the token
    tl.store(node_ptr + row, tl.where(kept, node, 0), mask=there)
    tl.store(at_end_ptr + row, at_end.to(tl.uint8), mask=there)
