"""Chunk KL of small chunks, and what the chain divergence does at the edges."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.support.chain_divergence import ChainBatch, chain_divergence
from tests.support.device import without_waiting
from tests.unit.chain.test_divergence import batch_of, random_logits
from tests.unit.chain.tiny_tokenizers import TinyTokenizer
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.ops.chain import events, ragged
from xtoken_core.ops.chain.reference import ChainOptions

ALPHABET = "ab12 é.".encode()
WHOLE = TinyTokenizer(ALPHABET, [(b"1", b"1"), (b"11", b"1"), (b"a", b"b"), (b" ", b"ab"), (b"\xc3", b"\xa9")], "words")
SPLIT = TinyTokenizer(ALPHABET, [(b"a", b"a"), (b"\xa9", b"a"), (b"b", b"a")], "digits")
DOCUMENTS = ["ab 111 ab", "1 éab é", "12. a"]


@pytest.fixture(scope="module")
def tables():
    return as_tensors(build_tables(WHOLE.fast, SPLIT.fast))


@pytest.fixture
def case():
    batch = batch_of(WHOLE, SPLIT, DOCUMENTS)
    return batch, *random_logits(3, batch, WHOLE, SPLIT)


def gradient(values, logits):
    return torch.autograd.grad(values.sum(), logits)[0]


def test_same_tokenizer_equals_kl_per_token():
    batch = batch_of(WHOLE, WHOLE, DOCUMENTS)
    student, teacher = random_logits(0, batch, WHOLE, WHOLE)
    values = chain_divergence(student, teacher, batch, as_tensors(build_tables(WHOLE.fast, WHOLE.fast)))
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    expected = (p.exp() * (p - q)).sum(-1)[:, :-1]
    mask = (batch.student_chunk_id >= 0)[:, 1:]
    torch.testing.assert_close(values.sum(), expected[mask].sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("block_bytes", [1, 4096, 1 << 30])
def test_blocks_change_nothing(case, tables, block_bytes):
    batch, student, teacher = case
    whole = chain_divergence(student, teacher, batch, tables)
    blocks = chain_divergence(student, teacher, batch, tables, block_bytes=block_bytes)
    torch.testing.assert_close(blocks, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(blocks, student), gradient(whole, student), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_in_float32(case, tables, dtype):
    batch, student, teacher = case
    rounded = student.detach().to(dtype).requires_grad_(), teacher.to(dtype)
    values = chain_divergence(*rounded, batch, tables)
    exact = chain_divergence(rounded[0].detach().double(), rounded[1].double(), batch, tables)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-5)
    assert gradient(values, rounded[0]).dtype == dtype


def test_not_usable_and_unpredicted_chunks_give_zero(case, tables):
    batch, student, teacher = case
    none = replace(batch, usable=torch.zeros_like(batch.usable))
    assert not chain_divergence(student, teacher, none, tables).any()
    values = chain_divergence(student, teacher, batch, tables)
    assert not values[:, 0].any()  # the end of text that begins each sample: nothing predicts it
    assert (values[:, 1] > 0).all()


def test_empty_batches(tables):
    empty = torch.zeros(2, 1, dtype=torch.int64)
    batch = ChainBatch(empty, empty, empty, empty, torch.ones(2, 1, dtype=torch.bool))
    student = torch.zeros(2, 1, len(WHOLE.vocab), requires_grad=True)
    values = chain_divergence(student, torch.zeros(2, 1, len(SPLIT.vocab)), batch, tables)
    assert not values.any()
    assert not gradient(values, student).any()


def test_temperature_divides_both_sides(case, tables):
    batch, student, teacher = case
    warm = chain_divergence(student, teacher, batch, tables, temperature=2.0)
    torch.testing.assert_close(warm, chain_divergence(student / 2, teacher / 2, batch, tables), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [ChainOptions(), ChainOptions(False, True, True)])
def test_padded_sizes_give_the_same(monkeypatch, case, tables, options):
    batch, student, teacher = case
    values = chain_divergence(student, teacher, batch, tables, options)
    for module in (ragged, events):
        monkeypatch.setattr(module, "sizes_are_readable", lambda x: False)
    padded = chain_divergence(student, teacher, batch, tables, options, block_bytes=1 << 14)
    torch.testing.assert_close(padded, values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(padded, student), gradient(values, student), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_gpu_gives_the_same_without_waiting(case, tables):
    batch, student, teacher = case
    values = chain_divergence(student, teacher, batch, tables)
    expected = gradient(values, student)
    device = torch.device("cuda")
    there = [x.detach().to(device) for x in (student, teacher)]
    batch = ChainBatch(*(getattr(batch, name).to(device) for name in batch.__dataclass_fields__))
    tables = tables.to(device)
    tables.read_sizes()
    there[0].requires_grad_()
    with without_waiting():
        found = chain_divergence(*there, batch, tables)
        own = gradient(found, there[0])
    torch.testing.assert_close(found.cpu(), values, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own.cpu(), expected, rtol=1e-9, atol=1e-9)


def test_padding_changes_nothing(case, tables):
    batch, student, teacher = case
    values = chain_divergence(student, teacher, batch, tables)

    def wider(x, columns, fill):
        return torch.cat([x, torch.full((len(x), columns, *x.shape[2:]), fill, dtype=x.dtype)], dim=1)

    padded = ChainBatch(
        wider(batch.student_ids, 3, 0),
        wider(batch.teacher_ids, 2, 0),
        wider(batch.student_chunk_id, 3, -1),
        wider(batch.teacher_chunk_id, 2, -1),
        wider(batch.usable, 4, False),
    )
    again = chain_divergence(wider(student, 3, torch.nan), wider(teacher, 2, torch.nan), padded, tables)
    torch.testing.assert_close(again[:, : values.shape[1]], values, rtol=1e-12, atol=1e-12)
    assert not again[:, values.shape[1] :].any()


def test_finite_without_probability(case, tables):
    batch, student, teacher = case
    student = student.detach().clone()
    student[..., ::2], teacher[..., 1::2] = -torch.inf, -torch.inf
    student.requires_grad_()
    values = chain_divergence(student, teacher, batch, tables)
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient(values, student)).all()


DIGITS = "12"
NUMERALS = ["".join(digits) for n in (1, 2, 3) for digits in itertools.product(DIGITS, repeat=n)]
PAIRS = [(a.encode(), b.encode()) for a, b in itertools.product(DIGITS, repeat=2)]


def three_digits():
    """The merges that make every numeral of three digits, whichever of its pairs is merged first."""
    for numeral in (numeral.encode() for numeral in NUMERALS if len(numeral) == 3):
        first = PAIRS.index((numeral[:1], numeral[1:2])) <= PAIRS.index((numeral[1:2], numeral[2:]))
        yield (numeral[:2], numeral[2:]) if first else (numeral[:1], numeral[1:])


WHOLE_OF_CHUNK_KL = TinyTokenizer(b"12;", [*PAIRS, *three_digits()], "words")
SPLIT_OF_CHUNK_KL = TinyTokenizer(b"12;", [], "digits")


def ids_of(tokenizer, text):
    return tokenizer.encode(text.encode())


@pytest.fixture(scope="module")
def source():
    """Probabilities of the numerals, and the teacher's exact logits of `;NUMERAL;` for each of them."""
    generator = torch.Generator().manual_seed(5)
    mass = torch.softmax(torch.randn(len(NUMERALS), generator=generator, dtype=torch.float64), 0)
    probability = dict(zip(NUMERALS, mass.tolist(), strict=True))
    documents = [f";{numeral};" for numeral in NUMERALS]
    batch = batch_of(WHOLE_OF_CHUNK_KL, SPLIT_OF_CHUNK_KL, documents)
    teacher = torch.full((*batch.teacher_ids.shape, len(SPLIT_OF_CHUNK_KL.vocab)), -torch.inf, dtype=torch.float64)
    for row, numeral in enumerate(NUMERALS):
        for position in range(1, len(numeral) + 2):  # from the first semicolon to the last digit
            written = numeral[: position - 1]
            for character in [*DIGITS, ";"]:
                begun = sum(p for n, p in probability.items() if f"{n};".startswith(written + character))
                if begun:
                    token = ids_of(SPLIT_OF_CHUNK_KL, character)[0]
                    teacher[row, position, token] = torch.log(torch.tensor(begun, dtype=torch.float64))
        teacher[row, 0] = teacher[row, len(numeral) + 2 :] = 0.0
    tables = as_tensors(build_tables(WHOLE_OF_CHUNK_KL.fast, SPLIT_OF_CHUNK_KL.fast))
    return batch, teacher, tables, probability


