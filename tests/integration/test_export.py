"""Models that real runs leave: from checkpoints while one goes on and after it, and of the best evaluation."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.conftest import Tiny
from tests.support.tiny_run import documents, steps_of, write_jsonl
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.run_record import has_ended_early
from xtoken_services.trainer.export_checkpoint import export_checkpoint, step_of_best


@pytest.mark.slow
def test_a_model_is_made_while_a_run_goes_on_and_the_last_is_the_runs_own(tiny: Tiny) -> None:
    held_out = write_jsonl(tiny.path / "heldout.jsonl", documents(12, seed=5))
    changes: dict[str, Any] = {"student": {"dtype": "bfloat16"}, "eval": {"path": held_out, "every": 4}}
    spec = tiny.spec(records=160, **changes)
    crew = tiny.start(spec)
    crew.wait_for_steps(6)
    going = export_checkpoint(spec.output, None, tiny.path / "going")
    assert crew.stop().state == RunState.STOPPED
    assert going.step < len(steps_of(spec.output)) + 1
    stopped = export_checkpoint(spec.output)
    assert stopped.target == spec.output / f"model-step-{len(steps_of(spec.output)):08d}"
    for found in (going, stopped):
        prompt = AutoTokenizer.from_pretrained(found.target)("def x", return_tensors="pt")
        AutoModelForCausalLM.from_pretrained(found.target).generate(prompt["input_ids"], max_new_tokens=2)
        assert f"Taken after {found.step} of the run's 20 steps." in (found.target / "README.md").read_text()
    tiny.start(spec).complete()
    last = export_checkpoint(spec.output)
    files = {path.name for path in last.target.iterdir()}
    assert files == {path.name for path in (spec.output / "model").iterdir()}
    for name in files:
        assert (last.target / name).read_bytes() == (spec.output / "model" / name).read_bytes(), name
    weights = [load_file(found.target / "model.safetensors") for found in (going, last)]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_gets_worse_ends_early_with_its_best_model(tiny: Tiny, ranks: int) -> None:
    held_out = write_jsonl(tiny.path / "heldout.jsonl", documents(6, seed=5))
    spec = tiny.spec(records=800,
        train={"learning_rate": 3.0, "warmup_steps": 60, "keep_checkpoints": 1, "checkpoint_every": 1000},
        eval={"path": held_out, "every": 2, "keep_best": True, "patience": 2}, workers={"ranks": ranks},
    )  # fmt: skip
    tiny.start(spec).complete()
    summary = json.loads((spec.output / "summary.json").read_text())
    rows = [json.loads(line) for line in (spec.output / "eval.jsonl").read_text().splitlines()]
    best = min(rows[1:], key=lambda row: row["bits_per_byte"])
    assert summary["best"]["step"] == best["step"] == rows[-1]["step"] - 4
    assert "eval.patience" in summary["stopped_early"]
    assert summary["steps"] == len(steps_of(spec.output)) == rows[-1]["step"] < 100
    assert summary["trained"] == 8 * summary["steps"] < summary["positions"]
    assert has_ended_early(spec.output, summary["steps"])
    exported = export_checkpoint(spec.output, step_of_best(spec.output, None), tiny.path / "best")
    assert exported.step == best["step"]
    ours, theirs = (load_file(where / "model.safetensors") for where in (spec.output / "model", exported.target))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert f"after {best['step']} of the run's 100 steps" in (spec.output / "model" / "README.md").read_text()
