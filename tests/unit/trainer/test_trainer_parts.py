"""A trainer's steps and their parts: batches, losses, timings."""

import itertools
import json
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.runs import changed, resolved_run
from tests.unit.losses.loss_cases import Case, loss_of, make_case
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.spec import TrainSpec
from xtoken_core.errors import ConfigError, InputError, OutputError
from xtoken_core.losses.objective import Selection
from xtoken_core.plan import MicroBatch
from xtoken_services.common.files.jsonl import JsonLines, replace_file
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.optimizer import decay_groups, learning_rate
from xtoken_services.trainer.step import ClaimedBatch, StepRunner, seed_of
from xtoken_services.trainer.timing import DeviceTimer

WEIGHTS = {"w": torch.ones(3)}


def saved(directory: Path) -> Path:
    """A checkpoint of step 1."""
    checkpoints = Checkpoints(directory / "c", resolved_run(directory))
    path = checkpoints.save(Cursor(step=1), WEIGHTS)
    checkpoints.wait()
    return path


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", resolved_run(tmp_path))
    cursor = Cursor(step=3, trained=20, tokens=99, truncated=1, skipped={4: "empty"}, dead={7: "broken"})
    weights = {"model.w": torch.randn(3, 4), "optimizer.steps": torch.tensor([3.0])}
    path = checkpoints.save(cursor, weights)
    checkpoints.wait()
    state = {name: torch.zeros_like(value) for name, value in weights.items()}
    assert checkpoints.load(path, state) == cursor
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert checkpoints.latest() == path
    assert [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent)] == [0o700, 0o700]


def test_what_is_written_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", resolved_run(tmp_path))
    weight = torch.ones(1 << 20)
    path = checkpoints.save(Cursor(step=1), {"w": weight})
    checkpoints.stage.wait()
    weight.zero_()
    checkpoints.wait()
    found = {"w": torch.zeros(1 << 20)}
    checkpoints.load(path, found)
    assert bool((found["w"] == 1).all())


def test_only_the_newest_checkpoints_are_kept_and_scratch_goes(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", resolved_run(tmp_path))
    (tmp_path / "c" / ".step-00000001.tmp").mkdir(parents=True)
    for step in (1, 2, 3):
        checkpoints.save(Cursor(step=step), WEIGHTS)
    checkpoints.wait()
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_of_another_run_names_what_differs(tmp_path: Path) -> None:
    path = saved(tmp_path)
    other = resolved_run(tmp_path, positions=64).model_copy(update={"data_fingerprint": "e"})
    with pytest.raises(
        ConfigError, match=r"what differs is the text, the number of records in data.path, the run's length .*;"
    ):
        Checkpoints(tmp_path / "c", other).load(path, WEIGHTS)


@pytest.mark.parametrize(
    ("name", "value"), [("step", "x"), ("skipped", [1]), ("dead", {"a": "b"}), ("tokens", {}), ("trained", 0.5)]
)
def test_a_cursor_of_another_type_is_named(tmp_path: Path, name: str, value: object) -> None:
    file = saved(tmp_path) / "run.json"
    document = json.loads(file.read_text())
    document["cursor"][name] = value
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=rf"cursor\.{name}"):
        Checkpoints(tmp_path / "c", resolved_run(tmp_path)).load(file.parent, WEIGHTS)


def test_checkpoints_that_became_a_link_are_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for step in (1, 2, 3, 4):
        (other / f"step-{step:08d}").mkdir(parents=True, mode=0o700)
    checkpoints = Checkpoints(tmp_path / "c", resolved_run(tmp_path))
    (tmp_path / "c").symlink_to(other)
    checkpoints.save(Cursor(step=4), WEIGHTS)
    with pytest.raises(OutputError, match="a symbolic link or not a directory"):
        checkpoints.wait()
    with pytest.raises(OSError, match="a symbolic link or not a directory"):
        checkpoints.keep(3)
    assert sorted(path.name for path in other.iterdir()) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]
    assert not list(other.glob("*/*"))


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", resolved_run(tmp_path))
    old = saved(tmp_path)
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    (tmp_path / "c" / "step-00000002").write_text("in the way")
    checkpoints.save(Cursor(step=2), WEIGHTS)
    with pytest.raises(OutputError, match="step-00000002"):
        checkpoints.wait()
    checkpoints.check()
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    assert not list((tmp_path / "c").glob(".*"))


