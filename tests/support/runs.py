"""A resolved run without any file behind it, for tests of what workers do with one."""

from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
from xtoken_core.config.spec import RunSpec


def changed(run: ResolvedRun, **parts: Any) -> ResolvedRun:
    """A run with other parts of its specification, not checked again; a dict changes some settings of its part."""
    whole = {
        name: getattr(run.spec, name).model_copy(update=part) if isinstance(part, dict) else part
        for name, part in parts.items()
    }
    return run.model_copy(update={"spec": run.spec.model_copy(update=whole)})


def revised(spec: RunSpec, **changes: Any) -> RunSpec:
    """A specification with other settings, checked; a dict changes some settings of a part, or of every teacher."""
    raw = spec.model_dump()
    for part, value in changes.items():
        if isinstance(value, dict) and part == "teacher":
            raw[part] = [teacher | value for teacher in raw[part]]
        else:
            raw[part] = raw[part] | value if isinstance(value, dict) and isinstance(raw[part], dict) else value
    return RunSpec.model_validate(raw)


def revised_run(run: ResolvedRun, **changes: Any) -> ResolvedRun:
    """A run whose specification is `revised`."""
    return run.model_copy(update={"spec": revised(run.spec, **changes)})


def resolved_run(directory: Path, *, positions: int = 32, teachers: int = 1, **workers: Any) -> ResolvedRun:
    """`positions` samples in steps of 8, for `teachers` teachers with tokenizers of their own."""
    spec = RunSpec.model_validate(
        {
            "output": directory / "out",
            "student": {"model": directory / "student", "context_length": 64},
            "teacher": [
                {"model": directory / f"teacher-{i}", "context_length": 96, "projection": directory / f"{i}.pt"}
                for i in range(teachers)
            ],
            "data": {"path": directory / "data.jsonl"},
            "train": {"samples_per_step": 8, "micro_batch_tokens": 192},
            "workers": workers,
        }
    )
    return ResolvedRun(
        spec=spec,
        student=ResolvedModel(vocab_size=50, head_width=50, tokenizer_fingerprint="s"),
        teachers=tuple(
            ResolvedModel(vocab_size=60, head_width=64, tokenizer_fingerprint=f"t{i}") for i in range(teachers)
        ),
        projection_fingerprints=tuple(f"p{i}" for i in range(teachers)),
        data_fingerprint="d",
        records=positions,
        positions=positions,
    )
