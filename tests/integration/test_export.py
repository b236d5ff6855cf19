"""Models from the checkpoints of real runs: while one goes on, once it was stopped, and after its end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.conftest import Crew
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.status import RunState
from xtoken_services.trainer.export_checkpoint import export_checkpoint

Start = Callable[[RunSpec], Crew]


@pytest.mark.slow
def test_a_model_is_made_while_a_run_goes_on_and_the_last_is_the_runs_own(
    assets: TinyAssets, tmp_path: Path, start: Start
) -> None:
    held_out = write_jsonl(tmp_path / "heldout.jsonl", documents(12, seed=5))
    changes: dict[str, Any] = {"student": {"dtype": "bfloat16"}, "eval": {"path": held_out, "every": 4}}
    spec = tiny_spec(assets, tmp_path, records=160, **changes)
    crew = start(spec)
    crew.wait_for_steps(6)
    going = export_checkpoint(spec.output, None, tmp_path / "going")
    assert crew.stop().state == RunState.STOPPED
    assert going.step < len(steps_of(spec.output)) + 1
    stopped = export_checkpoint(spec.output)
    assert stopped.target == spec.output / f"model-step-{len(steps_of(spec.output)):08d}"
    for found in (going, stopped):
        prompt = AutoTokenizer.from_pretrained(found.target)("def x", return_tensors="pt")
        AutoModelForCausalLM.from_pretrained(found.target).generate(prompt["input_ids"], max_new_tokens=2)
        assert f"Taken after {found.step} of the run's 20 steps." in (found.target / "README.md").read_text()
    start(spec).complete()
    last = export_checkpoint(spec.output)
    files = {path.name for path in last.target.iterdir()}
    assert files == {path.name for path in (spec.output / "model").iterdir()}
    for name in files:
        assert (last.target / name).read_bytes() == (spec.output / "model" / name).read_bytes(), name
    weights = [load_file(found.target / "model.safetensors") for found in (going, last)]
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])
