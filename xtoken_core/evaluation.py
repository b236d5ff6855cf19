"""Evaluation on held-out text in bits per byte, which compares models of different tokenizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from xtoken_core.dataset.records import Document
from xtoken_core.errors import InputError
from xtoken_core.losses.lazy_logits import HeadProjection, WholeLogits, row_logits
from xtoken_core.packing import PackedRow, groups_within
from xtoken_core.tokenizing import ConversationError, TextTokenizer
from xtoken_core.uncertainty import grouped, standard_error

_ROWS_IN_FLOAT32 = 1024


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation on held-out text.

    Attributes:
        bits_per_byte: `nll_nats / ln 2 / bytes`: bits to encode one byte of the text with the model.
        standard_error: That of `bits_per_byte` over documents; None with a single one.
        nll_nats: Negative log-likelihood of every scored token, summed, in nats.
        bytes: UTF-8 bytes of the scored text.
        tokens: Its tokens, each predicted once.
        next_token_accuracy: Fraction of the tokens to which the model gave the highest probability.
        documents: Number of documents.
        group_bytes: Bytes of each document, or of each of `uncertainty.GROUPS` groups of them.
        group_nats: Negative log-likelihood of each likewise, by which two models are compared on the same documents.
    """

    bits_per_byte: float
    standard_error: float | None
    nll_nats: float
    bytes: int
    tokens: int
    next_token_accuracy: float
    documents: int
    group_bytes: list[int]
    group_nats: list[float]


@dataclass(frozen=True)
class Window:
    """A stretch of one document: each of the last inputs is followed by a target, those before are context only."""

    inputs: list[int]
    targets: list[int]
    document: int = 0
    """Its number among those that are scored."""

    @property
    def skipped(self) -> list[int]:
        """A 0 for every input without a target."""
        return [0] * (len(self.inputs) - len(self.targets))


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    *,
    context_length: int,
    batch_tokens: int,
    device: torch.device | str,
    max_bytes: int,
    progress: Callable[[], None] = lambda: None,
    outputs: Callable[[Tensor], WholeLogits] | None = None,
    packed_outputs: Callable[[Tensor, PackedRow], WholeLogits] | None = None,
    on_fraction: Callable[[float], None] = lambda _: None,
) -> EvalResult:
    """Measure a causal language model on text, every document in full.

    A document is tokenized without special tokens and cut into windows of at most `context_length` inputs, in which
    each token is predicted exactly once; what closes a document is not counted. What the tokenizer puts before a text
    by default, such as BOS, begins every window: models trained with it are much worse without. With one that adds
    nothing, the first window begins with BOS, or else EOS. The head is cut to the tokenizer's vocabulary. A tokenizer
    that normalises its input is measured on what it keeps, per byte of the original.

    Args:
        model: Maps `input_ids` and `attention_mask` `[B, T]` int64 to `.logits` `[B, T, V_m]`; on `device`.
        tokenizer: The model's own.
        documents: Read in order, up to the first one that would exceed `max_bytes` (the first is always read).
        context_length: Tokens of context at most.
        batch_tokens: Padded tokens of one forward pass, unless a single window is longer.
        device: Device of the forward pass.
        max_bytes: Limit of the scored text, in UTF-8 bytes.
        progress: Called after every document that was tokenized and after every batch; what it raises ends the
            evaluation.
        outputs: What gives the logits of `input_ids` `[B, T]` instead of the model's call, as a tensor or as a head
            that is then multiplied out for 1024 positions at a time. It sees rows padded on the right without a mask.
        packed_outputs: The same for the windows of a batch packed into one row `[1, T]`, with the row's layout; it
            takes precedence.
        on_fraction: Called after every batch with the fraction of the tokens that has been scored.

    Raises:
        InputError: There is no text, the tokenizer has nothing to begin it with or no token for a character, the
            context is too short for that, or the head has fewer rows than the tokenizer has ids.
    """
    windows, sizes = read_windows(
        tokenizer, documents, context_length=context_length, max_bytes=max_bytes, progress=progress
    )
    target = torch.device(device)
    tokens = sum(len(window.targets) for window in windows)
    if packed_outputs is not None:
        cut = list(groups_within(windows, lambda window: len(window.inputs), batch_tokens))
        batches = (_packed(batch, target, packed_outputs) for batch in cut)
    else:
        cut = list(_batches(windows, batch_tokens))
        batches = (_padded(batch, target, model, outputs) for batch in cut)
    nats = torch.zeros(len(sizes), dtype=torch.float64, device=target)
    hits = _score(model, batches, len(tokenizer), nats, _after_batch(cut, tokens, progress, on_fraction))
    return result_of(nats.tolist(), hits, tokens, sizes)


