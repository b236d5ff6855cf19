"""Runs of the evidence page again: small ones with a strong and with a weak teacher, and those of real models.

The latter need a GPU and `XTOKEN_REAL_STATE`, a directory with `models` and `texts` of `python -m experiments.real`.
"""

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.real import stages as real
from experiments.real import summary
from experiments.real.methods import Cell
from experiments.real.page import RESULT
from tests.integration.conftest import Crew
from tests.support.tiny_run import write_jsonl
from tests.support.trained_student import train_briefly
from xtoken_core.config.spec import RunSpec
from xtoken_services.demo.run import write_corpus, write_model
from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer, training_texts

STATE = os.environ.get("XTOKEN_REAL_STATE", "")
CELLS = (("chain_fading", "even", 4e-4), ("chain", "even", 4e-4), ("p_kl", "even", 4e-4), ("ce", "ce", 2e-4))
"""Runs on half a megabyte of German at their best learning rates, in the order of their outcome."""
NOISE = 0.01
"""Bits per byte: three standard deviations of a method over data seeds."""
TRAINED = 64
"""Documents that the small runs read four times; all small models were trained on others."""
COST_OF_A_START = 0.015
"""Bits per byte: what a far worse teacher may cost until the student has been measured beside it."""


LOSSES: dict[str, dict[str, Any]] = {
    "cross-entropy": {"kl_loss_weight": 0.0},
    "adaptive": {},
    "constant": {"kl_loss_weight_end": "none"},
}


def small_models(directory: Path, texts: list[str]) -> None:
    """A student, and teachers with another tokenizer: one has learnt from far more text, one from far less."""
    train_student_tokenizer(texts[:1500], directory / "of-student", vocabulary=1024)
    train_teacher_tokenizer(texts[:1500], directory / "of-teacher", vocabulary=1280)
    for name, tokenizer, hidden, steps in (
        ("student", "of-student", 128, 60), ("strong", "of-teacher", 192, 160), ("weak", "of-teacher", 128, 12),
    ):  # fmt: skip
        write_model(directory / name, directory / tokenizer, layers=2, hidden=hidden, seed=len(name))
        train_briefly(directory / name, steps=steps, texts=texts[TRAINED:], width=256, rate=3e-3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_loss_takes_from_a_strong_teacher_and_leaves_a_weak_one(
    tmp_path: Path, start: Callable[[RunSpec], Crew]
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    texts = training_texts(corpus.train, 3_000_000)
    small_models(tmp_path, texts)
    train = write_jsonl(tmp_path / "train.jsonl", texts[:TRAINED])

    def curve(teacher: str, loss: str) -> list[dict[str, float]]:
        spec = RunSpec.model_validate(
            {
                "name": f"{teacher}-{loss}",
                "output": tmp_path / f"{teacher}-{loss}",
                "student": {"model": tmp_path / "student", "context_length": 256},
                "teacher": [{"model": tmp_path / teacher, "context_length": 256}],
                "data": {"path": train, "epochs": 4},
                "eval": {"path": corpus.heldout, "every": 2, "max_bytes": 67_000, "patience": "none"},
                "loss": LOSSES[loss],
                "train": {
                    "samples_per_step": 8,
                    "micro_batch_tokens": 2048,
                    "learning_rate": 1e-3,
                    "warmup_steps": 4,
                    "checkpoint_every": 8,
                },
                "workers": {"collators": 1, "device": "cpu"},
            }
        )
        start(spec).complete()
        return [json.loads(line) for line in (spec.output / "eval.jsonl").read_text().splitlines()]

    strong, weak, constant = curve("strong", "adaptive"), curve("weak", "adaptive"), curve("weak", "constant")
    alone = curve("weak", "cross-entropy")
    least, of_strong, of_weak, of_constant = (
        min(row["bits_per_byte"] for row in rows) for rows in (alone, strong, weak, constant)
    )
    assert strong[0]["teacher_bits_per_byte"] < of_strong < least - NOISE
    assert weak[0]["teacher_bits_per_byte"] > weak[0]["bits_per_byte"] + 0.1
    assert of_weak < least + COST_OF_A_START
    assert of_weak < of_constant - 3 * NOISE


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (STATE and torch.cuda.is_available()), reason="needs a GPU and XTOKEN_REAL_STATE")
def test_the_first_losses_on_real_models_come_out_as_the_table_says(tmp_path: Path) -> None:
    for name in ("models", "texts"):
        (tmp_path / name).mkdir()
        for path in (Path(STATE) / name).iterdir():
            (tmp_path / name / path.name).symlink_to(path.resolve())
    planned = [Cell("de-500k", method, weight, rate, 0) for method, weight, rate in CELLS]
    until = time.monotonic() + 1000
    assert real.runs(tmp_path, planned, side_by_side=len(planned), until=until, device="cuda", steps=None)
    again = real.collect(tmp_path, planned, tmp_path / "real.json")
    known = json.loads(RESULT.read_text(encoding="utf-8"))
    known["runs"] = [run for run in known["runs"] if any(vars(cell).items() <= run.items() for cell in planned)]
    own = "handbook-de.test"
    published, repeated = (
        {outcome.method: outcome.bits[own] for outcome in summary.outcomes(one | {"not_run": []})}
        for one in (known, again)
    )
    assert sorted(published, key=published.__getitem__) == [method for method, _, _ in CELLS]
    for first, second in pairwise(CELLS):
        now, then = (bits[second[0]] - bits[first[0]] for bits in (repeated, published))
        assert abs(now - then) < NOISE, (first, second)
        assert now > 0 or then < NOISE, (first, second)
