"""The references in experiments/losses against loops over one chunk, and against values computed by hand."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from experiments.losses.bpm import BPMLoss
from experiments.losses.escd import ESCDLoss
from experiments.losses.gold_bayesian import GoldBayesianLoss
from experiments.losses.simct import SimCTLoss
from experiments.losses.strict_top import TOP, StrictTopLoss
from experiments.losses.x_token_v6 import XTokenV6Loss
from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.unit.chain.tiny_tokenizers import TinyTokenizer
from tests.unit.losses.loss_cases import V_S, make_case
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, HeadProjection
from xtoken_core.losses.common import LossInput, LossTeacher, Pairing
from xtoken_core.losses.registry import LOSSES

STUDENT = TinyTokenizer(b"01ab", [(b"0", b"1"), (b"a", b"b"), (b"ab", b"01"), (b"01", b"0")], "none")
TEACHER = TinyTokenizer(b"01ab", [(b"a", b"b"), (b"b", b"0"), (b"1", b"a"), (b"ab", b"0"), (b"1", b"0")], "none")
CHUNKS = {
    "1:1": ([b"ab"], [b"ab"]),
    "1:n": ([b"ab01"], [b"ab0", b"1"]),
    "n:1": ([b"ab", b"0"], [b"ab0"]),
    "m:n": ([b"01", b"a"], [b"0", b"1a"]),
    "unit": ([b"010"], [b"0", b"10"]),
}
CONFIG = LossConfig(mode="custom", alm_temperature=1.0)
SHARED = sorted(set(STUDENT.vocab) & set(TEACHER.vocab) - {b""})


def make(cls):
    teacher = LossTeacher(len(TEACHER.vocab), tokenizers=lambda: (STUDENT.fast, TEACHER.fast))
    return cls(CONFIG, teacher, index=0, student_vocab_size=len(STUDENT.vocab), device=torch.device("cpu"))


def random_rows(seed):
    """Logits of a position before the chunks, of every chunk's and of one after them, on both sides."""
    generator = torch.Generator().manual_seed(seed)
    counts = [sum(len(chunk[k]) for chunk in CHUNKS.values()) + 2 for k in (0, 1)]
    return [
        2 * torch.randn(1, count, width, generator=generator, dtype=torch.float64)
        for count, width in zip(counts, (len(STUDENT.vocab) + 2, len(TEACHER.vocab) + 1), strict=True)
    ]


def pairing():
    sides = []
    for k, tokenizer in enumerate((STUDENT, TEACHER)):
        targets, ids = [0], [-1]
        for n, chunk in enumerate(CHUNKS.values()):
            targets += [tokenizer.ids[piece] for piece in chunk[k]]
            ids += [n] * len(chunk[k])
        sides.append((torch.tensor([[*targets, 0]]), torch.tensor([[*ids, -1]])))
    return Pairing(sides[0][0], sides[1][0], sides[0][1], sides[1][1], len(CHUNKS) + 1)


def probabilities(logits, width):
    return torch.softmax(logits[0, :, :width], dim=1).tolist()


def chunks_of(logits):
    """Each chunk's pieces and rows: those of its positions and the one after, per side."""
    tables = probabilities(logits[0], len(STUDENT.vocab)), probabilities(logits[1], len(TEACHER.vocab))
    at = [1, 1]
    for chunk in CHUNKS.values():
        rows = [tables[k][at[k] : at[k] + len(chunk[k]) + 1] for k in (0, 1)]
        at = [at[k] + len(chunk[k]) for k in (0, 1)]
        yield chunk, rows


def kl(p, q):
    return sum(p[c] * math.log(p[c] / q[c]) for c in p if p[c] > 0)


def likelihood(pieces, rows, tokenizer):
    return math.prod(row[tokenizer.ids[piece]] for piece, row in zip(pieces, rows, strict=False))


def longest_prefix(text):
    return max((piece for piece in STUDENT.vocab if piece and text.startswith(piece)), key=len)


def bpm(chunk, rows, *, rests=False):
    value, at, text = 0.0, 0, b"".join(chunk[0])
    for n, own in enumerate(chunk[0]):
        start, behind = 0, 0
        while behind + 1 < len(chunk[1]) and start + len(chunk[1][behind]) <= at:
            start, behind = start + len(chunk[1][behind]), behind + 1
        emitted, mass, rest = text[start:at], {}, {}
        for token, p in zip(TEACHER.vocab, rows[1][behind], strict=True):
            if token.startswith(emitted) and len(token) > len(emitted):
                best = longest_prefix(token[len(emitted) :])
                mass[best] = mass.get(best, 0.0) + p
                if best == own and len(token) > len(emitted + best):
                    left = token[len(emitted + best) :]
                    rest[left] = rest.get(left, 0.0) + p
        total = sum(mass.values())
        value += kl({t: p / total for t, p in mass.items()}, {t: rows[0][n][STUDENT.ids[t]] for t in mass})
        for left, p in rest.items() if rests else ():
            q = sum(q for token, q in zip(STUDENT.vocab, rows[0][n + 1], strict=True) if token.startswith(left))
            value -= p * math.log(q) if q else 0.0
        at += len(own)
    return value


