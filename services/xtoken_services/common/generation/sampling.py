"""Batched sampling from a causal language model with a cache; every row has random numbers of its own."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from xtoken_services.common.generation.published_weights import Version, load_weights
from xtoken_services.common.generation.vocabulary import Vocabulary

if TYPE_CHECKING:
    from xtoken_services.common.generation.decoding import Batch, Decoder

BLOCK = 256
"""Tokens of the vocabulary whose probabilities are summed before one of them is drawn."""
BELOW_ONE = 1 - 1e-12
"""Part of a sum of probabilities up to which is drawn: beyond it, rounding could find a token of probability 0."""
Sample = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""From logits `[B, V]` and uniforms `[B]`: tokens, entropies and log-probabilities, `[B]` each."""


@dataclass(frozen=True)
class Sampling:
    """Lengths and distribution of completions.

    Attributes:
        max_new_tokens: Maximum of tokens.
        temperature: 0 takes the most likely token.
        top_k: Sample from so many of the most likely tokens; None: from all.
        top_p: Sample from the most likely tokens that together have this probability.
        stop: Texts that end a completion, which keeps them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Any) -> Sampling:
        """Take over the values that settings, such as a run's `[rollout]`, have under the same names."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})


@dataclass
class Sampled:
    """One completion.

    Attributes:
        ids: Its tokens, the last one included that ended it.
        ends: Its last token is the end of the text.
        stopped: It holds a stop string.
        entropy: Sum of the entropies of the model's distributions, at temperature 1, along it, in nats.
        log_probs: Of its tokens, by the whole head at temperature 1.
    """

    ids: list[int] = field(default_factory=list)
    ends: bool = False
    stopped: bool = False
    entropy: float = 0.0
    log_probs: list[float] = field(default_factory=list)
    tail: bytes = b""

    @property
    def finished(self) -> bool:
        """True if it ended by itself, not at the limit of its length."""
        return self.ends or self.stopped