def expected_value(source, student_row):
    """The mean value of a numeral's chunk, at the source's weights; the student has one row after a semicolon."""
    batch, teacher, tables, probability = source
    logits = student_row.expand(*batch.student_ids.shape, len(WHOLE_OF_CHUNK_KL.vocab))
    values = chain_divergence(logits, teacher, batch, tables)
    weights = torch.tensor(list(probability.values()), dtype=torch.float64)
    return (weights * values[:, 2]).sum()  # end of text, semicolon, numeral, semicolon


def chunk_kl(probability, student_row):
    log_q = student_row.log_softmax(0)
    tokens = [ids_of(WHOLE_OF_CHUNK_KL, numeral) for numeral in probability]
    assert all(len(ids) == 1 for ids in tokens)
    p = torch.tensor(list(probability.values()), dtype=torch.float64)
    return (p * (p.log() - log_q[[ids[0] for ids in tokens]])).sum()


@pytest.mark.parametrize("seed", range(5))
def test_sum_of_terms_equals_the_kl_of_the_chunk(source, seed):
    row = torch.randn(len(WHOLE_OF_CHUNK_KL.vocab), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(expected_value(source, row), chunk_kl(source[3], row), rtol=1e-6, atol=0)


def test_gradient_vanishes_at_the_truth(source):
    probability = source[3]

    def norm(row):
        row = row.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(expected_value(source, row), row)
        return gradient.norm()

    truth = torch.full((len(WHOLE_OF_CHUNK_KL.vocab),), -torch.inf, dtype=torch.float64)
    for numeral, p in probability.items():
        truth[ids_of(WHOLE_OF_CHUNK_KL, numeral)[0]] = torch.log(torch.tensor(p, dtype=torch.float64))
    assert norm(truth) < 1e-6 * norm(torch.zeros_like(truth))
