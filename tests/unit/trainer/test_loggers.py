"""What a run's log, TensorBoard and Weights & Biases are told, also across a restart."""

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.runs import changed, resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError
from xtoken_services.common.files.jsonl import JsonLines
from xtoken_services.trainer.loggers import (
    ConsoleLogger,
    TensorBoardLogger,
    WandbLogger,
    eval_line,
    make_loggers,
    numbers,
    train_line,
)

ONE = {
    "loss": 2.5, "kl_loss": 2.25, "kl_loss_t0": 2.25, "ce_loss": 1.5, "chunk_mass_t0": 0.98125, "weight_t0": 1.0,
    "grad_norm": 1.0, "tokens_per_second": 30000.4, "data_wait": 0.001, "teacher_wait": 0.021, "mfu": 0.41,
    "memory_peak_bytes": 3 << 29, "ids": [1, 2],
}  # fmt: skip
READ = {
    "step": 20, "bits_per_byte": 1.23456, "nll_nats": 900.0, "bytes": 1000, "tokens": 300, "documents": 3,
    "next_token_accuracy": 0.3125, "loss": 3.0,
}  # fmt: skip


def reported(directory: Path, *, positions: int = 32, **report: Any) -> ResolvedRun:
    """A run with settings of its reports."""
    run = resolved_run(directory, positions=positions)
    run.spec.output.mkdir(parents=True, exist_ok=True)
    return changed(run, report=run.spec.report.model_copy(update=report))


# The log


def test_a_step_in_the_log() -> None:
    assert train_line(ONE) == (
        "loss 2.5000, kl_loss 2.2500, ce_loss 1.5000, chunk_mass 0.981, grad_norm 1.0000, 30,000 tokens/s, "
        "data_wait 0.1%, teacher_wait 2.1%, mfu 41.0%, 1.50 GiB"
    )
    assert train_line({}) == ""
    assert train_line({"loss": 1.0, "kl_loss": None, "chunk_mass_t0": None}) == "loss 1.0000"


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        pytest.param(
            {"kl_loss": 2.0, "kl_loss_t0": 1.5, "kl_loss_t1": 2.5, "chunk_mass_t0": 0.75, "chunk_mass_t1": 0.5},
            "kl_loss 2.0000 (t0 1.5000, t1 2.5000), chunk_mass (t0 0.750, t1 0.500)",
            id="two-teachers",
        ),
        pytest.param(
            {"kl_loss": 2.0, "kl_loss_t0": 1.5, "kl_loss_t1": 2.5, "chunk_mass_t1": 0.5},
            "kl_loss 2.0000 (t0 1.5000, t1 2.5000), chunk_mass (t1 0.500)",
            id="one-of-them-with-the-students-tokenizer",
        ),
        pytest.param({"kl_loss": 2.0, "chunk_mass": 0.5}, "kl_loss 2.0000, chunk_mass 0.500", id="averaged-logits"),
        pytest.param(
            {f"kl_loss_t{i}": float(i) for i in (10, 9, 2)} | {"kl_loss": 1.0},
            "kl_loss 1.0000 (t2 2.0000, t9 9.0000, t10 10.0000)",
            id="in-their-order",
        ),
    ],
)
def test_every_teacher_is_named_if_there_are_several(figures: dict[str, float], said: str) -> None:
    assert train_line(figures) == said


def test_held_out_text_in_the_log() -> None:
    text = "1.2346 (3 documents, 1,000 bytes) bits per byte on held-out text, loss 3.0000, next-token accuracy 31.2%"
    assert eval_line(READ) == text
    assert eval_line(READ | {"standard_error": 0.05}).startswith("1.2346 ± 0.0500 (3 documents")
    assert eval_line({"bits_per_byte": 1.0, "loss": None}) == "1.0000 bits per byte on held-out text"


def test_the_log_has_a_line_every_so_many_steps(caplog: pytest.LogCaptureFixture) -> None:
    logger = ConsoleLogger(every=4, steps=10)
    with caplog.at_level(logging.INFO, "xtoken.trainer"):
        for step in range(10):
            logger.log("train", step, {"step": step, "loss": float(step)})
            logger.log("eval", step, READ)
        logger.log("train", 11, {"step": 11, "tokens": 5})
        logger.close()
    assert caplog.messages == ["step 4 of 10: loss 3.0000", "step 8 of 10: loss 7.0000"]


def test_what_can_be_drawn_of_a_line() -> None:
    row = {"step": 3, "loss": 1, "kl_loss": math.nan, "ce_loss": math.inf, "nonfinite": True, "ids": [1], "name": "x"}
    assert numbers(row | {"mfu": None}) == {"loss": 1.0, "nonfinite": 1.0}


# Who is told


def test_a_run_tells_its_log_alone_unless_it_says_otherwise(tmp_path: Path) -> None:
    (console,) = make_loggers(reported(tmp_path), 0)
    assert isinstance(console, ConsoleLogger) and (console.every, console.steps) == (10, 4)


@pytest.mark.parametrize(
    ("report", "module"), [({"tensorboard": True}, "torch.utils.tensorboard"), ({"wandb": "offline"}, "wandb")]
)
def test_what_is_not_installed_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: dict[str, Any], module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (name,) = report
    with pytest.raises(ConfigError, match=rf"^report\.{name} needs {name}: install it by pip install [^\n]*$"):
        make_loggers(reported(tmp_path, **report), 0)


# TensorBoard


