"""Baseline of a run: the same student on the same text, trained by cross-entropy only."""

from __future__ import annotations

from pathlib import Path

from xtoken_core.config.spec import RunSpec

SUFFIX = "-baseline"


def baseline_output(output: Path) -> Path:
    """Return the directory of the baseline of a run that writes to `output`."""
    return output.with_name(output.name + SUFFIX)


def baseline_of(spec: RunSpec) -> RunSpec:
    """Return a run's baseline: its settings without teachers, its loss replaced by the cross-entropy.

    Text, order, steps, optimiser and evaluation are the run's own. Without teachers' rows a micro-batch may hold other
    samples than the run's; a step holds the same.

    Args:
        spec: A run with absolute paths.
    """
    document = spec.model_dump(exclude={"teacher", "loss"})
    document["output"] = baseline_output(spec.output)
    document["name"] = spec.name[: 64 - len(SUFFIX)] + SUFFIX
    if document["eval"] is not None:
        document["eval"]["teacher_kl"] = False
    return RunSpec.model_validate(document)