def test_lines_are_cut_back_to_a_step_and_a_torn_one_is_dropped(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "steps.jsonl")
    for step in range(5):
        lines.append({"step": step})
    with lines.path.open("a") as file:
        file.write('{"step": 5, "i')
    lines.truncate(3, inclusive=False)
    assert [json.loads(x)["step"] for x in lines.path.read_text().splitlines()] == [0, 1, 2]
    assert lines.last_step() == 2
    lines.truncate(1, inclusive=True)
    assert lines.last_step() == 1


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    replace_file(target, "one")
    replace_file(target, "two")
    assert target.read_text() == "two"
    with pytest.raises(OutputError, match="nowhere"):
        replace_file(tmp_path / "nowhere" / "summary.json", "x")


def test_the_rate_warms_up_and_decays_along_a_cosine() -> None:
    spec = TrainSpec(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=4)
    rates = [learning_rate(spec, 12, update) for update in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55)
    assert rates[12] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0.5, 1.0, 0.8, 0.6, 0.3, 0.2]), ("constant", [0.5] + [1.0] * 5),
     ("wsd", [0.5, 1.0, 1.0, 1.0, 0.6, 0.2])],
)  # fmt: skip
def test_a_schedule_follows_its_course_after_the_warm_up(schedule: str, expected: list[float]) -> None:
    raw = {"learning_rate": 1.0, "min_learning_rate": 0.2, "warmup_steps": 2}
    spec = TrainSpec.model_validate(raw | {"schedule": schedule})
    assert [learning_rate(spec, 10, update) for update in (0, 2, 4, 6, 9, 10)] == pytest.approx(expected)


def test_completions_have_a_schedule_of_their_own_behind_that_of_the_cold_start() -> None:
    raw = {"learning_rate": 1.0, "min_learning_rate": 0.2, "warmup_steps": 2, "schedule": "linear"}
    spec = TrainSpec.model_validate(raw)
    rates = [learning_rate(spec, 10, step, restart=(4, 0.1)) for step in range(10)]
    cold, after = [learning_rate(spec, 4, step) for step in range(4)], [learning_rate(spec, 6, s) for s in range(6)]
    assert rates == pytest.approx([*cold, *(0.1 * rate for rate in after)])
    assert rates[4:6] == pytest.approx([0.05, 0.1]), "it warms up again"
    whole = [learning_rate(spec, 10, step, restart=(0, 0.1)) for step in range(10)]
    assert whole == pytest.approx([0.1 * learning_rate(spec, 10, step) for step in range(10)])


def test_weight_decay_leaves_out_vectors() -> None:
    groups = decay_groups(torch.nn.Linear(2, 3).parameters(), TrainSpec(weight_decay=0.5))
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.5), (1, 0.0)]


def test_every_micro_batch_has_its_own_seed() -> None:
    seeds = {seed_of(s, t, r, m) for s in range(2) for t in range(5) for r in range(3) for m in range(4)}
    assert len(seeds) == 2 * 5 * 3 * 4
    assert seed_of(1, 2, 3, 4) == seed_of(1, 2, 3, 4)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepRunner:
    """Its loss finds three chunks in every micro-batch, and the second teacher the better one."""
    worker: Any = SimpleNamespace(queue=None, run=resolved_run(tmp_path, teachers=2), beats=0)
    worker.beat = lambda: setattr(worker, "beats", worker.beats + 1)
    loss: Any = SimpleNamespace(select=lambda *_: Selection(torch.tensor(1), torch.tensor(3.0)))
    loss.among = lambda _: loss
    device: Any = SimpleNamespace(device=torch.device("cpu"))
    rings: Any = None
    made = StepRunner(worker, device, loss, rings, RankGroup(0, 1), rank=0, pad_id=0)
    monkeypatch.setattr(made, "_teacher_logits", lambda _: [])
    return made


CLAIMED = ClaimedBatch(MicroBatch((0, 1), (8, 8, 8)), {}, None, [])
OF_ONE_TEACHER = ClaimedBatch(MicroBatch((0, 1), (8, 8)), {}, None, [])


def test_the_teachers_of_a_step_are_chosen_and_their_chunks_added_up(runner: StepRunner) -> None:
    choices = runner._choose([CLAIMED, None, CLAIMED])
    assert [int(found.chosen) for found in choices.of_batch] == [1, 0, 1]
    assert float(choices.chunks) == 6


def test_a_step_without_a_micro_batch_has_nothing_to_choose(runner: StepRunner) -> None:
    choices = runner._choose([])
    assert (choices.of_batch, float(choices.chunks)) == ([], 0)


