"""Specials pair by role at the same byte, or are left out; they never shift what follows."""

import pytest
import torch

from tests.support import vocabularies as v
from tests.support.alignments import check_batch, chunks_of, padded
from xtoken_core.alignment import TokenAligner

TEXT = "the quick brown 日本 👩‍🚀"


@pytest.fixture(scope="module")
def pair():
    student, teacher = v.byte_level(400), v.sentencepiece_bpe("never")
    return student, teacher, TokenAligner(student, teacher)


def plain(tokenizer, text=TEXT):
    return tokenizer.encode(text, add_special_tokens=False)


def align(aligner, s_rows, t_rows, *, left=False, pads=(0, 0)):
    s, s_mask = padded(s_rows, left=left, pad=pads[0])
    t, t_mask = padded(t_rows, left=left, pad=pads[1])
    batch = aligner.align(s, t, student_attention_mask=s_mask, teacher_attention_mask=t_mask)
    check_batch(batch, s_mask, t_mask)
    assert torch.equal(batch.pair_is_correct, batch.pair_valid)
    return batch


def test_specials_on_one_side_shift_nothing(pair):
    student, teacher, aligner = pair
    s, t = plain(student), plain(teacher)
    bos, eos = teacher.bos_token_id, teacher.eos_token_id
    bare = align(aligner, [s], [t])
    for row in ([bos, *t], [*t, eos], [bos, *t, eos]):
        batch = align(aligner, [s], [row])
        assert torch.equal(batch.student_chunk_id, bare.student_chunk_id)
        assert batch.num_chunks.tolist() == bare.num_chunks.tolist()
        unpaired = [c for i, c in zip(row, batch.teacher_chunk_id[0].tolist(), strict=True) if i in (bos, eos)]
        assert set(unpaired) == {-1}


def test_bos_and_eos_pair_with_their_role(pair):
    student, teacher, aligner = pair
    end = student.eos_token_id  # bos and eos in one
    s, t = [end, *plain(student), end], [teacher.bos_token_id, *plain(teacher), teacher.eos_token_id]
    batch = align(aligner, [s], [t])
    found = chunks_of(batch, 0)
    assert found[0] == ([0], [0])
    assert found[-1] == ([len(s) - 1], [len(t) - 1])
    exact = batch.student_exact_partition_mask[0]
    assert bool(exact[0]) and bool(exact[-1])


def test_a_token_that_is_bos_and_eos_is_told_by_its_place(pair):
    student, teacher, aligner = pair
    end = student.eos_token_id
    batch = align(aligner, [[*plain(student), end]], [[*plain(teacher), teacher.bos_token_id]])
    assert int(batch.student_chunk_id[0, -1]) == -1
    batch = align(aligner, [[end]], [[teacher.eos_token_id]])
    assert batch.num_chunks.tolist() == [1]


def test_padding_is_in_no_chunk_even_where_it_is_eos(pair):
    student, teacher, aligner = pair
    rows_s = [[*plain(student, x), student.eos_token_id] for x in (TEXT, "a", "")]
    rows_t = [[*plain(teacher, x), teacher.eos_token_id] for x in (TEXT, "a", "")]
    alone = [align(aligner, [s], [t]).num_chunks.tolist()[0] for s, t in zip(rows_s, rows_t, strict=True)]
    assert alone[1:] == [2, 1]
    for left in (False, True):
        same = align(aligner, rows_s, rows_t, left=left, pads=(student.eos_token_id, teacher.eos_token_id))
        other = align(aligner, rows_s, rows_t, left=left, pads=(3, 5))
        assert same.num_chunks.tolist() == other.num_chunks.tolist() == alone
        assert torch.equal(same.student_chunk_id, other.student_chunk_id)


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("keep", [1, 3, 5])
def test_a_truncated_side_ends_at_the_last_common_cut(pair, side, keep):
    student, teacher, aligner = pair
    s, t = plain(student), plain(teacher)
    whole = align(aligner, [s], [t])
    s_cut, t_cut = (s[:keep], t) if side == "student" else (s, t[:keep])
    batch = align(aligner, [s_cut], [t_cut])
    kept = int(batch.num_chunks)
    assert chunks_of(batch, 0) == chunks_of(whole, 0)[:kept]
    ends = whole.student_chunk_id[0, :keep] if side == "student" else whole.teacher_chunk_id[0, :keep]
    assert kept == len({int(c) for c in ends}) - (0 if _closed(whole, side, keep) else 1)