def drawn(run: ResolvedRun) -> dict[str, list[tuple[int, float]]]:
    """The points of every curve that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.spec.output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, round(e.value, 4)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class Training:
    """What the trainer's loop does with its lines and its reports."""

    def __init__(self, run: ResolvedRun, step: int) -> None:
        self.step, self.life = step, float(step)
        self.lines = JsonLines(run.spec.output / "eval.jsonl")
        self.lines.truncate(step, inclusive=True)
        self.logger = TensorBoardLogger(run, step)
        self.evaluate()

    def evaluate(self) -> None:
        if self.step % 2 == 0 and self.lines.last_step() != self.step:
            row = {"step": self.step, "bits_per_byte": 100 + self.life, "loss": math.nan}
            self.lines.append(row)
            self.logger.log("eval", self.step, row)

    def train(self, until: int) -> None:
        while self.step < until:
            self.logger.log("train", self.step, {"step": self.step, "loss": self.life, "ids": [1], "mfu": None})
            self.step += 1
            self.evaluate()
        self.logger.close()


@pytest.mark.parametrize("resumed", [0, 2, 3, 4])
def test_tensorboard_has_every_point_once_after_a_restart(tmp_path: Path, resumed: int) -> None:
    pytest.importorskip("tensorboard")
    run = reported(tmp_path, tensorboard=True)
    Training(run, 0).train(until=5)
    before = drawn(run)
    assert before["train/loss"] == [(n, 0.0) for n in range(5)]
    assert before["eval/bits_per_byte"] == [(0, 100.0), (2, 100.0), (4, 100.0)]
    assert set(before) == {"train/loss", "eval/bits_per_byte"}

    Training(run, resumed).train(until=7)
    after = drawn(run)
    life = float(resumed)
    assert after["train/loss"] == [(n, 0.0 if n < resumed else life) for n in range(7)]
    assert after["eval/bits_per_byte"] == [(n, 100.0 if n <= resumed else 100.0 + life) for n in (0, 2, 4, 6)]


def test_an_evaluation_that_is_repeated_is_drawn_as_it_is_then(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = reported(tmp_path, tensorboard=True)
    Training(run, 0).train(until=3)
    (run.spec.output / "eval.jsonl").write_text('{"step":0,"bits_per_byte":100.0}\n')
    Training(run, 2).train(until=3)
    assert drawn(run)["eval/bits_per_byte"] == [(0, 100.0), (2, 102.0)]


# Weights & Biases


class Recorded:
    """Stands in for the package `wandb` where it is not installed."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.told: list[Mapping[str, Any]] = []

    def init(self, **settings: Any) -> SimpleNamespace:
        self.starts.append(settings)
        return SimpleNamespace(define_metric=lambda *_, **__: None, log=self.told.append, finish=lambda: None)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    module = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def ids_of(recorded: Recorded, *runs: ResolvedRun) -> list[str]:
    """Under which ids runs were started."""
    first = len(recorded.starts)
    for run in runs:
        WandbLogger(run).close()
    return [start["id"] for start in recorded.starts[first:]]


def test_weights_and_biases_is_told(tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = reported(tmp_path, wandb="online")
    _, logger = make_loggers(run, 0)
    logger.log("train", 3, {"step": 3, "loss": 2.0, "kl_loss": math.nan, "ids": [1]})
    logger.log("eval", 4, {"step": 4, "bits_per_byte": 1.5})
    logger.close()
    (start,) = recorded.starts
    assert (start["project"], start["mode"], start["name"]) == ("mine", "online", run.spec.name)
    assert start["config"]["train"]["samples_per_step"] == 8
    assert recorded.told == [{"step": 3, "train/loss": 2.0}, {"step": 4, "eval/bits_per_byte": 1.5}]


def test_a_restart_goes_on_with_the_run_of_weights_and_biases(tmp_path: Path, recorded: Recorded) -> None:
    run = reported(tmp_path / "one", wandb="offline")
    moved = changed(run, output=tmp_path / "moved")
    first, second = ids_of(recorded, run, run)
    assert first == second and 8 <= len(first) <= 64 and set(first) <= set("0123456789abcdef-")
    assert {start["resume"] for start in recorded.starts} == {"allow"}
    run.spec.output.rename(moved.spec.output)
    assert ids_of(recorded, moved) == [first], "it is kept with the run's files"


def test_another_run_is_another_one_of_weights_and_biases(tmp_path: Path, recorded: Recorded) -> None:
    run = reported(tmp_path / "one", wandb="offline")
    other = reported(tmp_path / "two", wandb="offline")
    longer = reported(tmp_path / "one", positions=64, wandb="offline")
    ids = ids_of(recorded, run, other, longer)
    assert len(set(ids)) == 3, "of another output; of the same one, with another length"
    for file in run.spec.output.iterdir():
        file.unlink()
    assert ids_of(recorded, run)[0] not in ids, "whose output was emptied begins anew"


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"../../id\n", b"a b\n"])
def test_a_damaged_id_is_made_anew(tmp_path: Path, recorded: Recorded, damaged: bytes) -> None:
    run = reported(tmp_path, wandb="offline")
    ids_of(recorded, run)
    (file,) = run.spec.output.iterdir()
    file.write_bytes(damaged)
    first, second = ids_of(recorded, run, run)
    assert first == second == file.read_text().strip()


def test_the_real_weights_and_biases_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for variable in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "wandb"))
    run = reported(tmp_path, wandb="offline")
    for step in (0, 1):
        logger = WandbLogger(run)
        logger.log("train", step, {"step": step, "loss": 2.0})
        logger.close()
    wandb.teardown()
    files = list(run.spec.output.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2, "each start has a folder of its own"
    assert len({file.name for file in files}) == 1, "and both are of one run"
    assert all(b"train/loss" in file.read_bytes() for file in files)