def result_of(nats: Sequence[float], hits: int, tokens: int, sizes: Sequence[int]) -> EvalResult:
    """Return the result of scored documents.

    Args:
        nats: Negative log-likelihood of each one's tokens.
        hits: Tokens that had the highest probability.
        tokens: Their tokens.
        sizes: Bytes of each.
    """
    nll = math.fsum(nats)
    return EvalResult(
        bits_per_byte=nll / math.log(2) / sum(sizes),
        standard_error=standard_error(nats, sizes),
        nll_nats=nll,
        bytes=sum(sizes),
        tokens=tokens,
        next_token_accuracy=hits / max(tokens, 1),
        documents=len(sizes),
        group_bytes=[int(size) for size in grouped(sizes)],
        group_nats=[round(value, 4) for value in grouped(nats)],
    )


def _after_batch(
    batches: list[list[Window]], tokens: int, progress: Callable[[], None], on_fraction: Callable[[float], None]
) -> Callable[[], None]:
    """Return a function that is called after every batch, and reports the fraction of the tokens that is scored."""
    scored = accumulate(sum(len(window.targets) for window in batch) for batch in batches)

    def report() -> None:
        on_fraction(next(scored) / tokens)
        progress()

    return report


def read_windows(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[Document],
    *,
    context_length: int,
    max_bytes: int,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[Window], list[int]]:
    """Return the windows of all documents that `evaluate` reads, and the bytes that are scored of each.

    Args:
        tokenizer: As of `evaluate`, and so are the others.
        documents: Texts and records.
        context_length: Inputs of a window at most.
        max_bytes: Limit of the scored text.
        progress: Called after every document.

    Raises:
        InputError: As of `evaluate`.
    """
    encoder = TextTokenizer(tokenizer, "model")
    start, again = _beginning(encoder)
    windows: list[Window] = []
    sizes: list[int] = []
    for document in documents:
        if isinstance(document, str):
            ids = encoder.encode([document], specials=False)[0].tolist()
            cut, size = cut_windows(ids, start=start, again=again, context_length=context_length), _size(document)
        else:
            ids, learn, size = _answers(encoder, document)
            if size and learn[0]:
                ids, learn = [*start, *ids], [*[0] * len(start), *learn]
            cut = answer_windows(ids, learn, context_length)
        if sizes and sum(sizes) + size > max_bytes:
            break
        if size:
            windows += [replace(window, document=len(sizes)) for window in cut]
            sizes.append(size)
        progress()
    if not sizes:
        raise InputError("there is no held-out text to evaluate on")
    return windows, sizes


def _size(text: str) -> int:
    return len(text.encode("utf-8"))


def _answers(encoder: TextTokenizer, record: Mapping[str, Any]) -> tuple[list[int], list[int], int]:
    """Return a record's tokens, 1 for each token of an answer, and the answers' bytes; nothing if it has none."""
    if "completion" in record:
        prompt, rest = encoder.begin(record["prompt"]).tolist(), encoder.proceed(record["completion"]).tolist()
        return [*prompt, *rest], [*[0] * len(prompt), *[1] * len(rest)], _size(record["completion"])
    try:
        text, found = encoder.render(record["messages"], tools=record.get("tools"))
    except ConversationError:
        return [], [], 0
    spans = list(found.values())
    ids, learn = encoder.tokenize_spans(text, spans)
    return ids.tolist(), learn.tolist(), sum(_size(text[begin:end]) for begin, end in spans)


