"""The compared runs: cross-entropy, and chain on given text, on the student's completions, and on both."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.digits.methods import run_file
from experiments.digits.settings import Scale

PROMPT_CHARACTERS = 12
"""Of a document: about its first problem, or the first word of source text."""


@dataclass(frozen=True)
class Method:
    """A way to continue with a first student.

    Attributes:
        title: Its name in tables.
        fraction: Fraction of a step's samples that the student generates.
        base: The method of the experiment on given text whose run file it changes.
        loss: Changes of its `[loss]` table.
    """

    title: str
    fraction: float = 0.0
    base: str = "chain"
    loss: dict[str, Any] = field(default_factory=dict)


METHODS = {
    "ce": Method("cross-entropy only", base="ce"),
    "off_policy": Method("off-policy"),
    "on_policy": Method("on-policy", 1.0),
    "mixture": Method("half on-policy", 0.5),
    "on_policy_reverse": Method("on-policy, reverse KL", 1.0, loss={"reverse_kl": True}),
}


def planned(scale: Scale) -> list[tuple[str, int]]:
    """Return every run as method and seed, seed by seed."""
    return [(name, seed) for seed in range(scale.seeds) for name in METHODS]


def run_name(name: str, seed: int) -> str:
    """Return the name of a run's directory."""
    return f"generated-{name.replace('_', '-')}-{seed}"


def file_of(scale: Scale, name: str, seed: int, *, steps: int, max_new_tokens: int) -> str:
    """Return the text of a run's file: that of chain on given text, with completions.

    Args:
        scale: The experiment's size.
        name: One of `METHODS`.
        seed: Of the first student and of the order of documents.
        steps: Optimiser steps.
        max_new_tokens: Tokens of a completion at most.
    """
    method, tables = METHODS[name], tomllib.loads(run_file(scale, METHODS[name].base, seed))
    tables |= {"name": run_name(name, seed), "output": f"runs/{run_name(name, seed)}"}
    tables["loss"] |= method.loss
    tables["train"] |= {"max_steps": steps, "checkpoint_every": steps}
    tables["eval"] |= {"every": steps}
    if method.fraction:
        tables["rollout"] = {
            "fraction": method.fraction,
            "prompt_characters": PROMPT_CHARACTERS,
            "max_new_tokens": max_new_tokens,
        }
        # All prompts of a step are one batch.
        tables["queue"] = {"block_size": round(method.fraction * tables["train"]["samples_per_step"])}
    return toml_of(tables)


def toml_of(tables: Mapping[str, Any]) -> str:
    """Return settings as a run file; a list of tables is written only for `teacher`."""
    return "\n".join(_lines(tables)) + "\n"


def _lines(tables: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tables.items():
        if not isinstance(value, dict) and key != "teacher":
            yield f"{key} = {json.dumps(value)}"
    for key, value in tables.items():
        for table in value if key == "teacher" else [value] if isinstance(value, dict) else []:
            yield from ("", f"[[{key}]]" if key == "teacher" else f"[{key}]")
            yield from (f"{name} = {json.dumps(entry)}" for name, entry in table.items())
