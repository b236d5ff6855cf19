"""Decoding on a GPU: keys and values in memory of a fixed size, and one CUDA graph per shape of a batch.

A token of a small model takes hundreds of kernels that are shorter than their launches. A graph launches all of them at
once, the sampling included, and the host reads the tokens of a span of steps together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from xtoken_services.common.generation.sampling import Sample, fixed

log = logging.getLogger("xtoken.rollout")

NAME = "xtoken_decode"
LENGTHS = 64
"""Lengths of keys and values are multiples of it, so that batches of other prompts use the same graph."""
SMALLEST = 8
"""Rows of the smallest batch; larger ones are multiples of it."""
# Each graph keeps its kernels' parameters and workspaces on the device.
MAX_GRAPHS = 24
WARM_UP = 2
"""Steps before the capture: libraries choose their kernels and allocate what they need; the last one must not wait."""
TOLERANCE = 0.1
"""Relative deviation of logits, in half precision, below which two results are the same but for rounding."""

FAILURES = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""How a model's code may fail that takes no mask of four dimensions."""


def decode_attention(
    module: nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H_kv L D"],
    value: Float[Tensor, "B H_kv L D"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B T H D"], None]:
    """Compute attention; for one token per row without a copy of the keys for every head of a group.

    The heads that share keys and values take the place of the query's positions.

    Args:
        module: The attention layer.
        query: Its heads of one group follow one another.
        key: `H_kv` divides `H`.
        value: Likewise.
        attention_mask: Of `[B, 1, T, L]`, added to the logits; None: causal.
        dropout: Probability.
        scaling: Factor of the logits; None: `D ** -0.5`.
        options: What else the model gives its attention.
    """
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    # The short cut is for one new token and shared keys; a prefill and other forms go the library's way.
    if attention_mask is None or length > 1 or heads == groups or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    shared = query.reshape(batch, groups, heads // groups, -1)  # [B, H_kv, H / H_kv, D]
    mask = attention_mask.expand(batch, groups, heads // groups, -1)
    out = scaled_dot_product_attention(shared, key, value, mask, scale=scaling)
    return out.reshape(batch, 1, heads, -1), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class FixedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of a layer in memory of a fixed size; new ones are written at a column.

    Args:
        keys: `[B, H_kv, L, D]`.
        values: `[B, H_kv, L, D']`.
        column: `[1]` int64, where the next token's are written.
    """

    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.column = column
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values; return all."""
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory is there."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return the length of the memory; positions are given to the model explicitly."""
        return int(self.keys.shape[2])

    def get_max_length(self) -> int:
        """Return the length of the memory."""
        return int(self.keys.shape[2])

    get_max_cache_shape = get_max_length


class Batch:
    """Rows of one shape that are decoded together.

    Args:
        decoder: Its model, sampling and memory.
        size: Rows.
        length: Columns of keys and values.
    """

    # Longer spans decode more tokens behind an end of text; shorter ones let the host wait more often.
    span = 16
    """Tokens of a row between two looks of the host."""

    def __init__(self, decoder: Decoder, size: int, length: int) -> None:
        self.decoder, self.size, self.length = decoder, size, length
        new, device = decoder.max_tokens, decoder.device
        self.ids = torch.zeros(size, 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.ids)
        self.column = torch.zeros(1, dtype=torch.int64, device=device)
        self.number = torch.zeros_like(self.column)
        self.mask = torch.zeros(size, 1, 1, length, dtype=decoder.dtype, device=device)
        self.uniforms = torch.zeros(size, new, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(size, new, dtype=torch.int64, device=device)
        self.entropies, self.log_probs = (torch.zeros(size, new, device=device) for _ in range(2))
        self.layers = []
        for (keys, values), (of_keys, of_values) in zip(decoder.memory, decoder.shapes, strict=True):
            own = _view(keys, size, length, of_keys), _view(values, size, length, of_values)
            self.layers.append(FixedLayer(*own, self.column))
        self.cache = Cache(layers=[*self.layers])
        self._graph: Any = None

    def step(self) -> None:
        """Decode one token of every row."""
        if self._graph is None:
            self._decode()
        else:
            self._graph.replay()

    def made(self, rows: int, first: int, last: int) -> list[Tensor]:
        """Return tokens, entropies and log-probabilities of the first rows, `[rows, last - first]` each."""
        return [x[:rows, first:last] for x in (self.tokens, self.entropies, self.log_probs)]

    def narrowed(self, living: Sequence[int]) -> Batch:
        """Return a batch of these rows, this one left unusable, if half its size holds them, or else this one."""
        size = size_for(len(living))
        if not living or size > self.size // 2:
            return self
        return self.decoder.narrowed(self, [*living, *[living[0]] * (size - len(living))])

    def capture(self, stream: Any) -> None:
        """Capture a step as a CUDA graph; what the warm-up writes is restored.

        Args:
            stream: A stream of the model's device, which is the current one.

        Raises:
            RuntimeError: A step waits for the device, cannot be captured, or has another result as a graph.
        """
        kept = [x.clone() for x in self._changed()]
        # No capture on the default stream; but what was queued there is the capture's input.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for left in reversed(range(WARM_UP)):
                try:
                    with nullcontext() if left else _no_waiting():
                        self._decode()
                finally:
                    self._restore(kept)
        torch.cuda.current_stream().wait_stream(stream)
        expected = self.entropies.index_select(1, self.number)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.decoder.pool, stream=stream, capture_error_mode="thread_local"):
            self._decode()
        self.entropies.index_fill_(1, self.number, torch.nan)  # a graph that does nothing must be noticed
        graph.replay()
        self._restore(kept)
        replayed = self.entropies.index_select(1, self.number)
        if not float((replayed - expected).norm()) <= TOLERANCE * max(float(expected.norm()), TOLERANCE):
            raise RuntimeError("a step by the graph differs from one without it")
        self._graph = graph

    @property
    def captured(self) -> bool:
        """True once a step is a graph."""
        return self._graph is not None

    def _changed(self) -> list[Tensor]:
        return [self.ids, self.positions, self.column, self.number, self.mask]

    def _restore(self, kept: Sequence[Tensor]) -> None:
        for x, before in zip(self._changed(), kept, strict=True):
            x.copy_(before)

    def _decode(self) -> None:
        # The column that this step writes becomes visible to it: 0 is added to its logits.
        self.mask.index_fill_(3, self.column, 0.0)
        logits = self.decoder.forward(self.ids, self.mask, self.positions, self.cache)
        uniforms = self.uniforms.index_select(1, self.number).squeeze(1)
        chosen, entropy, log_prob = self.decoder.sample(logits, uniforms)
        for buffer, new in ((self.tokens, chosen), (self.entropies, entropy), (self.log_probs, log_prob)):
            buffer.index_copy_(1, self.number, new.unsqueeze(1).to(buffer.dtype))
        self.ids.copy_(chosen.unsqueeze(1))
        for counter in (self.positions, self.column, self.number):
            counter.add_(1)


class Decoder:
    """Decodes batches of one model.

    Args:
        model: A Hugging Face causal language model; its attention is set.
        forward: From ids `[B, 1]`, mask `[B, 1, 1, L]`, positions `[B, 1]` and a cache, the logits `[B, V]`.
        sample: The sampling.
        tokens: Maximum of tokens of a completion.
    """

    def __init__(self, model: Any, forward: Callable[..., Tensor], sample: Sample, tokens: int) -> None:
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(NAME)
        self.model, self.forward, self.sample, self.max_tokens = model, forward, sample, tokens
        self.device, self.dtype = model.device, model.dtype
        self.memory: list[tuple[Tensor, Tensor]] = []
        self.shapes: list[tuple[tuple[int, int], tuple[int, int]]] = []
        on_gpu = self.device.type == "cuda"
        self.pool: Any = torch.cuda.graph_pool_handle() if on_gpu else None
        self._stream: Any = torch.cuda.Stream(self.device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._batches: dict[tuple[int, int], Batch] = {}
        self._room = 0
        self._agreed: bool | None = None

    @property
    def sizes(self) -> list[int]:
        """Rows of the shapes of batches so far."""
        return [size for size, _ in self._batches]

    def start(
        self, cache: Any, mask: Int[Tensor, "B T"], first: Int[Tensor, " B"], uniforms: Float[Tensor, "B N"]
    ) -> Batch | None:
        """Copy a prefilled batch into fixed memory, ready to decode.

        Args:
            cache: The model's own, of the prompts.
            mask: 1 for tokens of a prompt, which is padded on the left.
            first: Each row's first token.
            uniforms: Of all tokens.

        Returns:
            The batch; None if this model's cache does not fit.
        """
        rows, width = mask.shape
        length = -(-(width + self.max_tokens) // LENGTHS) * LENGTHS
        if self._agreed is False or not fixed(cache, length):
            return None
        size = -(-rows // SMALLEST) * SMALLEST
        self.reserve(cache, size * length)
        batch = self._batch(size, length)
        row = torch.arange(size, device=self.device) % rows  # surplus rows repeat others
        for layer, own in zip(batch.layers, cache.layers, strict=True):
            layer.keys[:, :, :width] = own.keys[row]
            layer.values[:, :, :width] = own.values[row]
            layer.keys[:, :, width:] = 0  # memory that was never written could hold NaN, which no mask removes
            layer.values[:, :, width:] = 0
        batch.mask.fill_(torch.finfo(self.dtype).min)
        batch.mask[:, 0, 0, :width].masked_fill_(mask[row].bool(), 0.0)
        batch.ids.copy_(first[row].unsqueeze(1))
        batch.positions.copy_(mask.sum(1)[row].unsqueeze(1))
        batch.column.fill_(width)
        batch.number.fill_(1)
        batch.uniforms.copy_(uniforms[row])
        if self._agreed is None:
            self._agreed = self._agrees(batch, cache, mask, first)
        if not self._agreed:
            return None
        self._capture(batch)
        return batch

    def narrowed(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """Return a smaller batch of some of a batch's rows, which may be repeated; the batch is left unusable."""
        smaller = self._batch(len(rows), batch.length)
        index = torch.tensor(rows, device=self.device)
        for old, new in zip(batch.layers, smaller.layers, strict=True):
            keys, values = old.keys[index], old.values[index]  # copies: both batches use the same memory
            new.keys.copy_(keys)
            new.values.copy_(values)
        for name in ("ids", "positions", "mask", "uniforms"):
            getattr(smaller, name).copy_(getattr(batch, name)[index])
        # Counters are tensors: a graph reads them on the device, whatever the host believes.
        smaller.column.copy_(batch.column)
        smaller.number.copy_(batch.number)
        self._capture(smaller)
        return smaller

    def _capture(self, batch: Batch) -> None:
        if self.pool is None or batch.captured:
            return
        with torch.cuda.device(self.device):
            current, began = torch.cuda.current_stream(), time.monotonic()
            try:
                batch.capture(self._stream)
                log.info(
                    "CUDA graph of %d rows, %d columns: %.2f s", batch.size, batch.length, time.monotonic() - began
                )
            except RuntimeError as error:  # a kernel that waits for the host, in this model or this way of sampling
                log.warning("the student is decoded without CUDA graphs: %s", str(error).splitlines()[0])
                torch.cuda.set_stream(current)  # torch stays on the stream of a capture that fails
                torch.cuda.synchronize()
                self.pool = None

    def _batch(self, size: int, length: int) -> Batch:
        if (size, length) not in self._batches:
            if len(self._batches) >= MAX_GRAPHS:
                self._drop_batches()
            self._batches[size, length] = Batch(self, size, length)
        return self._batches[size, length]

    def _drop_batches(self) -> None:
        """Drop all batches and their graphs, and with them the memory of graphs: torch takes its handle only once."""
        self._batches.clear()
        if self.pool is not None:
            self.pool = torch.cuda.graph_pool_handle()

    def reserve(self, cache: Any, cells: int) -> None:
        """Allocate memory for `cells` cache positions; growing it drops all captured graphs."""
        if cells <= self._room:
            return
        self._drop_batches()
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
        self.shapes = [tuple((x.shape[1], x.shape[3]) for x in pair) for pair in pairs]  # type: ignore[misc]
        self.memory.clear()
        for pair in pairs:
            keys, values = (x.new_zeros(cells * x.shape[1] * x.shape[3]) for x in pair)
            self.memory.append((keys, values))
        self._room = cells

    def _agrees(self, batch: Batch, cache: Any, mask: Tensor, first: Tensor) -> bool:
        """Return True if a step in fixed memory has the result of the model's own cache; both are left as they were."""
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = mask.sum(1, keepdim=True)
        expected = self.forward(first.unsqueeze(1), longer, positions, cache)
        cache.crop(-1)
        batch.mask.index_fill_(3, batch.column, 0.0)
        try:
            own = self.forward(batch.ids, batch.mask, batch.positions, batch.cache)[: len(first)]
            deviation = float((own - expected).norm() / expected.norm().clamp(min=1e-12))
        except FAILURES as error:
            log.info("the student is not decoded by CUDA graphs: %s", error)
            return False
        if deviation > TOLERANCE:
            log.info("the student is not decoded by CUDA graphs: relative deviation %.2g", deviation)
        return deviation <= TOLERANCE


def size_for(rows: int) -> int:
    """Round a number of rows up to one of a few batch sizes, so that few graphs are captured."""
    size = SMALLEST
    while size < rows:
        size *= 2
    return size


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Make torch raise RuntimeError inside the block where it would wait for the device, as no capture may."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _view(memory: Tensor, size: int, length: int, shape: tuple[int, int]) -> Tensor:
    heads, width = shape
    return memory[: size * heads * length * width].view(size, heads, length, width)
