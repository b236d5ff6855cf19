"""The compared runs: what each changes in a run file that is the same for all."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from experiments.digits.settings import Scale

CROSS, SAME = "teacher-digits", "teacher-same"
"""The two teachers' directories: with a tokenizer of its own, and with the student's."""


@dataclass(frozen=True)
class Method:
    """A way to continue with a first student.

    Attributes:
        title: What tables call it.
        loss: Its `[loss]` table beside the weights below.
        teachers: Their directories.
        ce: `ce_loss_scale`; None scales dynamically.
        kl: `kl_loss_weight`.
        full: It compares whole vocabularies.
        custom: `MODULE:CLASS` of a loss outside the product; empty for a mode of the product.
    """

    title: str
    loss: dict[str, Any] = field(default_factory=dict)
    teachers: tuple[str, ...] = (CROSS,)
    ce: float | None = 0.1
    kl: float = 1.0
    full: bool = False
    custom: str = ""


CHAIN = {"mode": "chain", "chain_bare_space": False, "kl_loss_weight_end": "none"}
"""Without the nodes at a single space and with one weight to the end, as these runs were planned: no defaults."""

_CUSTOM = {"mode": "custom"}

METHODS = {
    "ce": Method("cross-entropy only", ce=1.0, kl=0.0),
    "gold": Method("gold", {"mode": "gold"}),
    "h_kl": Method("H-KL", {"mode": "h_kl"}),
    "p_kl": Method("P-KL, `log_prob` average"),
    "p_kl_prob": Method("P-KL, `prob` average", {"teacher_chunk_average": "prob"}),
    "p_kl_full": Method("P-KL over the full vocabulary", full=True),
    "uld": Method("ULD", {"mode": "uld"}),
    "alm": Method("ALM", {"mode": "alm", "alm_temperature": 100.0}),
    "alm1": Method("ALM, tau 1", {"mode": "alm", "alm_temperature": 1.0}),
    "alm1_ce1": Method("ALM, tau 1, CE weight 1", {"mode": "alm", "alm_temperature": 1.0}, ce=1.0),
    "chain": Method("chain", CHAIN),
    "chain_ce1": Method("chain, CE weight 1", CHAIN, ce=1.0),
    "chain_ce0": Method("chain, CE weight 0", CHAIN, ce=0.0),
    "chain_fading": Method("chain, fading to cross-entropy", CHAIN | {"kl_loss_weight_end": 0.0}),
    "chain_ce1_fading": Method("chain, CE weight 1, fading", CHAIN | {"kl_loss_weight_end": 0.0}, ce=1.0),
    "chain_alm1": Method(
        "chain and ALM, tau 1",
        CHAIN | {"teacher_modes": ["chain", "alm"], "alm_temperature": 1.0},
        teachers=(CROSS, CROSS),
    ),
    "chain_uncorrected": Method(
        "chain without corrections",
        CHAIN | {"chain_conditioning": False, "chain_end_terms": False, "chain_bare_space": True},
    ),
    "chain_unconditioned": Method("chain, not conditioned", CHAIN | {"chain_conditioning": False}),
    "chain_no_end": Method("chain without end terms", CHAIN | {"chain_end_terms": False}),
    "chain_bare_space": Method("chain with the bare space", CHAIN | {"chain_bare_space": True}),
    "same": Method("teacher with the student's tokenizer", teachers=(SAME,), full=True),
    "both": Method("both teachers, P-KL over full vocabularies", teachers=(CROSS, SAME), full=True),
    "p_kl_ce0": Method("P-KL, CE weight 0", ce=0.0),
    "p_kl_dynamic": Method("P-KL, dynamic scale", ce=None),
    "bpm": Method("BPM", _CUSTOM, custom="experiments.losses.bpm:BPMLoss"),
    "escd": Method("ESCD", _CUSTOM, custom="experiments.losses.escd:ESCDLoss"),
    "simct": Method("SimCT", _CUSTOM, custom="experiments.losses.simct:SimCTLoss"),
    "x_token_v6": Method(
        "X-Token v6",
        _CUSTOM,
        custom="experiments.losses.x_token_v6:XTokenV6Loss",
    ),
    "gold_bayesian": Method(
        "GOLD, bayesian merge", _CUSTOM, custom="experiments.losses.gold_bayesian:GoldBayesianLoss"
    ),
    "strict_top": Method("strict 1:1, top 16", _CUSTOM, custom="experiments.losses.strict_top:StrictTopLoss"),
}


def planned(scale: Scale) -> list[tuple[str, int]]:
    """Return every run as method and seed, seed by seed."""
    return [(name, seed) for seed in range(scale.seeds) for name in METHODS]


def run_name(name: str, seed: int) -> str:
    """Return the name of a run's directory."""
    return f"{name}-{seed}".replace("_", "-")


def custom_options(name: str) -> tuple[str, ...]:
    """Return the options of `xtoken run` for a method's own loss."""
    return ("--loss", METHODS[name].custom) if METHODS[name].custom else ()


def run_file(scale: Scale, name: str, seed: int) -> str:
    """Return the run's file; it lies in the directory that holds models, text and `runs/`."""
    method, train = METHODS[name], scale.go_on
    loss: dict[str, Any] = {"vocab_topk": "none" if method.full else train.vocab_topk, **method.loss}
    if method.custom:
        del loss["vocab_topk"]
    if method.ce is None:
        loss |= {"dynamic_loss_scaling": True}
    else:
        loss |= {"kl_loss_weight": method.kl, "ce_loss_scale": method.ce}
    tables: list[tuple[str, dict[str, Any]]] = [
        ("[student]", {"model": f"student-{seed}", "context_length": 160, "dtype": "float32"}),
        *(("[[teacher]]", _teacher(teacher)) for teacher in method.teachers),
        ("[data]", {"path": "text/more.jsonl", "epochs": 8}),
        ("[eval]", {"path": "text/heldout-code.jsonl", "every": train.evaluate_every, "max_bytes": 60_000}),
        ("[loss]", loss),
        (
            "[train]",
            {
                "samples_per_step": train.samples,
                "max_steps": train.steps,
                "micro_batch_tokens": train.samples * 192,
                "learning_rate": train.learning_rate,
                "min_learning_rate": train.learning_rate / 10,
                "warmup_steps": train.warmup,
                "weight_decay": 0.01,
                "checkpoint_every": train.evaluate_every,
                "keep_checkpoints": 1,
            },
        ),
        ("[report]", {"console_every": 100}),
        ("[workers]", {"collators": 1, "device": scale.device}),
    ]
    lines = [f'name = "{run_name(name, seed)}"', f'output = "runs/{run_name(name, seed)}"', f"seed = {seed}"]
    for header, table in tables:
        lines += ["", header, *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _teacher(directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": directory, "context_length": 192, "dtype": "float32"}
    return found if directory == SAME else {**found, "projection": "projection.safetensors"}
