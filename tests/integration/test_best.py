"""A run that gets worse, in real processes: it ends early, and its model is that of the best evaluation."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.conftest import Crew
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl
from xtoken_core.config.spec import RunSpec
from xtoken_services.supervisor.run_record import has_ended_early
from xtoken_services.trainer.export_checkpoint import export_checkpoint, step_of_best

Start = Callable[[RunSpec], Crew]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_gets_worse_ends_early_with_its_best_model(
    assets: TinyAssets, tmp_path: Path, start: Start, ranks: int
) -> None:
    held_out = write_jsonl(tmp_path / "heldout.jsonl", documents(6, seed=5))
    spec = tiny_spec(
        assets, tmp_path, records=800,
        train={"learning_rate": 3.0, "warmup_steps": 60, "keep_checkpoints": 1, "checkpoint_every": 1000},
        eval={"path": held_out, "every": 2, "keep_best": True, "patience": 2}, workers={"ranks": ranks},
    )  # fmt: skip
    start(spec).complete()
    summary = json.loads((spec.output / "summary.json").read_text())
    rows = [json.loads(line) for line in (spec.output / "eval.jsonl").read_text().splitlines()]
    best = min(rows[1:], key=lambda row: row["bits_per_byte"])
    assert summary["best"]["step"] == best["step"] == rows[-1]["step"] - 4
    assert "eval.patience" in summary["stopped_early"]
    assert summary["steps"] == len(steps_of(spec.output)) == rows[-1]["step"] < 100
    assert summary["trained"] == 8 * summary["steps"] < summary["positions"]
    assert has_ended_early(spec.output, summary["steps"])
    exported = export_checkpoint(spec.output, step_of_best(spec.output, None), tmp_path / "best")
    assert exported.step == best["step"]
    ours, theirs = (load_file(where / "model.safetensors") for where in (spec.output / "model", exported.target))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert f"after {best['step']} of the run's 100 steps" in (spec.output / "model" / "README.md").read_text()
