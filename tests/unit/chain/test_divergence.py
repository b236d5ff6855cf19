"""The divergence beside loops over single chunks, on random tokenizers and texts."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.support.chain_divergence import ChainBatch, chain_divergence
from tests.support.examples import examples
from tests.unit.chain.chain_loops import Options, Pair, sample_divergence
from tests.unit.chain.tiny_tokenizers import BY_THREE, PATTERNS, UNGROUPED, TinyTokenizer, TinyUnigram, split_words
from xtoken_core.alignment import TokenAligner
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.listed import TopKTeacher
from xtoken_core.ops.chain.reference import ChainOptions

CHARACTERS = "ab1 éあ"
NUMERALS = "11112222's. \n"  # mostly digits
ALPHABET = (CHARACTERS + NUMERALS).encode()


def text_of(characters, least, most):
    return st.lists(st.sampled_from(characters), min_size=least, max_size=most).map("".join)


@st.composite
def tokenizers(draw, own, characters=CHARACTERS, merges_at_least=0):
    """A BPE whose merges join neighbours inside the words of a random text, as training does.

    `own` is a character that the other tokenizer and the texts lack: its tokens have no spelling and no root. Some
    tokenizers are without it.
    """
    own = draw(st.sampled_from(["", own]))
    pattern = draw(st.sampled_from(sorted(PATTERNS)))
    corpus = draw(text_of(characters + own, 4 + merges_at_least, 40 + merges_at_least))
    words = [[word[i : i + 1] for i in range(len(word))] for word in split_words(corpus, pattern)]
    merges = []
    for which in draw(st.lists(st.integers(0, 1000), min_size=merges_at_least, max_size=12 + merges_at_least)):
        long = [word for word in words if len(word) > 1]
        if long:
            parts = long[which % len(long)]
            at = which // 7 % (len(parts) - 1)
            merges.append((parts[at], parts[at + 1]))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return TinyTokenizer(ALPHABET + own.encode(), merges, pattern)


options = st.builds(ChainOptions, st.booleans(), st.booleans(), st.booleans())


def batch_of(student, teacher, documents):
    """End of text first, so that the first token is predicted; padded on the right with the same."""
    tokens = []
    for side in (student, teacher):
        rows = [[side.end, *side.encode(text.encode())] for text in documents]
        width = max(map(len, rows)) + 1
        tokens.append([row + [side.end] * (width - len(row)) for row in rows])
    ids = [torch.tensor(rows) for rows in tokens]
    lengths = [[1 + len(side.encode(text.encode())) for text in documents] for side in (student, teacher)]
    masks = [torch.arange(x.shape[1]) < torch.tensor(n).unsqueeze(1) for x, n in zip(ids, lengths, strict=True)]
    aligned = TokenAligner(student.fast, teacher.fast).align(
        *ids, student_attention_mask=masks[0], teacher_attention_mask=masks[1]
    )
    usable = aligned.pair_valid & aligned.pair_is_correct
    return ChainBatch(*ids, aligned.student_chunk_id, aligned.teacher_chunk_id, usable)


def random_logits(seed, batch, student, teacher, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(*batch.student_ids.shape, len(student.vocab)), (*batch.teacher_ids.shape, len(teacher.vocab))]
    student_logits, teacher_logits = (
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return student_logits.requires_grad_(), teacher_logits


def by_loops(student, teacher, batch, logits, chosen, tails=None, generated=None):
    pair = Pair(student, teacher)
    flags = Options(chosen.conditioning, chosen.end_terms, chosen.bare_space)
    own = flags
    if generated is not None:
        own = replace(flags, form=1 if generated.beta is None else generated.beta)
    rows = [
        sample_divergence(
            pair,
            [logits[0][b], logits[1][b]],
            [batch.student_ids[b].tolist(), batch.teacher_ids[b].tolist()],
            [batch.student_chunk_id[b].tolist(), batch.teacher_chunk_id[b].tolist()],
            batch.usable[b].tolist(),
            own if generated is not None and generated.at[b, 0] else flags,
            None if tails is None else tails[b],
        )
        for b in range(len(batch.usable))
    ]
    return torch.stack(rows)


def largest(logits, k):
    """The k largest log-probabilities, the same as rows with -inf elsewhere, and the mass that is missing."""
    log_probs, ids = logits.log_softmax(-1).topk(k)
    rows = torch.full_like(logits, -torch.inf).scatter(-1, ids, log_probs)
    return TopKTeacher(ids, log_probs, logits.shape[-1], spread=False), rows, 1 - log_probs.exp().sum(-1)


def compare(student, teacher, documents, chosen, seed, k=None, beta=None, own=False):
    batch = batch_of(student, teacher, documents)
    generated = None
    if own:  # every other row
        rows = (torch.arange(len(batch.usable)) + seed) % 2 == 0
        generated = Generated(rows.unsqueeze(1).expand(batch.student_ids.shape), beta)
    logits = random_logits(seed, batch, student, teacher)
    tables = as_tensors(build_tables(student.fast, teacher.fast))
    given, rows, tails = (logits[1], logits[1], None) if k is None else largest(logits[1], k)
    ours = chain_divergence(logits[0], given, batch, tables, chosen, generated=generated, block_bytes=1 << 14)
    theirs = by_loops(student, teacher, batch, (logits[0], rows), chosen, tails, generated)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    weights = torch.rand(ours.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradients = [torch.autograd.grad((weights * values).sum(), logits[0])[0] for values in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


QUICK = settings(
    deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate, Phase.shrink]
)


def drawn(characters=CHARACTERS, merges_at_least=0):
    sides = [tokenizers(own, characters, merges_at_least) for own in "xy"]
    return *sides, st.lists(text_of(characters, 1, 12), min_size=1, max_size=3), options, st.integers(0, 2**31)


GIVEN = drawn()
CASES = given(*GIVEN)
NUMERAL_CASES = given(*drawn(NUMERALS, 16))


long = pytest.mark.timeout(3600)  # with every example

BROKEN = TinyTokenizer(ALPHABET, [(b"a", b"\xc3"), (b"a\xc3", b"\xa9"), (b"a\xc3\xa9", b"\xc3")], "digits")
CROSSED = TinyTokenizer(ALPHABET, [(b"\xa9", b"\xc3"), (b"\xc3", b"\xa9"), (b"a", b"\xc3\xa9")], "digits")


# CROSSED merges the bytes of "é" with the next letter's first: it writes the token "aé\xc3" with more tokens than "aé".
@long
@examples(10, 2000, QUICK)
@example(BROKEN, CROSSED, ["1"], ChainOptions(False, False, False), 0)
@example(CROSSED, BROKEN, ["1", "aéé"], ChainOptions(), 0)
@CASES
def test_equals_loops(student, teacher, documents, chosen, seed):
    compare(student, teacher, documents, chosen, seed)


@long
@examples(10, 2000, QUICK)
@example(UNGROUPED, BY_THREE, ["12.", "12 12", "..s", "'."], ChainOptions(), 0)
@example(BY_THREE, UNGROUPED, ["12.", "12 12", "..s", "'."], ChainOptions(), 4)
@example(BY_THREE, UNGROUPED, ["12.12 1", "1"], ChainOptions(), len(UNGROUPED.vocab) - 1)  # all are listed
@NUMERAL_CASES
def test_digit_groups_equal_loops(student, teacher, documents, chosen, seed):
    compare(student, teacher, documents, chosen, seed)
    compare(student, teacher, documents, chosen, seed, k=1 + seed % len(teacher.vocab))


# The Unigram may cut "111" before or after "11" with the same sum of scores.
@long
@examples(8, 2000, QUICK)
@example(
    TinyTokenizer(ALPHABET, [(b"1", b"1"), (b"11", b"1")], "none"),
    TinyTokenizer(ALPHABET, [(b"1", b"1")], "none"),
    ["1"],
    ChainOptions(False, False, False),
    0,
)
@CASES
def test_unigram_equals_loops(student, teacher, documents, chosen, seed):
    compare_unigrams(student, teacher, documents, chosen, seed)


def compare_unigrams(student, teacher, documents, chosen, seed):
    sides = [
        TinyUnigram(ALPHABET + b"xy", side.merges, side.pattern, seed + k) for k, side in enumerate((student, teacher))
    ]
    compare(*((student, sides[1]), (sides[0], teacher), sides)[seed % 3], documents, chosen, seed)


BETAS = st.sampled_from([None, 0.1, 0.5, 0.9])


def listed(teacher: TinyTokenizer, seed: int, beta: float | None) -> int:
    """Return how many of a teacher's logits are sent; not all of them for the reverse KL.

    With all of them the rest has what rounding leaves of its mass, and the reverse KL has its logarithm.
    """
    return 1 + seed % (len(teacher.vocab) - (beta is None))


@long
@examples(10, 2000, QUICK)
@example(CROSSED, BROKEN, ["1", "aéé"], ChainOptions(), 0, None)
@given(*GIVEN, BETAS)
def test_generated_rows_equal_loops(student, teacher, documents, chosen, seed, beta):
    compare(student, teacher, documents, chosen, seed, beta=beta, own=True)
    compare(student, teacher, documents, chosen, seed, k=listed(teacher, seed, beta), beta=beta, own=True)


@settings(QUICK, max_examples=15)
@CASES
def test_largest_probabilities_of_the_teacher_equal_loops(student, teacher, documents, chosen, seed):
    compare(student, teacher, documents, chosen, seed, k=1 + seed % len(teacher.vocab))