def _closed(whole, side, keep):
    chunk = (whole.student_chunk_id if side == "student" else whole.teacher_chunk_id)[0]
    return keep == len(chunk) or int(chunk[keep]) != int(chunk[keep - 1])


def test_an_eos_behind_a_cut_does_not_pair(pair):
    student, teacher, aligner = pair
    s, t = [*plain(student)[:4], student.eos_token_id], [*plain(teacher), teacher.eos_token_id]
    assert int(align(aligner, [s], [t]).student_chunk_id[0, -1]) == -1


@pytest.mark.parametrize("width", [0, 3], ids=["no columns", "only padding"])
def test_empty_samples(pair, width):
    _, _, aligner = pair
    ids, mask = torch.zeros((2, width), dtype=torch.int64), torch.zeros((2, width), dtype=torch.int64)
    batch = aligner.align(ids, ids, student_attention_mask=mask, teacher_attention_mask=mask)
    assert batch.num_chunks.tolist() == [0, 0]
    assert batch.student_chunk_id.shape == (2, width)
    assert not bool(batch.pair_valid.any())


def test_specials_in_another_order_pair_as_far_as_the_order_allows():
    student = v.byte_level(400)
    aligner = TokenAligner(student, v.byte_level(500))
    start, end = student.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    their_start, their_end = v.byte_level(500).convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    batch = align(aligner, [[start, end]], [[their_end, their_start]])
    assert batch.num_chunks.tolist() == [1]


def test_a_special_that_one_side_reads_and_the_other_spells():
    student, teacher = v.byte_level(400), v.sentencepiece_bpe("never")
    aligner = TokenAligner(student, teacher)
    text = "before<|im_end|>after words"
    batch = align(aligner, [plain(student, text)], [plain(teacher, text)])
    assert int((batch.student_chunk_id < 0).sum()) == 0
    assert int((batch.teacher_chunk_id < 0).sum()) == 0


@pytest.mark.parametrize("text", ["<|endoftext|>x", "low <|endoftext|> lower"])
def test_a_special_in_the_text_is_not_the_one_before_the_text(text):
    """One tokenizer sets before every text a special whose name the text holds too; the other spells the name."""
    student, teacher = v.byte_level(bos=True), v.unigram()
    s, t = student.encode(text), teacher.encode(text)
    aligner = TokenAligner(student, teacher)
    (ids, mask), (other, other_mask) = padded([s]), padded([t])
    batch = aligner.align(ids, other, student_attention_mask=mask, teacher_attention_mask=other_mask, texts=[text])
    found = batch.student_chunk_id[0].tolist()
    assert found[0] == -1 and min(found[1:]) >= 0
    for ours, theirs in chunks_of(batch, 0):
        spelled = student.decode([s[n] for n in ours]), teacher.decode([t[n] for n in theirs])
        assert spelled[0].strip() == spelled[1].strip()


def test_an_added_token_that_is_no_special_spells_itself():
    student, teacher = v.byte_level(400), v.sentencepiece_bpe("never")
    text = "so <think> it over"
    aligner = TokenAligner(student, teacher)
    batch = align(aligner, [plain(student, text)], [plain(teacher, text)])
    think = plain(student, text).index(student.convert_tokens_to_ids("<think>"))
    chunk = int(batch.student_chunk_id[0, think])
    theirs = [i for i, c in zip(plain(teacher, text), batch.teacher_chunk_id[0].tolist(), strict=True) if c == chunk]
    assert teacher.decode(theirs).strip() == "<think>"
