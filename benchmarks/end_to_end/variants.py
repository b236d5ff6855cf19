"""The compared variants: the losses of the serial loop, and the settings of every run through the processes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lengths import DISTRIBUTIONS
from xtoken_core.config.loss import LossConfig
from xtoken_services.common.run.run_text import document_of

LOSSES = {
    "p_kl": LossConfig(mode="p_kl"),
    "gold": LossConfig(mode="gold"),
    "h_kl": LossConfig(mode="h_kl"),
    "chain": LossConfig(mode="chain"),
}


@dataclass(frozen=True)
class Variant:
    """A run through all processes.

    Attributes:
        loss: The key of its loss, and of the serial loop that it is compared with.
        changes: Tables of its RunSpec that differ from `run_spec`'s.
        wide: Four samples are one micro-batch; otherwise each sample is one, as in the serial loop.
        checkpointing: Activations are recomputed, in the serial loop too.
        mps: NVIDIA's MPS runs, so that processes on one GPU share it instead of taking turns.
        beside: The variant of the same result file that its rate and its losses are compared with, if any.
        lengths: The distribution of its documents' lengths; empty: all are as long as the context.
        samples: Samples of a step, if not the call's.
        budget: Tokens of a micro-batch at most, if not those of its samples.
        fixed: The variant of the same result file with documents of one length that its rate is compared with, if any.
        pair: Its models, by their key in `assets.PAIRS`.
    """

    loss: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    wide: bool = False
    checkpointing: bool = False
    mps: bool = False
    beside: str = ""
    lengths: str = ""
    samples: int = 0
    budget: int = 0
    fixed: str = ""
    pair: str = ""

    @property
    def loop(self) -> str:
        """The serial loop that it is compared with."""
        return self.loss + (" checkpointed" if self.checkpointing else "")


COMPILED: dict[str, dict[str, Any]] = {"student": {"compile": True}, "teacher": {"compile": True}}
LEAN: dict[str, dict[str, Any]] = {
    "student": {"compile": True, "blockwise_head": True},
    "teacher": {"compile": True, "content": "hidden"},
}
APART: dict[str, dict[str, Any]] = {**LEAN, "teacher": {"compile": True, "content": "hidden", "gpu": 1}}
SHARED: dict[str, dict[str, Any]] = {**LEAN, "workers": {"ranks": 2}, "train": {"parallel": "fsdp"}}
KEPT: dict[str, dict[str, Any]] = {
    **SHARED,
    "train": {"parallel": "fsdp", "reshard_after_forward": False, "reduce_dtype": "bfloat16"},
}
EIGHT_BITS: dict[str, dict[str, Any]] = {**COMPILED, "teacher": {"compile": True, "quantized": "fp8"}}
PADDED: dict[str, dict[str, Any]] = {**LEAN, "train": {"packing": "off"}}
MIXED: dict[str, Any] = {"samples": 16, "budget": 16_384, "wide": True}
SMALL_MODELS: dict[str, Any] = {"samples": 128, "budget": 32_768, "wide": True, "pair": "135m_270m"}
ROWS_TOGETHER = 4
"""Samples of a micro-batch in a wide variant."""

VARIANTS = {
    "p_kl_eager": Variant("p_kl"),
    "p_kl_hidden": Variant("p_kl", LEAN),
    "p_kl_wide": Variant("p_kl", COMPILED, wide=True),
    "p_kl_hidden_wide": Variant("p_kl", LEAN, wide=True),
    "p_kl_hidden_checkpointed": Variant("p_kl", LEAN, checkpointing=True),
    "p_kl_wide_mps": Variant("p_kl", COMPILED, wide=True, mps=True, beside="p_kl_wide"),
    "p_kl_hidden_wide_mps": Variant("p_kl", LEAN, wide=True, mps=True, beside="p_kl_hidden_wide"),
    "p_kl_fp8_wide": Variant("p_kl", EIGHT_BITS, wide=True, beside="p_kl_wide"),
    "p_kl_fp8_wide_mps": Variant("p_kl", EIGHT_BITS, wide=True, mps=True, beside="p_kl_wide"),
    "gold_wide": Variant("gold", COMPILED, wide=True),
    "gold_wide_mps": Variant("gold", COMPILED, wide=True, mps=True, beside="gold_wide"),
    "h_kl_wide": Variant("h_kl", COMPILED, wide=True),
    "chain_wide": Variant("chain", COMPILED, wide=True),
    "chain_hidden_wide": Variant("chain", LEAN, wide=True),
    "chain_fp8_wide": Variant("chain", EIGHT_BITS, wide=True, beside="chain_wide"),
    "fixed_lengths": Variant("p_kl", LEAN, **MIXED),
    **{f"{name}_padded": Variant("p_kl", PADDED, **MIXED, lengths=name) for name in DISTRIBUTIONS},
    **{
        f"{name}_packed": Variant("p_kl", LEAN, **MIXED, lengths=name, beside=f"{name}_padded", fixed="fixed_lengths")
        for name in DISTRIBUTIONS
    },
    "small_fixed": Variant("p_kl", LEAN, **SMALL_MODELS),
    "small_text_padded": Variant("p_kl", PADDED, **SMALL_MODELS, lengths="text"),
    "small_text_packed": Variant(
        "p_kl", LEAN, **SMALL_MODELS, lengths="text", beside="small_text_padded", fixed="small_fixed"
    ),
    "teacher_apart": Variant("p_kl", APART, wide=True, beside="p_kl_hidden_wide"),
    "two_ranks": Variant("p_kl", SHARED, wide=True, beside="p_kl_hidden_wide"),
    "two_ranks_kept": Variant("p_kl", KEPT, wide=True, beside="p_kl_hidden_wide"),
    "two_ranks_mps": Variant("p_kl", KEPT, wide=True, mps=True, beside="p_kl_hidden_wide_mps"),
}

DEFAULT = ("p_kl_hidden", "p_kl_wide", "h_kl_wide", "p_kl_fp8_wide", "p_kl_hidden_checkpointed", "gold_wide")
"""What the page holds to a limit on one GPU."""


def run_spec(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the variant's RunSpec as plain values, without its files.

    Weights, gradients and AdamW's moments are bfloat16, as in the serial loop.
    """
    loss = document_of(LOSSES[variant.loss], exclude_defaults=True)
    samples, context = variant.samples or arguments.samples, context_of(variant, arguments)
    base: dict[str, dict[str, Any]] = {
        "student": {"dtype": "bfloat16", "context_length": context, "checkpoint_activations": variant.checkpointing},
        "teacher": {"dtype": "bfloat16", "context_length": context},
        "loss": loss,
        "train": {
            "samples_per_step": samples,
            "micro_batch_tokens": variant.budget or context * (min(samples, ROWS_TOGETHER) if variant.wide else 1),
            "max_steps": arguments.steps + arguments.warmup,
            "checkpoint_every": 1_000_000,
            "learning_rate": 1e-5,
            "master_weights": False,
        },
        "queue": {},
        "workers": {"collators": 2, "slots": 3},
    }
    merged = {name: {**table, **variant.changes.get(name, {})} for name, table in base.items()}
    if arguments.small:
        _for_a_cpu(merged)
    return {"name": "end-to-end", **merged}


def context_of(variant: Variant, arguments: argparse.Namespace) -> int:
    """Return the context of a variant: that of its lengths, or the call's; a small call cuts it."""
    if not variant.lengths:
        return int(arguments.context)
    context = DISTRIBUTIONS[variant.lengths].context
    return min(context, int(arguments.context)) if arguments.small else context


def _for_a_cpu(spec: dict[str, dict[str, Any]]) -> None:
    """Reduce the settings to those that a machine without a GPU has: only the harness is tried."""
    import torch

    if torch.cuda.is_available():
        return
    for name in ("student", "teacher"):
        spec[name].update(compile=False, dtype="float32")
    spec["teacher"].pop("quantized", None)
