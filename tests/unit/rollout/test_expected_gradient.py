"""The gradient of chain on completions, averaged over every completion that a small student can sample.

It is the gradient of the expected divergence of the decisions with the student's sampling held fixed. The gradient of
the expectation itself has one more term, by the probabilities of the completions; docs/on_policy.md states its size.
"""

import itertools
import re

import numpy as np
import pytest
import torch

from tests.architecture.conftest import ROOT
from tests.unit.chain.chain_loops import Options, Pair, sample_divergence
from tests.unit.chain.tiny_tokenizers import TinyTokenizer
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.collate_generated import Completion, CompletionCollator
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher
from xtoken_core.losses.masks import loss_counts
from xtoken_services.common.batches.padding import padded_batch

LETTERS, MORE = (TinyTokenizer(alphabet, [], "none") for alphabet in (b"abc", b"0abc"))
STUDENT = TinyTokenizer(b"ab", [(b"a", b"b")], "none")
TEACHER = TinyTokenizer(b"ab", [(b"b", b"a"), (b"a", b"ba")], "none")
PROMPT = "a"
FORMS = {"forward": {"beta": None}, "reverse": {"reverse_kl": True}, "jsd": {"beta": 0.5}}
ONE = torch.ones((), dtype=torch.float64)


def table_of(contexts, tokenizer, seed):
    """Logits behind each context."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(len(contexts), len(tokenizer.vocab), generator=generator, dtype=torch.float64)
    return dict(zip(sorted(contexts), rows, strict=True))


def rows_of(table, ids):
    """Logits of every position of a text, `[1, T, V]`: those behind the tokens up to it; a text's last are not read."""
    nothing = torch.zeros_like(next(iter(table.values())))
    return torch.stack([table.get(tuple(ids[: n + 1]), nothing) for n in range(len(ids))]).unsqueeze(0)


class Enumerated:
    """All completions of a prompt up to a length, collated, with the logits of student and teacher in every context."""

    def __init__(self, student, teacher, longest):
        self.sides = student, teacher
        self.prompt = tuple(student.encode(PROMPT.encode()))
        text = range(student.end)
        self.completions = [
            (*body, *last)
            for length in range(longest + 1)
            for body in itertools.product(text, repeat=length)
            for last in ([()] if length == longest else [(student.end,)])
        ]
        collator = CompletionCollator(
            student_tokenizer=student.fast, teacher_tokenizer=[teacher.fast], aligner=[None], ctx_length_student=16,
            ctx_length_teacher=[16],
        )  # fmt: skip
        self.batches = [self._batch(collator, ids) for ids in self.completions]
        self.ids = [[b[f"{side}input_ids"][0].tolist() for side in ("", "teacher_0_")] for b in self.batches]
        own = {self.prompt + ids[:n] for ids in self.completions for n in range(len(ids))}
        read = {tuple(ids[: n + 1]) for _, ids in self.ids for n in range(len(ids))}
        self.logits, self.of_teacher = table_of(own, student, 1), table_of(read, teacher, 2)
        for row in self.logits.values():
            row.requires_grad_()

    def _batch(self, collator, ids):
        student, teacher = self.sides
        ends, text = ids[-1] == student.end, b"".join(map(student.bytes_of, ids)).decode()
        own = Completion({"text": PROMPT}, np.array(self.prompt), np.array(ids), text, ends, ends, version=3)
        rows = collator.completion_rows([own], loss_counts(LossConfig(mode="chain", beta=0.5), [False]))
        return padded_batch(rows.columns, widths=(0, 0), pad_ids=(student.end, teacher.end))

    def rows(self, number):
        """Return both sides' logits of a completion."""
        return [
            rows_of(table, ids) for table, ids in zip((self.logits, self.of_teacher), self.ids[number], strict=True)
        ]

    def probability(self, ids):
        """Return how often the student samples a completion, or the beginning of one."""
        steps = [self.logits[self.prompt + ids[:n]].log_softmax(-1)[token] for n, token in enumerate(ids)]
        return sum(steps, 0 * ONE).exp()

    def gradient(self, value):
        """Return the gradient for all logits of the student as one vector."""
        leaves = list(self.logits.values())
        return torch.cat(torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True))

    def losses(self, form):
        """Return the run's loss of every completion: the sum over its chunks."""
        student, teacher = self.sides
        config = LossConfig(mode="chain", ce_loss_scale=0.0, **FORMS[form])
        tables = as_tensors(build_tables(student.fast, teacher.fast))
        loss = CrossTokenizerDistillationLoss(
            config, student_vocab_size=len(student.vocab), teachers=[LossTeacher(len(teacher.vocab), tables=tables)]
        )
        for number, batch in enumerate(self.batches):
            of_student, of_teacher = self.rows(number)
            yield loss(batch, of_student, [of_teacher], global_valid_chunks=[ONE])[0]