def answer_windows(ids: list[int], learn: list[int], context_length: int) -> list[Window]:
    """Cut the answers of a record into windows, each after as much of what is before as there is room for.

    Where an answer is longer than the rest of a window, half of each window is left for what is before.

    >>> [(w.inputs, w.targets) for w in answer_windows([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], context_length=4)]
    [([1, 2, 3], [3, 4]), ([1, 2, 3, 4], [5])]

    Args:
        ids: Tokens of the record; the first is of no answer.
        learn: 1 for each token of an answer, 0 for others.
        context_length: Inputs of a window at most.
    """
    windows: list[Window] = []
    at = 0
    for is_answer, group in groupby(learn):
        end = at + len(list(group))
        while is_answer and at < end:
            behind = min(end, at + context_length - min(at, context_length // 2))
            first = max(0, behind - 1 - context_length)
            windows.append(Window(ids[first : behind - 1], ids[at:behind]))
            at = behind
        at = end
    return windows


def cut_windows(ids: list[int], *, start: list[int], again: list[int], context_length: int) -> list[Window]:
    """Cut a document into windows, in which every token is a target once.

    >>> [(w.inputs, w.targets) for w in cut_windows([5, 6, 7], start=[1], again=[], context_length=2)]
    [([1, 5], [5, 6]), ([6], [7])]
    >>> [(w.inputs, w.targets) for w in cut_windows([5, 6, 7, 8], start=[1], again=[1], context_length=2)]
    [([1, 5], [5, 6]), ([1, 6], [7]), ([1, 7], [8])]

    Args:
        ids: Tokens of the document.
        start: Tokens before the first window; not empty.
        again: Tokens before the token that every later window begins with.
        context_length: Inputs of a window at most.

    Raises:
        InputError: `context_length` has no room for a token after `again`.
    """
    if context_length <= len(again):
        raise InputError(
            f"context_length = {context_length} is too short to measure a text: with what the tokenizer puts before "
            f"it, a window has at least {len(again) + 1} tokens"
        )
    windows: list[Window] = []
    at = 0
    while at < len(ids):
        context = [*again, ids[at - 1]] if at else start
        targets = ids[at : at + context_length - len(context) + 1]
        windows.append(Window([*context, *targets[:-1]], targets))
        at += len(targets)
    return windows


def _beginning(encoder: TextTokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens before a document's first window, and those before each later one.

    Raises:
        InputError: The tokenizer adds none, and has neither BOS nor EOS.
    """
    before, _ = encoder.ends
    if before:
        return before, before
    tokenizer = encoder.tokenizer
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return [token], []
    raise InputError(
        f"the tokenizer {tokenizer.name_or_path!r} has neither a BOS nor an EOS token: "
        "without one, a document's first token cannot be predicted"
    )


def _batches(windows: list[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Yield batches of windows of similar length, longest first; the order is deterministic."""
    ordered = sorted(windows, key=lambda window: -len(window.inputs))
    while ordered:
        rows = max(1, batch_tokens // len(ordered[0].inputs))
        yield ordered[:rows]
        ordered = ordered[rows:]


class ScoredBatch(NamedTuple):
    """WholeLogits of a batch of windows, with what each position has to predict.

    Attributes:
        logits: `[B, T, V_m]`, as a tensor or a head that gives them.
        targets: int64 ids.
        mask: True for positions that predict one.
        documents: Number of each position's document.
    """

    logits: WholeLogits
    targets: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    documents: Int[Tensor, "B T"]


def _score(
    model: nn.Module, batches: Iterable[ScoredBatch], vocabulary: int, nats: Tensor, progress: Callable[[], None]
) -> int:
    """Add each document's negative log-likelihood to `nats`; return the number of targets with the highest logit."""
    was_training = model.training
    model.eval()
    hits = torch.zeros((), dtype=torch.int64, device=nats.device)
    try:
        with torch.no_grad():  # a sharded model keeps what it gathers for training, so no inference tensors
            for logits, targets, mask, documents in batches:  # each is computed here, in its turn
                if logits.shape[-1] < vocabulary:
                    raise InputError(
                        f"the model's head has {logits.shape[-1]} rows, its tokenizer {vocabulary} tokens: "
                        "they do not belong together"
                    )
                losses, batch_hits = nll_and_hits(logits, targets, mask, width=vocabulary)
                nats.index_add_(0, documents.flatten(), losses)
                hits += batch_hits
                progress()
    finally:
        model.train(was_training)
    return int(hits)


def _padded(
    batch: list[Window], device: torch.device, model: nn.Module, outputs: Callable[[Tensor], WholeLogits] | None
) -> ScoredBatch:
    """Compute the logits of windows, each in a row."""
    inputs, there = _pad([window.inputs for window in batch], device)
    scored = _pad_targets([[window] for window in batch], device)
    if outputs is not None:
        return ScoredBatch(outputs(inputs), *scored)
    return ScoredBatch(model(input_ids=inputs, attention_mask=there.long(), use_cache=False).logits, *scored)


def _packed(
    batch: list[Window], device: torch.device, outputs: Callable[[Tensor, PackedRow], WholeLogits]
) -> ScoredBatch:
    """Compute the logits of windows, all in one row."""
    row = PackedRow(tuple(len(window.inputs) for window in batch), sum(len(window.inputs) for window in batch))
    inputs, _ = _pad([[token for window in batch for token in window.inputs]], device)
    return ScoredBatch(outputs(inputs, row), *_pad_targets([batch], device))


def _pad(rows: list[list[int]], device: torch.device) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return rows padded on the right with 0, and the mask of their tokens."""
    padded = pad_sequence([torch.tensor(row, dtype=torch.int64) for row in rows], batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return padded.to(device), mask.to(device)


def _pad_targets(
    rows: list[list[Window]], device: torch.device
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return the targets of windows where their inputs are, the mask of positions with one, and their documents."""
    targets, _ = _pad([[token for window in row for token in window.skipped + window.targets] for row in rows], device)
    mask, _ = _pad([[flag for w in row for flag in w.skipped + [1] * len(w.targets)] for row in rows], device)
    documents, _ = _pad([[w.document for w in row for _ in w.inputs] for row in rows], device)
    return targets, mask.bool(), documents


def nll_and_hits(
    logits: Float[Tensor, "B T V"] | HeadProjection,
    targets: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    width: int | None = None,
) -> tuple[Float[Tensor, " N"], Int[Tensor, ""]]:
    """Return the cross-entropy of each position, and the number of correct predictions at masked ones.

    Args:
        logits: `[B, T, V]`, any floating dtype, or the head that gives them; 1024 rows at a time are held in float32.
        targets: `[B, T]` int64; ids under an unset mask only need to be valid.
        mask: `[B, T]` bool.
        width: Number of the head's leading columns that are used; None: all.

    Returns:
        Nats `[B * T]`, computed in float32 and returned in float64, 0 under an unset mask; number of targets with the
        largest logit, an int64 scalar.
    """
    nats = []
    hits = torch.zeros((), dtype=torch.int64, device=logits.device)
    flat_targets, flat_mask, logits_of = targets.flatten(), mask.flatten(), row_logits(logits, width)
    positions = torch.arange(len(flat_targets), device=targets.device)
    for rows in torch.split(positions, _ROWS_IN_FLOAT32):
        some = logits_of(rows).squeeze(0).float()  # [R, V]
        of_targets = some.gather(1, flat_targets[rows, None]).squeeze(1)
        nats.append(torch.where(flat_mask[rows], some.logsumexp(dim=-1) - of_targets, 0.0).double())
        hits += ((some.argmax(dim=-1) == flat_targets[rows]) & flat_mask[rows]).sum()
    return torch.cat(nats), hits
