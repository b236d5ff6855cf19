"""Gradients by class of chunk: norms and cosines of known sums, the picture, and the command over a tiny run."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from tests.support.tiny_run import documents, make_assets, write_jsonl
from xtoken_services.cli.app import app
from xtoken_services.trainer.chunk_gradients import CROSS_ENTROPY, Gradients
from xtoken_services.trainer.gradient_picture import gradient_picture


def test_norms_and_cosines_of_known_sums() -> None:
    weights = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0], requires_grad=True)]
    gradients = Gradients(weights)
    gradients.add(CROSS_ENTROPY, weights[0].sum(), 2)  # gradient (1, 1, 0)
    gradients.add("1to1_t0", 3 * weights[0][0], 1)  # (3, 0, 0)
    gradients.add("1to1_t0", 4 * weights[1][0], 1)  # (3, 0, 4) in all
    measured = {"documents": 1, **gradients.summary()}
    entry = measured["classes"]["1to1_t0"]
    assert (entry["count"], entry["value"], entry["norm"]) == (2, pytest.approx(7.5), pytest.approx(2.5))
    assert entry["norm_ratio"] == pytest.approx(2.5 / (2**0.5 / 2))
    assert measured["cosine"]["1to1_t0"][CROSS_ENTROPY] == pytest.approx(3 / (5 * 2**0.5))
    assert measured["cosine"]["1to1_t0"]["1to1_t0"] == pytest.approx(1.0)
    texts = [element.text for element in ElementTree.fromstring(gradient_picture(measured)).iter() if element.text]
    assert {"1to1_t0", "0.42", "1.00"} <= set(texts)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["p_kl", "alm", "chain"])
def test_the_command_measures_a_run(tmp_path: Path, mode: str) -> None:
    held_out = write_jsonl(tmp_path / "held-out.jsonl", documents(6, seed=9))
    assets = make_assets(tmp_path / "assets")
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'output = "{tmp_path}/out"\nstudent = {{model = "{assets.student}", context_length = 64}}\n'
        f'teacher = {{model = "{assets.teacher}", context_length = 96, projection = "{assets.projection}"}}\n'
        f'data = {{path = "{held_out}"}}\neval = {{path = "{held_out}"}}\nloss = {{mode = "{mode}"}}\n'
        "train = {samples_per_step = 4, micro_batch_tokens = 320}\n"
    )
    done = CliRunner().invoke(app, ["gradients", str(run_file), "--out", str(tmp_path / "g"), "--documents", "4"])
    assert done.exit_code == 0, done.output
    measured = json.loads((tmp_path / "g" / "gradients.json").read_text())
    assert measured["documents"] == 4 and {CROSS_ENTROPY, "1to1_t0", "whitespace_t0"} <= set(measured["classes"])
    for name, row in measured["cosine"].items():
        assert row[name] == pytest.approx(1.0)
        assert all(measured["cosine"][other][name] == pytest.approx(value) for other, value in row.items())
    assert ElementTree.fromstring((tmp_path / "g" / "gradients.svg").read_text()) is not None