def backward(run: ResolvedRun, case: Case, logits: torch.Tensor, step: int, weight: float) -> dict[str, torch.Tensor]:
    """The metrics of a micro-batch with these logits of the student, by a trainer that begins with this step."""
    student: Any = SimpleNamespace(device=torch.device("cpu"), blockwise=False, outputs=lambda *_: logits * 1.0)
    worker: Any = SimpleNamespace(queue=None, run=run)
    absent: Any = None
    runner = StepRunner(worker, student, loss_of(case, run.spec.loss), absent, RankGroup(0, 1), rank=0, pad_id=0)
    runner._teacher_logits = lambda _: list(case.teacher_logits)  # type: ignore[method-assign]
    size = SimpleNamespace(micro_batches=3)
    plan: Any = SimpleNamespace(step=step, ce_tokens=20, kd_chunks=(12,), shares=None, text_of=(), plan=size)
    return runner._backward(plan, replace(OF_ONE_TEACHER, data=case.batch), 0, None, weight)


def gradient(run: ResolvedRun, case: Case, step: int) -> torch.Tensor:
    """The gradient of the student's logits in a step of a run."""
    logits = case.student_logits.clone().requires_grad_()
    weight = run.spec.loss.kl_weight_at(step, run.steps)
    metrics = backward(run, case, logits, step, weight)
    assert logits.grad is not None
    assert metrics["kl_loss_scale"].item() == pytest.approx(weight)
    return logits.grad


def test_the_divergence_has_its_weight_at_the_step_in_the_gradient(tmp_path: Path) -> None:
    def run(**loss: Any) -> ResolvedRun:
        made = resolved_run(tmp_path, positions=40)
        config = LossConfig(mode="p_kl", vocab_topk=6, ce_loss_scale=1.0, **loss)
        return changed(made, loss=config)

    case, fading = make_case(), run(kl_loss_weight=2.0, kl_loss_weight_end=0.0)
    assert fading.steps == 5
    with_kd, alone = (gradient(run(kl_loss_weight=weight), case, 0) for weight in (1.0, 0.0))
    for step, weight in [(3, 0.5), (0, 2.0), (4, 0.0), (2, 1.0), (3, 0.5)]:  # in no order: no step depends on another
        expected = alone + weight * (with_kd - alone)
        torch.testing.assert_close(gradient(fading, case, step), expected)


@pytest.mark.parametrize("generates", [True, False])
def test_a_step_with_completions_has_the_overlap_ratio(tmp_path: Path, generates: bool) -> None:
    run = changed(resolved_run(tmp_path), loss=LossConfig(), rollout=RolloutSpec() if generates else None)
    case = make_case(same_tokenizer=(True,))
    case.batch["weights_version"] = torch.tensor([-1, 3, 3, -1])
    case.teacher_logits[0][1] = torch.nn.functional.pad(case.student_logits[1], (0, -1))
    case.batch["sample_mask"][2] = 0.0
    metrics = backward(run, case, case.student_logits.requires_grad_(), 0, 1.0)
    assert ("overlap_ratio" in metrics) == generates
    assert not generates or metrics["overlap_ratio"] == 1, "completions alone count, of which this teacher is sure"


def test_choosing_is_progress(runner: StepRunner) -> None:
    runner._choose([CLAIMED] * 3)
    assert runner.worker.beats == 3, "all of a step may take longer than one micro-batch is given"


def test_laps_of_one_name_add_up_and_are_told_once() -> None:
    timer = DeviceTimer(torch.device("cpu"))
    for _ in range(2):
        timer.start()
        time.sleep(0.02)
        timer.lap("forward")
        timer.lap("loss")
    found = timer.collect()
    assert list(found) == ["forward", "loss"]
    assert found["forward"] >= 0.04 > found["loss"]
    assert timer.collect() == {}


def test_what_is_forgotten_is_not_told() -> None:
    timer = DeviceTimer(torch.device("cpu"))
    timer.start()
    timer.lap("forward")
    timer.reset()
    timer.lap("loss")
    assert list(timer.collect()) == ["loss"]


@pytest.mark.gpu
def test_a_gpu_is_timed_without_being_waited_for() -> None:
    device = torch.device("cuda", 0)
    a = torch.randn(8192, 8192, device=device)
    a @ a
    torch.cuda.synchronize()
    timer, began = DeviceTimer(device), time.perf_counter()
    timer.start()
    for _ in range(20):
        a @ a
    timer.lap("forward")
    queued = time.perf_counter() - began
    found = timer.collect()
    assert found["forward"] > 2 * queued, "the host was ahead"
    assert found["forward"] <= time.perf_counter() - began
