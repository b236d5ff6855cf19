"""A split text is made again from what a run's directory has recorded of it, byte for byte, or the run is refused."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.runs import resolved_run
from xtoken_core import atomic
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.files.allowed_paths import OutsideError, Roots
from xtoken_services.common.run import split_record
from xtoken_services.common.run.split_record import FILE, SplitRecord, record_split, restore_split
from xtoken_services.common.text.held_out import origin_of, split_directory, split_output, split_text


def nothing(_activity: str, _done: float) -> None:
    """Take a report of progress."""


def run_of(tmp_path: Path, output: Path) -> ResolvedRun:
    """A run that has held a part of its text back."""
    text = tmp_path / "text.txt"
    if not text.exists():
        text.write_text("".join(f"line {number}\n" for number in range(400)))
    split = split_text([text], output, writes=True)
    assert split is not None
    run = resolved_run(tmp_path)
    data = run.spec.data.model_copy(update={"path": split[0]})
    return run.model_copy(update={"spec": run.spec.model_copy(update={"data": data, "output": output})})


def contents(output: Path) -> dict[str, bytes]:
    """The files of the split text of a run."""
    directory = split_directory(output)
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}


@pytest.fixture
def run(tmp_path: Path) -> ResolvedRun:
    made = run_of(tmp_path, tmp_path / "out")
    record_split(made, nothing)
    return made


@pytest.mark.parametrize("lost", ["cache", "cache/split/train.txt", "cache/split/held-out.txt"])
def test_what_the_cache_lacks_is_made_again(run: ResolvedRun, lost: str) -> None:
    output = run.spec.output
    before = contents(output)
    path = output / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    restore_split(run.spec, nothing)
    again = contents(output)
    assert again == {name: before[name] for name in again}
    assert {"train.txt", "held-out.txt", "origin"} <= set(again)


@pytest.mark.parametrize(
    ("old", "new"), [("line 3\n", "other\n"), ("line 399\n", "line 399\nand more\n")], ids=["changed", "longer"]
)
def test_another_text_is_refused_and_leaves_nothing(run: ResolvedRun, tmp_path: Path, old: str, new: str) -> None:
    text, output = tmp_path / "text.txt", run.spec.output
    right = text.read_text()
    text.write_text(right.replace(old, new))
    shutil.rmtree(output / "cache")
    with pytest.raises(InputError, match=r"text\.txt is no longer the text that this run began with: restore it"):
        restore_split(run.spec, nothing)
    assert contents(output) == {}
    text.unlink()
    with pytest.raises(InputError, match=r"text\.txt, of which this run has held a part back, is not there"):
        restore_split(run.spec, nothing)
    text.write_text(right)
    restore_split(run.spec, nothing)
    assert {"train.txt", "held-out.txt", "origin"} == set(contents(output))


def test_parts_that_are_there_stay_whatever_became_of_the_text(run: ResolvedRun, tmp_path: Path) -> None:
    before = contents(run.spec.output)
    (tmp_path / "text.txt").unlink()
    restore_split(run.spec, nothing)
    assert contents(run.spec.output) == before


def test_parts_are_read_once_for_a_record(run: ResolvedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (run.spec.output / FILE).read_text()
    monkeypatch.setattr(split_record, "_digests", lambda _parts, _progress: ("", ""))
    record_split(run, nothing)
    assert (run.spec.output / FILE).read_text() == before
    (run.spec.output / FILE).write_text("{}")
    shutil.rmtree(run.spec.output / "cache")
    with pytest.raises(InputError, match=r"split\.json is damaged, or of another version of xtoken"):
        restore_split(run.spec, nothing)


def test_a_split_again_of_another_text_is_recorded_where_no_checkpoint_refuses_it(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_run: ResolvedRun) -> int:
        raise ConfigError("what differs is the text")

    before = (run.spec.output / FILE).read_text()
    (tmp_path / "text.txt").write_text("".join(f"other {number}\n" for number in range(400)))
    run_of(tmp_path, run.spec.output)
    with monkeypatch.context() as patch:
        patch.setattr(split_record, "check_output", refuse)
        record_split(run, nothing)
    assert (run.spec.output / FILE).read_text() == before
    record_split(run, nothing)
    assert (run.spec.output / FILE).read_text() != before


def test_a_baseline_restores_the_text_of_its_run_and_records_none(run: ResolvedRun, tmp_path: Path) -> None:
    output = tmp_path / "out-baseline"
    output.mkdir()
    baseline = run.model_copy(update={"spec": run.spec.model_copy(update={"output": output})})
    record_split(baseline, nothing)
    before = contents(run.spec.output)["train.txt"]
    shutil.rmtree(run.spec.output / "cache")
    restore_split(baseline.spec, nothing)
    assert contents(run.spec.output)["train.txt"] == before
    assert list(output.iterdir()) == []


def test_what_a_killed_start_has_left_is_removed(run: ResolvedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_activity: str, _done: float) -> None:
        raise KeyboardInterrupt

    output = run.spec.output
    shutil.rmtree(output / "cache")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", lambda *_arguments, **_options: None)
        restore_split(run.spec, stop)
    assert len(list(split_directory(output).iterdir())) == 1
    restore_split(run.spec, nothing)
    assert {"train.txt", "held-out.txt", "origin"} == set(contents(output))


def test_two_runs_of_one_process_restore_a_text_at_a_time(run: ResolvedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [run.spec, run.spec.model_copy(update={"output": run.spec.output.with_name("out-baseline")})]
    before = contents(run.spec.output)
    shutil.rmtree(run.spec.output / "cache")
    barrier, sync = threading.Barrier(2, timeout=10), atomic.sync

    def together(path: Path) -> None:
        barrier.wait()
        sync(path)

    monkeypatch.setattr(atomic, "sync", together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda spec: restore_split(spec, nothing), specs))
    again = contents(run.spec.output)
    assert again == {name: before[name] for name in ("train.txt", "held-out.txt", "origin")}


@pytest.mark.parametrize("name", ["a b.txt", "a\x0cb.txt", "a\x85b.txt", "a\u2028b.txt"])
def test_the_name_of_a_text_may_hold_what_ends_a_line_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert SplitRecord(origin=origin_of([tmp_path / name]), parts=("", "")).paths == (tmp_path / name,)


def test_no_text_outside_the_roots_is_read(run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, elsewhere = run.spec.output, tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.rmtree(output / "cache")
    for name, value in Roots.of([elsewhere], [output]).environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OutsideError, match=r"data\.path: .*text\.txt lies under none of"):
        restore_split(run.spec, nothing)
    for name, value in Roots.of([tmp_path], [output]).environment.items():
        monkeypatch.setenv(name, value)
    (output / "cache").symlink_to(elsewhere)
    with pytest.raises(OutsideError, match=r"output: .* is written: it must lie under"):
        restore_split(run.spec, nothing)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "output"),
    [("/a/cache/split/train.txt", "/a"), ("/a/split/train.txt", None), ("/a/cache/split/text.txt", None)],
)
def test_which_run_has_split_a_text(path: str, output: str | None) -> None:
    assert split_output([Path(path)]) == (output and Path(output))
    assert split_output([Path(path)] * 2) is None
