"""A resolved run without any file behind it, for tests of what workers do with one."""

from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
from xtoken_core.config.spec import RunSpec


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
