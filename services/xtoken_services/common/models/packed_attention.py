"""Attention of models on packed rows: no token attends to one of another sample.

The function is registered with transformers' attention interface. A forward pass on a packed row gives it the row's
segments; without them it is transformers' own scaled dot-product attention.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from xtoken_core.errors import ConfigError
from xtoken_core.packing import PackedRow, Segments


def _varlen_attention() -> Callable[..., Any] | None:
    """Return torch's flash attention of variable lengths; None if this torch has none."""
    try:
        attention: Callable[..., Any] = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:  # torch before 2.10
        return None
    return attention


NAME = "xtoken_packed"
HALF = (torch.float16, torch.bfloat16)
MAX_HEAD = 256
"""Columns of a head at most in flash attention."""
OLDEST = (8, 0)
"""Compute capability of the first GPUs with flash attention."""
VARLEN = _varlen_attention()
_OPTIONS = frozenset(inspect.signature(VARLEN).parameters) if VARLEN is not None else frozenset()
PROBE_TOKENS = (5, 3)
"""Lengths of the two samples that `check_packing` packs."""
PROBE_TOLERANCE = 0.02
"""Relative deviation below which two results are the same but for rounding."""


def copied_to(device: torch.device, x: Tensor) -> Tensor:
    """Return a tensor on a device; to a GPU it is copied through pinned memory, without synchronisation."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def packed_inputs(row: PackedRow, device: torch.device, *, longest: int) -> dict[str, Any]:
    """Return the arguments of a model's forward pass for a packed row, besides the ids.

    Args:
        row: The layout.
        device: Device of the model; the copy does not wait for it.
        longest: Maximum of tokens per sample in the whole run.
    """
    lengths = row.segments
    flash = device.type == "cuda" and VARLEN is not None and torch.cuda.get_device_capability(device) >= OLDEST
    return {
        "position_ids": copied_to(device, row.positions()),
        # transformers returns a mask of four dimensions as it is, so that none is built; attention does not read it.
        "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device),
        "segments": Segments(lengths, copied_to(device, row.boundaries()), max(longest, *lengths), flash),
    }


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B H_kv T D"],
    value: Float[Tensor, "B H_kv T D"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "B T H D"], None]:
    """Compute causal attention inside every segment of a packed row.

    Args:
        module: The attention layer.
        query: `B` is 1 on a packed row.
        key: Fewer heads than the query's are each shared by a group of them.
        value: Likewise.
        attention_mask: Read only without segments.
        dropout: Probability.
        scaling: Factor of the logits; None: `D ** -0.5`.
        sliding_window: Tokens that each token sees, itself included; None: all before it.
        segments: Of the packed row; None: the batch is padded.
        options: What else the model gives its attention.
    """
    if segments is None:
        options |= {"sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    if segments.flash and not dropout and _takes_varlen(query, value, sliding_window):
        out = _varlen(query, key, value, segments, scaling, sliding_window)
    else:
        out = _by_segment(query, key, value, segments, dropout, scaling, sliding_window)
    return out, None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _takes_varlen(query: Tensor, value: Tensor, window: int | None) -> bool:
    """Return True if flash attention of variable lengths computes these heads."""
    width = query.shape[-1]
    fits = query.dtype in HALF and width == value.shape[-1] and width <= MAX_HEAD and width % 8 == 0
    return fits and (window is None or "window_size" in _OPTIONS)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None, window: int | None
) -> Float[Tensor, "one T H D"]:
    """Compute all segments by one kernel."""
    assert VARLEN is not None
    options: dict[str, Any] = {}
    if "window_size" in _OPTIONS:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        options["is_causal"] = True
    if "enable_gqa" in _OPTIONS:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    if scaling is not None and "scale" in _OPTIONS:
        options["scale"] = scaling
    elif scaling is not None:
        query = query * (scaling * query.shape[-1] ** 0.5)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, H, D]
    bounds = segments.boundaries
    out: Tensor = VARLEN(*rows, bounds, bounds, segments.longest, segments.longest, **options)
    return out.unsqueeze(0)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # its stub has no types; lengths change with every row
def _by_segment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Float[Tensor, "one T H D"]:
    """Compute one segment after the other."""
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for q, k, v in zip(*(torch.split(x, list(segments.lengths), dim=2) for x in (query, key, value)), strict=True):
        mask = None if window is None or q.shape[2] <= window else _window_mask(q.shape[2], window, q.device)
        parts.append(
            scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return `[T, T]` bool: token i sees the `window` tokens up to itself."""
    position = torch.arange(length, device=device)
    back = position.unsqueeze(1) - position
    return (back >= 0) & (back < window)


@torch.no_grad()
def check_packing(model: PreTrainedModel, what: str) -> None:
    """Check that a model keeps the samples of a packed row apart: what comes before one must have no effect on it.

    Args:
        model: In evaluation mode, loaded with `attn_implementation = NAME`.
        what: Name of the model for errors.

    Raises:
        ConfigError: It mixes them, or counts positions over the whole row.
    """
    first, second = PROBE_TOKENS
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(2 * first + second, device=model.device).unsqueeze(0) % vocabulary
    one, other, probed = tokens.split([first, first, second], dim=1)

    def states(ids: Tensor, lengths: tuple[int, int]) -> Tensor:
        inputs = packed_inputs(PackedRow(lengths, first + second), model.device, longest=first + second)
        result: Tensor = model.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        return result.float()

    behind = states(torch.cat([one, probed], dim=1), (first, second))[:, first:]
    ahead = states(torch.cat([probed, other], dim=1), (second, first))[:, :second]
    deviation = (ahead - behind).norm() / ahead.norm().clamp(min=1e-12)
    if not deviation <= PROBE_TOLERANCE:
        raise ConfigError(
            f"the {what}'s model mixes the samples of a packed row (relative deviation {float(deviation):.2g}): "
            'set train.packing to "off"'
        )