class Sampler:
    """Completes prompts.

    Args:
        model: A Hugging Face causal language model.
        vocabulary: Its tokens.
        settings: Lengths and distribution.
        decoder: Decodes in memory of a fixed size, on a GPU by graphs (`decoding.Decoder`); None: in the model's own
            cache.
        forward: Computes the model's output; None: the model.
        any_rank: Returns whether its argument is true on any of the ranks that share the model and the prompts.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: Vocabulary,
        settings: Sampling,
        *,
        decoder: type[Decoder] | None = None,
        forward: Callable[..., Any] | None = None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self.model, self.vocabulary, self.settings = model, vocabulary, settings
        self._barred = ~vocabulary.allowed
        self._run, self._any_rank = forward or model, any_rank
        self._stops = [text.encode() for text in settings.stop]
        accepted = inspect.signature(model.forward).parameters
        self._has_positions = "position_ids" in accepted
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._decoder: Decoder | None = None
        if decoder is not None and self._has_positions:
            self._decoder = decoder(model, self._logits, self._sample, settings.max_new_tokens)

    def load(self, path: Path) -> Version:
        """Load the published weights in a file; return their version.

        Raises:
            InputError: The file cannot be read, or its weights are not this model's.
        """
        return load_weights(self.model, path)

    @torch.no_grad()
    def complete(
        self, prompts: Sequence[np.ndarray], seeds: Sequence[int], progress: Callable[[], None]
    ) -> list[Sampled]:
        """Complete a batch of prompts.

        Args:
            prompts: Token ids of each, at least one.
            seeds: Seed of each row's random numbers (`seed_of`).
            progress: Called after every token, or every few; it may raise to stop.

        Returns:
            A completion of 1 to `max_new_tokens` tokens for each.
        """
        uniforms = torch.from_numpy(np.stack([_uniforms(seed, self.settings.max_new_tokens) for seed in seeds]))
        uniforms = uniforms.to(self.model.device)
        rows = [Sampled() for _ in prompts]
        logits, mask, cache = self._prefill([tuple(prompt.tolist()) for prompt in prompts])
        chosen, *values = self._sample(logits, uniforms[:, 0])
        self._extend(rows, *(x.unsqueeze(1) for x in (chosen, *values)))
        progress()
        batch: Batch | GrowingBatch | None = None
        if self._decoder is not None and self.settings.max_new_tokens > 1 and not all(row.finished for row in rows):
            batch = self._decoder.start(cache, mask, chosen, uniforms)
        if batch is None:
            batch = GrowingBatch(self._logits, self._sample, cache, mask, chosen, uniforms)
        del cache
        self._decode(rows, batch, progress)
        return rows

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Float[Tensor, "B V"], Int[Tensor, "B T"], Any]:
        """Compute prompts, equal ones once; return their last logits, their mask and the cache."""
        order = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        logits, mask, cache = self._computed(list(order))
        if len(order) == len(prompts):
            return logits, mask, cache
        if not fixed(cache, 0):  # what else it keeps might not be selected
            return self._computed(prompts)
        which = torch.tensor([order[prompt] for prompt in prompts], device=mask.device)
        cache.batch_select_indices(which)
        return logits[which], mask[which], cache

    def _computed(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Float[Tensor, "B V"], Int[Tensor, "B T"], Any]:
        """Compute prompts, each by itself; see `_prefill`."""
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.vocabulary.pad_id)  # [B, T], padded on the left
        mask = torch.zeros_like(ids)
        for at, prompt in enumerate(prompts):
            ids[at, width - len(prompt) :] = torch.tensor(prompt)
            mask[at, width - len(prompt) :] = 1
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        output = self._output(ids, mask, _positions(mask), None)
        # A model without keys and values, such as Mamba, computes the whole row for every token.
        return output.logits[:, -1].float(), mask, getattr(output, "past_key_values", ids)

    def _decode(self, rows: list[Sampled], batch: Batch | GrowingBatch, progress: Callable[[], None]) -> None:
        """Decode spans of tokens; rows that are finished leave the batch when half of it is."""
        at = list(range(len(rows)))  # rows of the batch, without surplus ones
        n = 1
        while n < self.settings.max_new_tokens and self._any_rank(any(not row.finished for row in rows)):
            living = [i for i, row in enumerate(at) if not rows[row].finished]
            smaller = batch.narrowed(living)
            if smaller is not batch:
                batch, at = smaller, [at[i] for i in living]
            span = min(batch.span, self.settings.max_new_tokens - n)
            for _ in range(span):
                batch.step()
                progress()
            n += span
            self._extend([rows[row] for row in at], *batch.made(len(at), n - span, n))

    def _extend(self, rows: Sequence[Sampled], tokens: Tensor, entropies: Tensor, log_probs: Tensor) -> None:
        """Add tokens to rows until each is finished.

        Args:
            rows: Completions.
            tokens: `[B, n]`.
            entropies: Likewise.
            log_probs: Likewise.
        """
        for row, ids in zip(rows, tokens.tolist(), strict=True):
            for token in ids:
                if not row.finished:
                    self._append(row, token)
        for row, along, own in zip(rows, entropies.tolist(), log_probs.tolist(), strict=True):
            count = len(row.ids) - len(row.log_probs)
            row.entropy += sum(along[:count])
            row.log_probs += own[:count]

    def _logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Float[Tensor, "B V"]:
        """Return the logits of one token per row in float32; a cache that is a tensor has the ids of the whole rows."""
        if isinstance(cache, Tensor):
            ids, positions, cache = cache, _positions(mask), None
        logits: Tensor = self._output(ids, mask, positions, cache).logits[:, -1].float()
        return logits

    def _output(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        options = {"position_ids": positions} if self._has_positions else {}
        return self._run(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options, **self._last
        )

    def _sample(
        self, logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Return a token of each row, the entropy of its distribution and its log-probability."""
        allowed = logits.masked_fill(self._barred, -torch.inf)
        chosen = choose(allowed, uniforms, self.settings)
        return chosen, entropy_of(allowed), logits.log_softmax(-1).gather(1, chosen.unsqueeze(1)).squeeze(1)

    def _append(self, row: Sampled, token: int) -> None:
        row.ids.append(token)
        row.ends = token in self.vocabulary.ends
        if self._stops and not row.ends:
            piece = self.vocabulary.pieces[token]
            longest = max(map(len, self._stops)) + len(piece)
            row.tail = (row.tail + piece)[-longest:]
            row.stopped = any(stop in row.tail for stop in self._stops)