def escd(chunk, rows):
    return bpm(chunk, rows, rests=True)


def candidates(chunk, rows, k, tokenizer):
    scores = {piece: math.log(rows[k][0][tokenizer.ids[piece]]) for piece in SHARED}
    if len(chunk[0]) + len(chunk[1]) > 2:
        scores["unit"] = math.log(likelihood(chunk[k], rows[k], tokenizer)) / len(chunk[k])
    total = sum(map(math.exp, scores.values()))
    return {piece: math.exp(score) / total for piece, score in scores.items()}


def simct(chunk, rows):
    return kl(candidates(chunk, rows, 0, STUDENT), candidates(chunk, rows, 1, TEACHER))


def gold_bayesian(chunk, rows):
    merged = []
    for k, tokenizer in enumerate((STUDENT, TEACHER)):
        before = likelihood(chunk[k][:-1], rows[k], tokenizer)
        merged.append({piece: before * p for piece, p in zip(tokenizer.vocab, rows[k][len(chunk[k]) - 1], strict=True)})
    common = kl({x: merged[1][x] for x in SHARED}, merged[0])
    rest = [sorted((p for x, p in side.items() if x not in SHARED), reverse=True) for side in merged]
    longest = max(map(len, rest))
    padded = [values + [0.0] * (longest - len(values)) for values in rest]
    return common + sum(abs(a - b) for a, b in zip(*padded, strict=True))


def strict_top(chunk, rows):
    if len(chunk[0]) + len(chunk[1]) > 2:
        return 0.0
    q, p = ({x: rows[k][0][t.ids[x]] for x in SHARED} for k, t in enumerate((STUDENT, TEACHER)))
    top = sorted(SHARED, key=lambda x: -q[x])[:TOP]
    return kl({x: q[x] / sum(q[y] for y in top) for x in top}, {x: p[x] / sum(p[y] for y in top) for x in top})


def x_token_v6(chunk, rows):
    tokenizers, sizes = (STUDENT, TEACHER), (len(chunk[0]), len(chunk[1]))
    if sizes == (1, 1):
        named = [{x: rows[k][0][t.ids[x]] for x in SHARED} for k, t in enumerate(tokenizers)]
    elif 1 in sizes:
        holder = sizes.index(1)
        one, many = tokenizers[holder], tokenizers[1 - holder]
        before = likelihood(chunk[1 - holder][:-1], rows[1 - holder], many)
        named = [{}, {}]
        for token, p in zip(one.vocab, rows[holder][0], strict=True):
            spelling = [many.bytes_of(i) for i in many.encode(token)] if token else []
            if len(spelling) == sizes[1 - holder] and spelling[:-1] == chunk[1 - holder][:-1]:
                named[holder][token] = p
                named[1 - holder][token] = before * rows[1 - holder][sizes[1 - holder] - 1][many.ids[spelling[-1]]]
    else:
        q, p = (likelihood(chunk[k], rows[k], t) for k, t in enumerate(tokenizers))
        return kl({0: p, 1: 1 - p}, {0: q, 1: 1 - q})
    q, p = (side | {"rest": 1 - sum(side.values())} for side in named)
    return kl(p, q)


