"""Batched sampling from a causal language model with a cache; every row has random numbers of its own."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from xtoken_core.config.rollout import RolloutSpec
from xtoken_services.common.generation.decoding import NAME as ATTENTION
from xtoken_services.common.generation.decoding import SPAN, Batch, Decoder, size_for
from xtoken_services.common.generation.published_weights import Version, load_weights
from xtoken_services.common.generation.vocabulary import Vocabulary


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
        fixed_memory: Decode in memory of a fixed size (`decoding.Decoder`), on a GPU by graphs; this sets the model's
            attention.
    """

    def __init__(
        self, model: Any, vocabulary: Vocabulary, settings: RolloutSpec, *, fixed_memory: bool = False
    ) -> None:
        self.model, self.vocabulary, self.settings = model, vocabulary, settings
        self._stops = [text.encode() for text in settings.stop]
        accepted = inspect.signature(model.forward).parameters
        self._has_positions = "position_ids" in accepted
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._decoder: Decoder | None = None
        if fixed_memory and self._has_positions:
            if model.config._attn_implementation == "sdpa":
                model.set_attn_implementation(ATTENTION)
            self._decoder = Decoder(model, self._logits, self._sample, settings.max_new_tokens)

    @property
    def batch_sizes(self) -> list[int]:
        """Rows of the batches that were decoded in fixed memory, in the order of their first use."""
        return self._decoder.sizes if self._decoder is not None else []

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
        device, width = self.model.device, max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.vocabulary.pad_id)  # [B, T], padded on the left
        mask = torch.zeros_like(ids)
        for at, prompt in enumerate(prompts):
            ids[at, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[at, width - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        uniforms = torch.from_numpy(np.stack([_uniforms(seed, self.settings.max_new_tokens) for seed in seeds]))
        uniforms = uniforms.to(device)
        rows = [Sampled() for _ in prompts]
        logits, cache = self._forward(ids, mask, None)
        chosen = self._first(rows, logits, uniforms)
        progress()
        batch = None
        if self._decoder is not None and self.settings.max_new_tokens > 1 and not all(row.finished for row in rows):
            batch = self._decoder.start(cache, mask, chosen, uniforms)
        if batch is None:
            self._decode(rows, chosen, mask, cache, uniforms, progress)
        else:
            del cache
            self._decode_spans(rows, batch, progress)
        return rows

    def _first(self, rows: list[Sampled], logits: Tensor, uniforms: Tensor) -> Int[Tensor, " B"]:
        """Add the first token of every row; return them."""
        chosen, *values = self._sample(logits, uniforms[:, 0])
        self._extend(rows, *(x.unsqueeze(1) for x in (chosen, *values)))
        return chosen

    def _decode(
        self,
        rows: list[Sampled],
        chosen: Tensor,
        mask: Tensor,
        cache: Any,
        uniforms: Tensor,
        progress: Callable[[], None],
    ) -> None:
        """Decode token by token with the model's own cache, until all rows are finished."""
        kept = []
        for n in range(1, self.settings.max_new_tokens):
            if all(row.finished for row in rows):
                break
            ids = chosen.unsqueeze(1)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            logits, cache = self._forward(ids, mask, cache)
            chosen, entropy, log_probs = self._sample(logits, uniforms[:, n])
            kept.append((entropy, log_probs))
            for row, token in zip(rows, chosen.tolist(), strict=True):
                if not row.finished:
                    self._append(row, token)
            progress()
        if kept:
            self._add_values(rows, *(torch.stack(x, 1) for x in zip(*kept, strict=True)))

    def _decode_spans(self, rows: list[Sampled], batch: Batch, progress: Callable[[], None]) -> None:
        """Decode spans of tokens; rows that are finished leave the batch when half of it is."""
        assert self._decoder is not None
        at = list(range(len(rows)))  # rows of the batch, without surplus ones
        n = 1
        while n < self.settings.max_new_tokens and any(not row.finished for row in rows):
            living = [i for i, row in enumerate(at) if not rows[row].finished]
            size = size_for(len(living))
            if size <= batch.size // 2:
                batch = self._decoder.narrowed(batch, [*living, *[living[0]] * (size - len(living))])
                at = [at[i] for i in living]
            span = min(SPAN, self.settings.max_new_tokens - n)
            for _ in range(span):
                batch.step()
            n += span
            values = (x[: len(at), n - span : n] for x in (batch.tokens, batch.entropies, batch.log_probs))
            self._extend([rows[row] for row in at], *values)
            progress()

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
        self._add_values(rows, entropies, log_probs)

    def _add_values(self, rows: Sequence[Sampled], entropies: Tensor, log_probs: Tensor) -> None:
        """Add entropies and log-probabilities of the tokens that rows have got, `[B, n]`."""
        for row, along, own in zip(rows, entropies.cpu(), log_probs.cpu(), strict=True):
            count = len(row.ids) - len(row.log_probs)
            row.entropy += float(along[:count].sum())
            row.log_probs += own[:count].tolist()

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> tuple[Float[Tensor, "B V"], Any]:
        """Return the logits of the last position in float32, and the cache of keys and values."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._output(ids, mask, positions, cache)
        return output.logits[:, -1].float(), output.past_key_values

    def _logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Float[Tensor, "B V"]:
        """Return the logits of one token per row in float32."""
        logits: Tensor = self._output(ids, mask, positions, cache).logits[:, -1].float()
        return logits

    def _output(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        options = {"position_ids": positions} if self._has_positions else {}
        return self.model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options, **self._last
        )

    def _sample(
        self, logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"]
    ) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Return a token of each row, the entropy of its distribution and its log-probability."""
        allowed = logits.masked_fill(~self.vocabulary.allowed, -torch.inf)
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


def choose(logits: Float[Tensor, "B V"], uniforms: Float[Tensor, " B"], settings: RolloutSpec) -> Int[Tensor, " B"]:
    """Choose a token of each row by the inverse of its cumulative distribution.

    Args:
        logits: `-inf` for tokens that may not be chosen.
        uniforms: In [0, 1), float64.
        settings: Temperature, `top_k` and `top_p`.
    """
    if settings.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / settings.temperature
    if settings.top_k is not None and settings.top_k < logits.shape[1]:
        least = logits.topk(settings.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.double().softmax(dim=-1)
    if settings.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, order, before < settings.top_p)
        probabilities = probabilities.masked_fill(~kept, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    target = (uniforms * cumulative[:, -1]).unsqueeze(1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)


def entropy_of(logits: Float[Tensor, "B V"]) -> Float[Tensor, " B"]:
    """Return the entropy of each row's distribution in nats; `-inf` is probability 0."""
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


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
