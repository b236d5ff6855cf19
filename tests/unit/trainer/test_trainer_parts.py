"""The trainer's parts that need no queue: checkpoints, records, schedule, seeds."""

from __future__ import annotations

import itertools
import json
import stat
from pathlib import Path

import pytest
import torch

from tests.support.runs import resolved_run
from xtoken_core.config.spec import TrainSpec
from xtoken_core.errors import ConfigError, InputError, OutputError
from xtoken_services.common.files.jsonl import JsonLines, replace_file
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.optimizer import decay_groups, learning_rate
from xtoken_services.trainer.step import seed_of

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


@pytest.mark.parametrize("file", ["run.json", "index.json", "rank-00000.safetensors"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, file: str) -> None:
    path = saved(tmp_path)
    (path / file).write_bytes((path / file).read_bytes()[:30])
    with pytest.raises(InputError, match="step-00000001") as caught:
        Checkpoints(tmp_path / "c", resolved_run(tmp_path)).load(path, WEIGHTS)
    assert "\n" not in str(caught.value)


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


def test_a_checkpoint_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.parent.chmod(0o770)
    with pytest.raises(InputError, match="chmod 700"):
        Checkpoints(tmp_path / "c", resolved_run(tmp_path)).load(path, WEIGHTS)


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
    [("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]), ("constant", [0.5] + [1.0] * 5),
     ("wsd", [0.5, 1.0, 1.0, 1.0, 0.6, 0.2])],
)  # fmt: skip
def test_a_schedule_follows_its_course_after_the_warm_up(schedule: str, expected: list[float]) -> None:
    raw = {"learning_rate": 1.0, "min_learning_rate": 0.2, "warmup_steps": 2, "decay_fraction": 0.4}
    spec = TrainSpec.model_validate(raw | {"schedule": schedule})
    assert [learning_rate(spec, 10, update) for update in (0, 2, 4, 6, 8, 10)] == pytest.approx(expected)


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