CASES = {
    BPMLoss: bpm,
    ESCDLoss: escd,
    SimCTLoss: simct,
    GoldBayesianLoss: gold_bayesian,
    StrictTopLoss: strict_top,
    XTokenV6Loss: x_token_v6,
}


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_values_equal_those_of_loops(cls, seed):
    logits = random_rows(seed)
    logits[0].requires_grad_()
    (values,) = make(cls).evaluate(LossInput(pairing(), *logits)).parts
    expected = [CASES[cls](chunk, rows) for chunk, rows in chunks_of([x.detach() for x in logits])]
    torch.testing.assert_close(values[0].detach(), torch.tensor([*expected, 0.0], dtype=torch.float64))
    values.sum().backward()
    assert torch.isfinite(logits[0].grad).all()
    assert not logits[0].grad[0, 0].any(), "a position of no chunk has no gradient"


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_infinite_logits_and_no_chunk(cls):
    logits = random_rows(0)
    logits[0][..., 1], logits[1][..., 2] = -torch.inf, -torch.inf
    logits[0].requires_grad_()
    (values,) = make(cls).evaluate(LossInput(pairing(), *logits)).parts
    values.sum().backward()
    assert torch.isfinite(values).all() and torch.isfinite(logits[0].grad).all()
    none = pairing()
    none.student_chunk_id.fill_(-1)
    assert not make(cls).evaluate(LossInput(none, *logits)).parts[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_groups_of_chunks_give_the_same_values_and_gradients(cls, dtype):
    found = []
    for elements, kept in product((cls.elements, 4 * len(TEACHER.vocab), 1), (cls.kept, 0)):
        loss = make(cls)
        loss.elements, loss.kept = elements, kept
        logits = [x.to(dtype) for x in random_rows(0)]
        logits[0].requires_grad_()
        (values,) = loss.evaluate(LossInput(pairing(), *logits)).parts
        weights = torch.arange(1.0, values.numel() + 1).view(values.shape)
        found.append((values.detach(), torch.autograd.grad((values * weights).sum(), logits[0])[0]))
    for values, gradient in found[1:]:
        assert_within(values, found[0][0], OUTPUT["chunk", torch.float32], "values")
        assert_within(gradient, found[0][1], GRADIENT["chunk", dtype], "gradient")


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_a_head_in_blocks_gives_the_same_loss(cls):
    """Through the public loss, with tokens outside these small vocabularies clamped to their last one."""
    case = make_case(lengths=(9, 7, 9, 5))
    teacher = replace(case.teachers[0], tokenizers=lambda: (STUDENT.fast, TEACHER.fast))
    found = []
    for blocks in (False, True):
        loss_fn = CrossTokenizerDistillationLoss(
            CONFIG, student_vocab_size=V_S, teachers=[teacher], loss_classes={**LOSSES, "custom": cls}
        )
        hidden = case.student_logits.clone().requires_grad_()
        weight = torch.eye(hidden.shape[2], dtype=hidden.dtype)
        given = loss_fn.token_blocks(case.batch, [case.teacher_logits[0].shape[1]], rows=12) if blocks else None
        loss, _ = loss_fn(
            case.batch, HeadProjection(hidden, weight) if blocks else hidden, case.teacher_logits, blocks=given
        )
        loss.backward()
        found.append((loss.detach(), hidden.grad))
    torch.testing.assert_close(found[1], found[0])


def uniform_value(cls, chunk):
    """Value of one chunk where every next token is equally likely on both sides."""
    logits = [torch.zeros_like(x) for x in random_rows(0)]
    return float(make(cls).evaluate(LossInput(pairing(), *logits)).parts[0][0, list(CHUNKS).index(chunk)])


def test_values_by_hand():
    # Student: 0 1 a b 01 ab ab01 010 end. Teacher: 0 1 a b ab b0 1a ab0 10 end. Shared: 0 1 a b ab.
    assert len(STUDENT.vocab) == 9 and len(TEACHER.vocab) == 10 and len(SHARED) == 5
    # BPM: the longest prefixes of the teacher's 9 tokens are 0, 1 (1 1a 10), a, b (b b0), ab (ab ab0); q is 1/9 each.
    start = sum(n / 9 * math.log(n / 9 * 9) for n in (1, 3, 1, 2, 2))
    assert uniform_value(BPMLoss, "1:1") == pytest.approx(start)
    # After "ab" only ab0 continues: all of its mass is on 0.
    assert uniform_value(BPMLoss, "n:1") == pytest.approx(start + math.log(9))
    # ESCD adds the rest "0" of ab0, mass .1; 0, 01 and 010 begin with it.
    assert uniform_value(ESCDLoss, "1:1") == pytest.approx(start - 0.1 * math.log(3 / 9))
    assert uniform_value(StrictTopLoss, "1:1") == pytest.approx(0.0)
    assert uniform_value(SimCTLoss, "1:1") == pytest.approx(0.0)
    # X-Token: five shared tokens and the rest, 1/10 and 5/10 against 1/9 and 4/9.
    shared = 5 * 0.1 * math.log(0.9) + 0.5 * math.log(0.5 * 9 / 4)
    assert uniform_value(XTokenV6Loss, "1:1") == pytest.approx(shared)
    # GOLD: five shared tokens; the rest has 4 tokens of 1/9 and 5 of 1/10.
    rest = 4 * (1 / 9 - 1 / 10) + 1 / 10
    assert uniform_value(GoldBayesianLoss, "1:1") == pytest.approx(5 * 0.1 * math.log(0.9) + rest)