def expected(case, values, *, fixed):
    """Return the expectation over completions; with `fixed` the student's sampling has no gradient."""
    chances = [case.probability(ids) for ids in case.completions]
    torch.testing.assert_close(sum(chances).detach(), ONE)
    pairs = zip(chances, values, strict=True)
    return sum(chance.detach() * value if fixed else chance * value.detach() for chance, value in pairs)


def divergence(p, q, form):
    """Of a teacher's and a student's distribution over the same tokens."""
    if form != "jsd":
        x, y = (p, q) if form == "forward" else (q, p)
        return (x * (x / y).log()).sum()
    return (divergence(p, (p + q) / 2, "forward") + divergence(q, (p + q) / 2, "forward")) / 2


def by_context(case, form):
    """Sum over the contexts that the student reaches: how often, times the divergence of the next token there."""
    student, teacher = case.sides
    to_teacher = [teacher.end if x == student.end else teacher.ids[piece] for x, piece in enumerate(student.vocab)]
    for context, logits in case.logits.items():
        theirs = case.of_teacher[tuple(to_teacher[x] for x in context)][to_teacher]
        reached = case.probability(context[len(case.prompt) :]).detach()
        yield reached * divergence(theirs.softmax(-1), logits.softmax(-1), form)


def by_loops(case, form):
    """Sum over completions: how often, times the divergences of their decisions, in loops over single chunks."""
    options = Options(form={"forward": None, "reverse": 1, "jsd": 0.5}[form])
    for number, (ids, batch) in enumerate(zip(case.completions, case.batches, strict=True)):
        chunks = [batch[f"alignment_0_{side}_chunk_id"][0].tolist() for side in ("student", "teacher")]
        usable = (batch["alignment_0_pair_valid"] & batch["alignment_0_pair_is_correct"])[0].tolist()
        logits = [rows[0] for rows in case.rows(number)]
        values = sample_divergence(Pair(*case.sides), logits, case.ids[number], chunks, usable, options)
        yield case.probability(ids).detach() * values.sum()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("student", "teacher", "decisions"), [(LETTERS, MORE, by_context), (STUDENT, TEACHER, by_loops)],
    ids=["same-pieces", "other-pieces"],
)  # fmt: skip
def test_the_mean_gradient_is_that_of_the_expected_divergence_of_the_decisions(student, teacher, decisions, form):
    case = Enumerated(student, teacher, 3)
    if teacher is MORE:  # a token that the student does not have is never the teacher's
        for row in case.of_teacher.values():
            row[MORE.ids[b"0"]] = -torch.inf
    found = case.gradient(expected(case, case.losses(form), fixed=True))
    assert found.abs().max() > 0.01
    torch.testing.assert_close(found, case.gradient(sum(decisions(case, form))), rtol=1e-7, atol=1e-10)


@pytest.mark.slow
def test_the_size_of_the_term_that_is_left_out_is_documented():
    page = " ".join((ROOT / "docs" / "on_policy.md").read_text("utf-8").split())
    stated = re.search(r"of the norm of the kept one: ([^;]+); ([^;]+) with three", page)
    assert stated is not None
    for longest, figures in zip((2, 3), stated.groups(), strict=True):
        case = Enumerated(STUDENT, TEACHER, longest)
        for form, figure in zip(FORMS, re.findall(r"\.\d+", figures), strict=True):
            values = list(case.losses(form))
            left_out = case.gradient(expected(case, values, fixed=False))
            kept = case.gradient(expected(case, values, fixed=True))
            assert float(left_out.norm() / kept.norm()) == pytest.approx(float(figure), abs=0.006)
