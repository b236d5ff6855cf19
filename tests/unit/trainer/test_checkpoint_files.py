"""Checkpoint files, tensors staged for them, and published weights."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.cases import cases
from tests.support.ranks import ROOT
from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError, OutputError
from xtoken_services.common.generation.published_weights import Version, read_version, weights_file
from xtoken_services.trainer import checkpoint as module
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.checkpoint_files import (
    INDEX,
    build_index,
    rank_file,
    read_index,
    read_tensors,
    rows_of,
    write_index,
    write_rank_file,
)
from xtoken_services.trainer.publish import WeightsPublisher
from xtoken_services.trainer.staging import Stage, local_part

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (12, 3), "uneven": (7, 2), "fewer rows than ranks": (2, 2), "vector": (5,), "none": (0, 4),
}  # fmt: skip


def whole_state() -> dict[str, Tensor]:
    """Tensors of several shapes and dtypes, all elements different."""
    state = {name: torch.arange(math.prod(shape)).reshape(shape).float() for name, shape in SHAPES.items()}
    return state | {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bfloat16": torch.randn(6, 2).bfloat16(),
        "transposed": torch.randn(3, 4).t(),
        "count": torch.tensor([3, 4]),
    }


class Ranks:
    """One rank after the other of a group that exists in this process only: no collective is called."""

    def __init__(self, ranks: int, *, sharded: bool) -> None:
        self.ranks, self.sharded = ranks, sharded

    def each(self, work: Callable[[int, dict[str, Tensor]], None], whole: Mapping[str, Tensor]) -> None:
        """Call `work` with each rank and its own state, `whole` cut as FSDP2 cuts it."""
        for rank in range(self.ranks):
            dist.init_process_group("fake", rank=rank, world_size=self.ranks, store=FakeStore())
            try:
                work(rank, {name: self._local(name, value, rank) for name, value in whole.items()})
            finally:
                dist.destroy_process_group()

    def _local(self, name: str, value: Tensor, rank: int) -> Tensor:
        if not self.sharded or name not in SHAPES:
            return value.clone()
        start, stop = rows_of(rank, self.ranks, value.shape[0])
        mesh = init_device_mesh("cpu", (self.ranks,))
        rows = value[start:stop].clone()
        return DTensor.from_local(rows, mesh, [Shard(0)], shape=value.shape, stride=value.stride(), run_check=False)


def write(directory: Path, whole: Mapping[str, Tensor], ranks: Ranks) -> None:
    directory.mkdir(mode=0o700)

    def work(rank: int, state: dict[str, Tensor]) -> None:
        index = build_index(state, ranks.ranks)
        write_rank_file(directory, index, state, rank)
        write_index(directory, index)

    ranks.each(work, whole)


def read(directory: Path, state: Mapping[str, Tensor], rank: int = 0, ranks: int = 1) -> None:
    read_tensors(directory, read_index(directory), state, rank, ranks)


ALONE = Ranks(1, sharded=False)
WRITERS = [ALONE, Ranks(2, sharded=True), Ranks(3, sharded=True), Ranks(3, sharded=False)]


@pytest.mark.parametrize("writers", WRITERS, ids=lambda ranks: f"{ranks.ranks}-{ranks.sharded}")
def test_any_number_of_ranks_reads_the_rows_of_any_other(tmp_path: Path, writers: Ranks) -> None:
    whole = whole_state()
    write(tmp_path / "c", whole, writers)
    for readers in (*WRITERS, Ranks(5, sharded=True)):
        rows: dict[str, list[Tensor]] = {name: [] for name in whole}

        def work(rank: int, state: dict[str, Tensor], readers: Ranks = readers, rows: Any = rows) -> None:
            for value in state.values():
                local_part(value).fill_(-1)
            read(tmp_path / "c", state, rank, readers.ranks)
            for name, value in state.items():
                rows[name].append(local_part(value))

        readers.each(work, whole)
        for name, value in whole.items():
            joined = torch.cat(rows[name]) if readers.sharded and name in SHAPES else rows[name][-1]
            assert torch.equal(joined, value), name
            assert joined.dtype == value.dtype


def test_every_row_is_written_once_and_replicas_are_spread_over_the_ranks(tmp_path: Path) -> None:
    whole = {f"w{i}": torch.zeros(10) for i in range(6)}
    write(tmp_path / "c", whole, Ranks(3, sharded=False))
    files = [load_file(tmp_path / "c" / rank_file(rank)) for rank in range(3)]
    assert [len(file) for file in files] == [2, 2, 2]
    assert sorted(name for file in files for name in file) == sorted(whole)


def test_subset_of_the_tensors_is_read(tmp_path: Path) -> None:
    whole = whole_state()
    write(tmp_path / "c", whole, Ranks(2, sharded=True))
    target = torch.zeros(7, 2)
    read(tmp_path / "c", {"uneven": target})
    assert torch.equal(target, whole["uneven"])


# Damage


@cases(
    "target, message",
    ({"other": torch.zeros(1)}, "it has no other"),
    ({"even": torch.zeros(12, 4)}, r"even is float32 \[12, 3\], not float32 \[12, 4\]"),
    ({"even": torch.zeros(12, 3).half()}, r"even is float32 \[12, 3\], not float16 \[12, 3\]"),
)
def test_tensor_that_the_student_does_not_have_is_named(
    tmp_path: Path, target: dict[str, Tensor], message: str
) -> None:
    write(tmp_path / "c", whole_state(), ALONE)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "c", target)


@cases(
    "change",
    lambda e: e["parts"][0].update(start=1),
    lambda e: e["parts"][0].update(stop=13),
    lambda e: e["parts"][0].update(stop=7),
    lambda e: e["parts"][0].update(rank=2),
    lambda e: e["parts"][0].update(rank="../../secret"),
    lambda e: e["parts"][0].update(file="../../secret"),
    lambda e: e["parts"].pop(),
    lambda e: e["parts"].append(e["parts"][0]),
    lambda e: e.update(shape=[1 << 62, 3]),
    lambda e: e.update(shape=[-1]),
)
def test_index_whose_rows_are_not_complete_is_refused(tmp_path: Path, change: Callable[[Any], object]) -> None:
    write(tmp_path / "c", whole_state(), Ranks(2, sharded=True))
    file = tmp_path / "c" / INDEX
    index = json.loads(file.read_text())
    change(index["tensors"]["even"])
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"even"):
        read(tmp_path / "c", {"vector": torch.zeros(5)})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ranks": 1e99, "tensors": {}}', "[" * 100_000])
def test_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "c", whole_state(), ALONE)
    (tmp_path / "c" / INDEX).write_text(text)
    with pytest.raises(ValueError, match="Index"):
        read(tmp_path / "c", {"vector": torch.zeros(5)})


def test_file_that_holds_other_rows_than_the_index_says_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "c", {"w": torch.zeros(4, 2)}, ALONE)
    save_file({"w": torch.zeros(3, 2)}, tmp_path / "c" / rank_file(0))
    with pytest.raises(ValueError, match=r"rank-00000.safetensors holds w as float32 \[3, 2\], not float32 \[4, 2\]"):
        read(tmp_path / "c", {"w": torch.zeros(4, 2)})


# The directory


def checkpoints(directory: Path) -> Checkpoints:
    return Checkpoints(directory / "c", resolved_run(directory))


@pytest.mark.parametrize("name", ["run.json", INDEX, rank_file(0)])
@pytest.mark.parametrize("kind", ["fifo", "link", "hard link", "writable"])
def test_files_that_another_may_have_written_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    state = {"w": torch.ones(3)}
    saver = checkpoints(tmp_path)
    path = saver.save(Cursor(step=1), state)
    saver.wait()
    file, other = path / name, tmp_path / "other"
    if kind == "writable":
        file.chmod(0o666)
    else:
        file.rename(other)
        {"fifo": os.mkfifo, "link": lambda at: at.symlink_to(other), "hard link": lambda at: at.hardlink_to(other)}[
            kind
        ](file)
    with pytest.raises(InputError, match=name):
        saver.load(path, state)


def test_files_are_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        saver = checkpoints(tmp_path)
        path = saver.save(Cursor(step=1), {"w": torch.ones(3)})
        saver.wait()
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    assert saver.load(path, {"w": torch.zeros(3)}).step == 1


def test_removal_that_is_interrupted_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = checkpoints(tmp_path)
    remove = shutil.rmtree

    def interrupted(path: Path, **options: Any) -> None:
        if path.name.startswith(".step-00000001") and path.exists():
            (path / INDEX).unlink()
            raise KeyboardInterrupt
        remove(path, **options)

    saver.save(Cursor(step=1), {"w": torch.ones(3)})
    saver.save(Cursor(step=2), {"w": torch.ones(3)})
    saver.wait()
    monkeypatch.setattr(module.shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.discard(tmp_path / "c" / "step-00000001")
    for path in (tmp_path / "c").glob("step-*"):
        assert saver.load(path, {"w": torch.zeros(3)}).step == 2


def test_another_ranks_failure_is_every_ranks(tmp_path: Path) -> None:
    saver = checkpoints(tmp_path)
    saver.group.exchange_in_background = lambda mine: ["", mine or "rank 1: no space"]  # type: ignore[method-assign]
    saver.save(Cursor(step=1), {"w": torch.ones(3)})
    with pytest.raises(OutputError, match=r"cannot write the checkpoint .*step-00000001: rank 1: no space"):
        saver.wait()
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.slow
def test_writer_that_is_killed_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.trainer.killed_writer", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=200)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def mesh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeviceMesh]:
    """One rank that shares with nobody: its tensors are `DTensor`s all the same."""
    device = str(request.param)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).cpu().clone()


def test_a_copy_is_of_the_moment_it_was_begun(mesh: DeviceMesh) -> None:
    device = mesh.device_type
    state: dict[str, Tensor] = {
        "share": distribute_tensor(torch.randn(512, 256, device=device), mesh, [Shard(0)]),
        "whole": torch.randn(1 << 20, device=device),
        "count": torch.tensor(3.0, device=device),
    }
    stage = Stage()
    stage.prepare(state)
    for _ in range(3):
        expected = {name: local(value) for name, value in state.items()}
        stage.copy(state)
        stage.wait()
        for value in state.values():
            value.add_(1)
        staged = stage.staged()
        assert isinstance(staged["share"], DTensor)
        for name, value in expected.items():
            assert staged[name].device.type == "cpu"
            torch.testing.assert_close(local(staged[name]), value, rtol=0, atol=0)


def run_of(directory: Path, **parts: Any) -> ResolvedRun:
    """A run of four steps."""
    made = resolved_run(directory)
    raw = made.spec.model_dump() | {"loss": {"mode": "alm"}} | parts
    return made.model_copy(update={"spec": RunSpec.model_validate(raw)})


def publisher(run: ResolvedRun, told: list[tuple[int, int, int]], *, writes: bool = True) -> WeightsPublisher:
    """A publisher that notes step, tag and rewinds of what it tells the queue."""
    queue = SimpleNamespace(publish=lambda step, *, tag, rewinds: told.append((step, tag, rewinds)))
    worker: Any = SimpleNamespace(run=run, queue=queue)
    weights = dict(torch.nn.Linear(2, 2).named_parameters())
    student: Any = SimpleNamespace(sharded=False, full_weights=lambda keeps: weights)
    return WeightsPublisher(worker, student, writes=writes)


def test_weights_are_published_after_a_rewind_and_when_they_are_due(tmp_path: Path) -> None:
    rollout = {"max_new_tokens": 8, "publish_every": 2, "weights": "directory"}
    run = run_of(tmp_path, rollout=rollout)
    run.spec.output.mkdir()
    told: list[tuple[int, int, int]] = []
    published = publisher(run, told)
    published.after_rewind(0, 1)
    first = read_version(weights_file(run))
    assert (first.step, told) == (0, [(0, first.tag, 1)])
    for step in (1, 2, 3, 4):
        published.after_step(step, 1)
    assert told[1:] == [(2, first.tag, 1)], "not after the last step either"
    assert read_version(weights_file(run)) == Version(2, first.tag)
    published.after_rewind(1, 2)
    assert told[2][0::2] == (1, 2) and told[2][1] != first.tag
    published.close()
    assert not weights_file(run).exists()


def test_a_cold_start_publishes_no_sooner_than_a_completion_may_need(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollout = {"max_new_tokens": 8, "after": 3, "weights": "directory"}
    run = run_of(tmp_path, rollout=rollout)
    run.spec.output.mkdir()
    told: list[tuple[int, int, int]] = []
    published = publisher(run, told)
    published.after_rewind(0, 1)
    published.after_step(1, 1)
    published.after_rewind(1, 2)
    assert not told and not weights_file(run).exists() and not caplog.text
    published.after_step(2, 2)
    published.after_step(3, 2)
    assert [step for step, _, _ in told] == [2, 3], "step 3 may train completions by weights of step 2"
    assert read_version(weights_file(run)) == Version(3, told[0][1])
    published.after_rewind(3, 3)
    assert told[2][::2] == (3, 3) and "the completions from step 3 on are generated anew" in caplog.text
    published.close()


@pytest.mark.parametrize("case", ["no rollouts", "another rank"])
def test_nothing_is_published(tmp_path: Path, case: str) -> None:
    parts = {} if case == "no rollouts" else {"rollout": {"max_new_tokens": 8, "weights": "directory"}}
    run = run_of(tmp_path, **parts)
    run.spec.output.mkdir()
    told: list[tuple[int, int, int]] = []
    published = publisher(run, told, writes=case == "no rollouts")
    published.after_rewind(0, 1)
    published.after_step(1, 1)
    published.close()
    assert not told and not list(run.spec.output.iterdir())
