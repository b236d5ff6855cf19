"""A whole run with a loss from outside the library, named on the command line, and its refusals before a start."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.doc_blocks import ROOT
from tests.integration.conftest import Refusal
from tests.integration.test_bad_input import raw_spec
from tests.support.tiny_run import TinyAssets, steps_of, write_run
from xtoken_services.cli.app import app

LOSS = "experiments.losses.simct:SimCTLoss"


@pytest.mark.slow
def test_a_run_with_a_loss_of_experiments(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    raw = raw_spec(assets, tmp_path) | {"loss": {"mode": "custom"}, "eval": {"path": "train.jsonl"}}
    file = str(write_run(tmp_path, raw))
    assert "--loss" in refusal("run", file)
    assert "no NoLoss" in refusal("run", file, "--loss", "experiments.losses.simct:NoLoss")
    assert not (tmp_path / "out" / "logs").exists(), "nothing was started"
    done = CliRunner().invoke(app, ["run", file, "--loss", LOSS])
    assert "\nmemory of the run: about " in done.output
    assert done.exit_code == 0, done.stderr
    assert done.stdout.endswith("what the teacher has brought: the same command with --baseline\n")
    steps = steps_of(tmp_path / "out")
    assert len(steps) == 2 and all(step["kl_loss"] > 0 for step in steps)
    assert sum(steps[0][f"chunk_count_{name}_t0"] for name in ("1to1", "1ton", "nto1", "mton")) > 0
    named = [path for path in (tmp_path / "out").rglob("*.json*") if LOSS in path.read_text("utf-8")]
    assert named == [], "no file of the run names the class"
