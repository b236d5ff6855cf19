"""Baseline of a run: the same student on the same text, trained by cross-entropy only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec, parse_run_spec
from xtoken_core.errors import ConfigError

SUFFIX = "-baseline"


def baseline_output(output: Path) -> Path:
    """Return the directory of the baseline of a run that writes to `output`."""
    return output.with_name(output.name + SUFFIX)


def why_no_baseline(spec: Mapping[str, Any]) -> str:
    """Return why a run has no baseline; empty if it has one.

    Args:
        spec: Its settings as a document.
    """
    if not spec.get("teacher"):
        return "this run has no teacher, so it is its own baseline"
    rollout = spec.get("rollout")
    if rollout is not None and not rollout.get("after") and rollout.get("fraction", 1) in (1, [1, 1], (1, 1)):
        return "every sample of this run is a prompt (rollout.fraction = 1), so it has no text for the cross-entropy"
    return ""


def baseline_of(spec: RunSpec) -> RunSpec:
    """Return a run's baseline: its settings without teachers, its loss replaced by the cross-entropy.

    Text, order, steps, optimiser and evaluation are the run's own. Without teachers' rows a micro-batch may hold other
    samples than the run's; a step holds the same. Samples of which a run generates the completions are trained on as
    they are in the text.

    Args:
        spec: A run with absolute paths.

    Raises:
        ConfigError: It has none.
    """
    if reason := why_no_baseline(spec.model_dump()):
        raise ConfigError(f"no baseline: {reason}")
    document = spec.model_dump(exclude={"teacher", "loss", "rollout", "push_to"})
    document["output"] = baseline_output(spec.output)
    document["name"] = spec.name[: 64 - len(SUFFIX)] + SUFFIX
    for source in document["data"]["sources"]:
        source["teachers"] = None
    return parse_run_spec(document, source="the baseline")