class GrowingBatch:
    """Rows that are decoded with the model's own cache, which grows by a column a step.

    Args:
        forward: From ids `[B, 1]`, mask `[B, L]`, positions `[B, 1]` and a cache, the logits `[B, V]`.
        sample: The sampling.
        cache: Of the prompts.
        mask: 1 for tokens of a prompt, which is padded on the left.
        first: Each row's first token.
        uniforms: Of all tokens.
    """

    span = 4
    """Tokens of a row between two looks of the host."""

    def __init__(
        self, forward: Callable[..., Tensor], sample: Sample, cache: Any, mask: Tensor, first: Tensor, uniforms: Tensor
    ) -> None:
        self._forward, self._sample, self._cache = forward, sample, cache
        self._mask, self._ids, self._uniforms = mask, first.unsqueeze(1), uniforms
        self._positions = mask.sum(1, keepdim=True)
        self._made: list[tuple[Tensor, Tensor, Tensor]] = []

    def step(self) -> None:
        """Decode one token of every row."""
        self._mask = pad(self._mask, (0, 1), value=1)
        if isinstance(self._cache, Tensor):
            self._cache = torch.cat([self._cache, self._ids], 1)
        logits = self._forward(self._ids, self._mask, self._positions, self._cache)
        self._made.append(self._sample(logits, self._uniforms[:, len(self._made) + 1]))
        self._ids = self._made[-1][0].unsqueeze(1)
        self._positions = self._positions + 1

    def made(self, rows: int, first: int, last: int) -> list[Tensor]:
        """Return tokens, entropies and log-probabilities, `[rows, last - first]` each."""
        return [torch.stack(x, 1) for x in zip(*self._made[first - last :], strict=True)]

    def narrowed(self, living: Sequence[int]) -> GrowingBatch:
        """Return a batch of these rows if they are half of all or fewer, or else this one."""
        if not living or 2 * len(living) > len(self._ids) or not fixed(self._cache, 0):
            return self
        rows = torch.tensor(living, device=self._ids.device)
        self._cache.batch_select_indices(rows)
        left = self._uniforms[rows, len(self._made) :]
        return GrowingBatch(self._forward, self._sample, self._cache, self._mask[rows], self._ids[rows, 0], left)


def _positions(mask: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def choose(logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"], settings: Sampling) -> Int[Tensor, " B"]:
    """Choose a token of each row by the inverse of its cumulative distribution.

    Args:
        logits: `-inf` for tokens that may not be chosen.
        uniforms: In [0, 1), float64.
        settings: Temperature, `top_k` and `top_p`.
    """
    if settings.temperature == 0:
        return logits.argmax(dim=-1)
    if settings.temperature != 1:
        logits = logits / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[1]:
        least = logits.topk(settings.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if settings.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.double().cumsum(dim=-1) - ordered
        kept = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, order, before < settings.top_p)
        probabilities = probabilities.masked_fill(~kept, 0.0)
    # Sums in float64 leave rounding no say in the choice; two levels of them read the vocabulary once.
    if spare := -logits.shape[1] % BLOCK:
        probabilities = pad(probabilities, (0, spare))
    blocks = probabilities.view(len(logits), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    block, rest = _inverse(sums, uniforms * sums.sum(-1))
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK)).squeeze(1)
    # Weights that have become NaN choose any token.
    return (block * BLOCK + _inverse(inside.double(), rest)[0]).clamp(max=logits.shape[1] - 1)


def _inverse(masses: Float[Tensor, "B n"], target: Float[Tensor, " B"]) -> tuple[Int[Tensor, " B"], Tensor]:
    """Return where the masses before and with an entry enclose a target, and the target less the masses before."""
    cumulative = masses.cumsum(dim=-1)
    target = torch.minimum(target, cumulative[:, -1] * BELOW_ONE).clamp(min=0).unsqueeze(1)
    at = torch.searchsorted(cumulative, target, right=True).clamp(max=masses.shape[1] - 1)
    return at.squeeze(1), (target - (cumulative - masses).gather(1, at)).squeeze(1)


def entropy_of(logits: Float[Tensor, "B V"]) -> Float[Tensor, " B"]:
    """Return the entropy of each row's distribution in nats; `-inf` is probability 0."""
    entropy: Tensor = torch.special.entr(logits.softmax(dim=-1)).sum(-1)
    return entropy


def seed_of(seed: int, position: int, version: int) -> int:
    """Return the seed of a position's random numbers: the same weights complete a prompt in the same way."""
    return seed_from(f"rollout/{seed}/{position}/{version}")


def seed_from(name: str) -> int:
    """Hash a name to the seed of a random generator."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")


def _uniforms(seed: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def spelled_text(ids: Sequence[int], pieces: Sequence[bytes]) -> tuple[int, str]:
    """Return how many of the tokens spell valid text, and the text.

    A byte-level model can sample bytes that are no UTF-8; no teacher could read what follows.

    Args:
        ids: A completion's tokens, without the end of the text.
        pieces: By id, the bytes that a token spells.
    """
    for count in range(len(ids), 0, -1):
        try:
            return count, b"".join(pieces[token] for token in ids[:count]).decode("utf-8")
        except UnicodeDecodeError as error:
            known = error.start
            spelled = np.cumsum([len(pieces[token]) for token in ids[:count]])
            if spelled[-1] > known + 4:  # the first invalid byte is far from the end: continue before it
                return spelled_text(ids[: int((spelled <= known + 3).sum())], pieces)
    return 0, ""


def fixed(cache: Any, length: int) -> bool:
    """Return True if every cache layer holds plain keys and values of at least `length` positions."""
    layers = getattr(cache, "layers", [])
    plain = all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= length)
        for layer in layers
    )
    return bool(layers) and plain
