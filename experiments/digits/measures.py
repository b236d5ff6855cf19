"""Measurements of a model and of a teacher's signal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.digits.answers import by_length, continuations, exact_match, log_likelihoods
from experiments.digits.settings import Scale
from experiments.digits.text import SHOWN, Problem, Texts, held_out_problems, prompt_of, read_texts
from xtoken_core import schema
from xtoken_core.alignment import TokenAligner
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config.loss import LossConfig
from xtoken_core.evaluation import evaluate
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher, chunk_average_log_probs, shifted_chunk_ids
from xtoken_core.projection import get_topk_projection

_CODE_BYTES = 60_000
_DOCUMENTS = 48
_BATCH = 16
_CONTEXT = 192


def device() -> torch.device:
    """Return the device of the measurements."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(directory: Path) -> tuple[Any, Any]:
    """Load a model, in float32, and its tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.to(device()).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def of_any_model(model: Any, tokenizer: Any, scale: Scale, texts: Texts) -> dict[str, Any]:
    """Measure right answers by number of digits, and bits per byte of both kinds of held-out text.

    Returns:
        `exact_match`, asked after three solved problems; `exact_match_first`, as a document's first; `bits_per_byte`.
    """
    bits = {
        name: evaluate(
            model,
            tokenizer,
            read_texts(path),
            context_length=_CONTEXT,
            batch_tokens=64 * _CONTEXT,
            device=device(),
            max_bytes=_CODE_BYTES,
        ).bits_per_byte
        for name, path in (("code", texts.code), ("arithmetic", texts.arithmetic))
    }
    found: dict[str, Any] = {"bits_per_byte": bits}
    for name, shown in (("exact_match", SHOWN), ("exact_match_first", 0)):
        problems = held_out_problems(scale)
        right = {
            str(digits): exact_match(model, tokenizer, some, [prompt_of(scale, problem, shown) for problem in some])
            for digits, some in problems.items()
        }
        total = sum(len(some) for some in problems.values())
        overall = sum(right[str(digits)] * len(some) for digits, some in problems.items()) / total
        found[name] = {**right, "all": overall}
    return found


def of_student(student: tuple[Any, Any], teacher: tuple[Any, Any], scale: Scale, state: Path) -> dict[str, Any]:
    """Return the divergence of a student from its teacher of the other tokenizer.

    Returns:
        `kl_answers`: nats of `KL(teacher || student)` per answer, estimated from an answer that the teacher draws to
        each held-out problem; `kl_chunks`: nats per chunk of held-out text, P-KL over the full vocabulary with the
        `prob` average, which is a true divergence; `numerals`: see `on_numerals`.
    """
    texts = Texts(state / "text")
    problems = [problem for some in held_out_problems(scale).values() for problem in some]
    questions = [prompt_of(scale, problem, SHOWN) for problem in problems]
    drawn = continuations(*teacher, questions, sample=5)
    theirs, ours = (log_likelihoods(*model, questions, drawn) for model in (teacher, student))
    batches = collated(student[1], teacher[1], read_texts(texts.arithmetic)[:_DOCUMENTS])
    batches += collated(student[1], teacher[1], read_texts(texts.code)[:_DOCUMENTS])
    return {
        "kl_answers": float((theirs - ours).mean()),
        "kl_chunks": chunk_divergence(student, teacher, batches, state / "projection.safetensors"),
        "numerals": on_numerals(*student, problems, questions),
    }


@torch.inference_mode()
def on_numerals(model: Any, tokenizer: Any, problems: Sequence[Problem], questions: Sequence[str]) -> dict[str, float]:
    """Return the student's probabilities where an answer of two digits or more is due.

    Returns:
        Means over the held-out problems: `all`, on all numerals of several digits; `right`, on the first token of the
        right answer; `misled`, on numerals that begin with another digit of that token.
    """
    due = [(problem, question) for problem, question in zip(problems, questions, strict=True) if problem.answer > 9]
    ids = numeral_ids(tokenizer)
    spelt = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    leads = torch.tensor([int(spelt[i][0]) for i in ids.tolist()])
    sums = dict.fromkeys(("all", "right", "misled"), 0.0)
    for places, rows in by_length(tokenizer, [question for _, question in due]):
        logits = model(input_ids=torch.tensor(rows, device=device()), use_cache=False).logits[:, -1, : len(tokenizer)]
        for place, probability in zip(places, logits.float().softmax(-1).cpu(), strict=True):
            token = tokenizer(str(due[place][0].answer), add_special_tokens=False)["input_ids"][0]
            digits = {int(digit) for digit in spelt[token]}
            others = torch.tensor(sorted(digits - {int(spelt[token][0])}))
            sums["all"] += float(probability[ids].sum())
            sums["right"] += float(probability[token])
            sums["misled"] += float(probability[ids][torch.isin(leads, others)].sum())
    return {name: value / len(due) for name, value in sums.items()}


def collated(student_tokenizer: Any, teacher_tokenizer: Any, documents: Sequence[str]) -> list[dict[str, Any]]:
    """Return documents as a run's collators make them, in batches."""
    collator = CrossTokenizerCollator(
        student_tokenizer=student_tokenizer,
        teacher_tokenizer=teacher_tokenizer,
        aligner=TokenAligner(student_tokenizer, teacher_tokenizer),
        ctx_length_student=_CONTEXT,
        ctx_length_teacher=_CONTEXT,
    )
    texts = [{"text": text} for text in documents]
    return [dict(collator(texts[i : i + _BATCH])) for i in range(0, len(texts), _BATCH)]


