"""What is compared: the losses of the serial loop, and the settings of every run through the processes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from xtoken_core.config.loss import LossConfig

LOSSES = {
    "p_kl": LossConfig(),
    "gold": LossConfig(gold_loss=True),
    "h_kl": LossConfig(gold_loss=True, xtoken_loss=True),
}


@dataclass(frozen=True)
class Variant:
    """A run through all processes.

    Attributes:
        loss: The key of its loss, and of the serial loop that it is compared with.
        changes: Tables of its RunSpec that differ from `run_spec`'s.
        wide: A whole step is one micro-batch; otherwise each sample is one, as in the serial loop.
        checkpointing: Activations are recomputed, in the serial loop too.
    """

    loss: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    wide: bool = False
    checkpointing: bool = False


COMPILED: dict[str, dict[str, Any]] = {"student": {"compile": True}, "teacher": {"compile": True}}
LEAN: dict[str, dict[str, Any]] = {
    "student": {"compile": True, "blockwise_head": True},
    "teacher": {"compile": True},
    "workers": {"signal": "cuda_ipc_hidden"},
}

VARIANTS = {
    "p_kl_checkpointed": Variant("p_kl", COMPILED, checkpointing=True),
    "p_kl_eager": Variant("p_kl"),
    "p_kl": Variant("p_kl", COMPILED),
    "p_kl_shared_memory": Variant("p_kl", {**COMPILED, "workers": {"signal": "shared_memory"}}),
    "p_kl_hidden": Variant("p_kl", LEAN),
    "p_kl_wide": Variant("p_kl", COMPILED, wide=True),
    "p_kl_hidden_wide": Variant("p_kl", LEAN, wide=True),
    "p_kl_fp8": Variant("p_kl", {**COMPILED, "teacher": {"compile": True, "fp8": True}}),
    "gold": Variant("gold", COMPILED),
    "gold_wide": Variant("gold", COMPILED, wide=True),
    "gold_hidden": Variant("gold", LEAN),
    "h_kl": Variant("h_kl", COMPILED),
}


def run_spec(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """The variant's RunSpec as plain values, without its files.

    Weights, gradients and AdamW's moments are bfloat16, as in the serial loop.
    """
    loss = LOSSES[variant.loss].model_dump(mode="json", exclude_defaults=True)
    base: dict[str, dict[str, Any]] = {
        "student": {
            "dtype": "bfloat16",
            "context_length": arguments.context,
            "checkpoint_activations": variant.checkpointing,
        },
        "teacher": {"dtype": "bfloat16", "context_length": arguments.context},
        "loss": loss,
        "train": {
            "samples_per_step": arguments.samples,
            "micro_batch_tokens": arguments.context * (arguments.samples if variant.wide else 1),
            "max_steps": arguments.steps + arguments.warmup,
            "checkpoint_every": 1_000_000,
            "learning_rate": 1e-5,
            "master_weights": False,
        },
        "queue": {},
        "workers": {"collators": 2, "slots": 3},
    }
    merged = {name: {**table, **variant.changes.get(name, {})} for name, table in base.items()}
    return {"name": "end-to-end", **merged}
