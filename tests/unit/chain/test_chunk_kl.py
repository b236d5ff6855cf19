"""The chain rule, exactly: on a source whose cuts are decided by the tokens so far, the terms add up to a chunk's KL.

The source writes numerals of one to three digits, each with a semicolon. The student has a token for every numeral, the
teacher one for every digit, so that a numeral is one chunk of one student token.
"""

import itertools

import pytest
import torch

from tests.support.chain_divergence import chain_divergence
from tests.unit.chain.test_divergence import batch_of
from tests.unit.chain.tiny_tokenizers import TinyTokenizer
from xtoken_core.chain.build import as_tensors, build_tables

DIGITS = "12"
NUMERALS = ["".join(digits) for n in (1, 2, 3) for digits in itertools.product(DIGITS, repeat=n)]
PAIRS = [(a.encode(), b.encode()) for a, b in itertools.product(DIGITS, repeat=2)]


def three_digits():
    """The merges that make every numeral of three digits, whichever of its pairs is merged first."""
    for numeral in (numeral.encode() for numeral in NUMERALS if len(numeral) == 3):
        first = PAIRS.index((numeral[:1], numeral[1:2])) <= PAIRS.index((numeral[1:2], numeral[2:]))
        yield (numeral[:2], numeral[2:]) if first else (numeral[:1], numeral[1:])


WHOLE = TinyTokenizer(b"12;", [*PAIRS, *three_digits()], "words")
SPLIT = TinyTokenizer(b"12;", [], "digits")


def ids_of(tokenizer, text):
    return tokenizer.encode(text.encode())


@pytest.fixture(scope="module")
def source():
    """Probabilities of the numerals, and the teacher's exact logits of `;NUMERAL;` for each of them."""
    generator = torch.Generator().manual_seed(5)
    mass = torch.softmax(torch.randn(len(NUMERALS), generator=generator, dtype=torch.float64), 0)
    probability = dict(zip(NUMERALS, mass.tolist(), strict=True))
    documents = [f";{numeral};" for numeral in NUMERALS]
    batch = batch_of(WHOLE, SPLIT, documents)
    teacher = torch.full((*batch.teacher_ids.shape, len(SPLIT.vocab)), -torch.inf, dtype=torch.float64)
    for row, numeral in enumerate(NUMERALS):
        for position in range(1, len(numeral) + 2):  # from the first semicolon to the last digit
            written = numeral[: position - 1]
            for character in [*DIGITS, ";"]:
                begun = sum(p for n, p in probability.items() if f"{n};".startswith(written + character))
                if begun:
                    token = ids_of(SPLIT, character)[0]
                    teacher[row, position, token] = torch.log(torch.tensor(begun, dtype=torch.float64))
        teacher[row, 0] = teacher[row, len(numeral) + 2 :] = 0.0
    tables = as_tensors(build_tables(WHOLE.fast, SPLIT.fast))
    return batch, teacher, tables, probability


def expected_value(source, student_row):
    """The mean value of a numeral's chunk, at the source's weights; the student has one row after a semicolon."""
    batch, teacher, tables, probability = source
    logits = student_row.expand(*batch.student_ids.shape, len(WHOLE.vocab))
    values = chain_divergence(logits, teacher, batch, tables)
    weights = torch.tensor(list(probability.values()), dtype=torch.float64)
    return (weights * values[:, 2]).sum()  # end of text, semicolon, numeral, semicolon


def chunk_kl(probability, student_row):
    log_q = student_row.log_softmax(0)
    tokens = [ids_of(WHOLE, numeral) for numeral in probability]
    assert all(len(ids) == 1 for ids in tokens)
    p = torch.tensor(list(probability.values()), dtype=torch.float64)
    return (p * (p.log() - log_q[[ids[0] for ids in tokens]])).sum()


@pytest.mark.parametrize("seed", range(5))
def test_sum_of_terms_equals_the_kl_of_the_chunk(source, seed):
    row = torch.randn(len(WHOLE.vocab), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(expected_value(source, row), chunk_kl(source[3], row), rtol=1e-6, atol=0)


def test_gradient_vanishes_at_the_truth(source):
    probability = source[3]

    def norm(row):
        row = row.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(expected_value(source, row), row)
        return gradient.norm()

    truth = torch.full((len(WHOLE.vocab),), -torch.inf, dtype=torch.float64)
    for numeral, p in probability.items():
        truth[ids_of(WHOLE, numeral)[0]] = torch.log(torch.tensor(p, dtype=torch.float64))
    assert norm(truth) < 1e-6 * norm(torch.zeros_like(truth))