@torch.inference_mode()
def chunk_divergence(
    student: tuple[Any, Any], teacher: tuple[Any, Any], batches: Sequence[dict[str, Any]], projection: Path
) -> float:
    """Compute P-KL over the full vocabulary with the `prob` average, nats per chunk."""
    config = LossConfig(vocab_topk=None, teacher_chunk_average="prob")
    known = LossTeacher(len(teacher[1]), *get_topk_projection(projection, device()))
    loss = CrossTokenizerDistillationLoss(config, student_vocab_size=len(student[1]), teachers=[known], device=device())
    total = chunks = 0.0
    for batch in batches:
        tensors = {name: value.to(device()) for name, value in batch.items() if isinstance(value, Tensor)}
        signal = teacher[0](input_ids=tensors["teacher_input_ids"], use_cache=False).logits
        logits = student[0](input_ids=tensors[schema.INPUT_IDS.name], use_cache=False).logits
        _, metrics = loss(tensors, logits, [signal], global_valid_toks=1, global_valid_chunks=[1])
        total += float(metrics["kl_loss"])
        chunks += float(metrics["num_valid_pairs_t0"])
    return total / chunks


@torch.inference_mode()
def teacher_mass(teacher: tuple[Any, Any], student_tokenizer: Any, documents: Sequence[str]) -> list[dict[str, Any]]:
    """Return the mass `m` of the reference's average over a chunk's teacher tokens, by their number.

    Returns:
        One row per kind (`answer` and `operand`: numerals of several digits; `other`) and size: `kind`, `tokens`,
        `chunks`, the mean `mass`, and `confidence`, the mean probability that the teacher gives to a chunk's tokens.
    """
    sums: dict[tuple[str, int], Tensor] = {}
    for batch in collated(student_tokenizer, teacher[1], documents):
        theirs = batch["teacher_input_ids"].to(device())
        log_probs = teacher[0](input_ids=theirs, use_cache=False).logits[..., : len(teacher[1])].float().log_softmax(-1)
        ids = shifted_chunk_ids(batch["alignment_teacher_chunk_id"]).to(device())
        pairs = batch["alignment_pair_valid"].shape[1]
        means, sizes = chunk_average_log_probs(log_probs, ids, pairs)
        own = log_probs.gather(-1, theirs.roll(-1, 1).unsqueeze(-1)).exp()
        confidence, _ = chunk_average_log_probs(own, ids, pairs)
        found = torch.stack([means.exp().sum(-1), confidence.squeeze(-1), torch.ones_like(sizes)], -1).double().cpu()
        kinds = _kinds(batch, student_tokenizer)
        for row, chunk in (batch["alignment_pair_valid"] & (sizes > 0).cpu()).nonzero().tolist():
            key = kinds[row].get(chunk, "other"), int(sizes[row, chunk])
            sums[key] = sums.get(key, torch.zeros(3, dtype=torch.float64)) + found[row, chunk]
    return [
        {"kind": kind, "tokens": tokens, "chunks": int(n), "mass": float(mass / n), "confidence": float(confident / n)}
        for (kind, tokens), (mass, confident, n) in sorted(sums.items())
    ]


def _kinds(batch: dict[str, Any], tokenizer: Any) -> list[dict[int, str]]:
    """Return each document's chunks that are numerals of several digits: `answer` right after `=`, else `operand`."""
    ids = batch[schema.INPUT_IDS.name]
    numeral = torch.isin(ids.roll(-1, 1), numeral_ids(tokenizer))
    after = ids == tokenizer.convert_tokens_to_ids("=")
    chunks = shifted_chunk_ids(batch["alignment_student_chunk_id"])
    found: list[dict[int, str]] = [{} for _ in ids]
    for row, place in (numeral & (chunks >= 0)).nonzero().tolist():
        found[row][int(chunks[row, place])] = "answer" if bool(after[row, place]) else "operand"
    return found


def numeral_ids(tokenizer: Any) -> Tensor:
    """Return the ids of numerals of two digits and more."""
    spelt = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return torch.tensor([i for i, token in enumerate(spelt) if token.isascii() and token.isdigit() and len(token) > 1])
