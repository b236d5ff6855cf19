"""The time of a step by loss: measured with tiny models, and shown on the page."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from experiments.real import page, speed, stages
from experiments.real.methods import CONDITIONS, GEMMA3, METHODS, SMOLLM2, projection_file
from experiments.real.models import MissingSourceError
from tests.support.tiny_run import documents, make_model, write_jsonl
from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer

PARTS = ("forward_ms", "loss_ms", "backward_ms")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("real")
    for train, name in ((train_student_tokenizer, SMOLLM2), (train_teacher_tokenizer, GEMMA3)):
        train(documents(40, seed=1), directory / "models" / name, vocabulary=420)
        make_model(directory / "models" / name, seed=0, extra_rows=0)
    (directory / "texts").mkdir()
    for split in ("train", "validation"):
        write_jsonl(directory / "texts" / f"handbook-de.{split}.jsonl", documents(20, seed=len(split)))
    return directory


def test_every_part_of_a_step_is_measured(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "speed.json"
    options = ["--device", "cpu", "--documents", "4", "--repeats", "2", "--state", str(state), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["speed", *options, "--methods", "ce", "chain_fading", "bpm"])
    assert speed.main() == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["method"]: row for row in result["rows"]}
    assert rows.keys() == {"ce", "chain_fading", "bpm"}
    assert len({(row["tokens"], row["micro_batches"]) for row in rows.values()}) == 1
    for row in rows.values():
        assert all(row[part] > 0 for part in PARTS)
        seconds = sum(row[part] for part in PARTS) / 1e3
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / seconds)
        assert row["peak_bytes"] is None  # a CPU has no such figure
    assert rows["ce"]["teacher_ms"] < rows["chain_fading"]["teacher_ms"]


def test_a_method_whose_text_is_missing_is_named_and_the_rest_is_measured(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    options = ["--device", "cpu", "--documents", "2", "--repeats", "1", "--state", str(state), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["speed", *options, "--methods", "samples", "ce"])
    assert speed.main() == 1
    assert "samples: there is no" in capsys.readouterr().err
    assert [row["method"] for row in json.loads(out.read_text(encoding="utf-8"))["rows"]] == ["ce"]


def test_the_model_that_the_continued_teacher_continues_stands_in_for_it(state: Path) -> None:
    assert not (state / "models" / METHODS["same"].teacher).exists()
    row = speed.measure(state, "same", device="cpu", documents=2, repeats=1)
    assert row["teacher_ms"] > 0
    document = tomllib.loads((state / "speed-same.toml").read_text(encoding="utf-8"))
    assert [table["model"] for table in document["teacher"]] == [f"models/{CONDITIONS['de-500k'].student}"]


def test_a_projection_of_another_version_is_built_again(state: Path) -> None:
    condition = CONDITIONS["de-500k"]
    file = state / projection_file(condition)
    stages._build_projection(state, condition)
    content = file.read_bytes()
    written = file.stat().st_mtime_ns
    stages._build_projection(state, condition)
    assert file.stat().st_mtime_ns == written
    file.write_bytes(content.replace(b"xtoken-projection-3", b"xtoken-projection-2"))
    stages._build_projection(state, condition)
    assert file.read_bytes() == content


def test_models_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingSourceError, match="run the stage `models` first"):
        speed.measure(tmp_path, "ce", device="cpu", documents=1, repeats=1)


def test_rows_are_ordered_by_the_time_of_the_loss_and_compared_with_cross_entropy() -> None:
    rows = [
        {"method": name, "tokens_per_second": rate, "loss_ms": loss}
        for name, rate, loss in (("ce", 100.0, 1.0), ("uld", 25.0, 9.0), ("chain", 50.0, 3.0))
    ]
    found = speed.shown({"rows": rows})
    assert [(row["title"], row["ratio"]) for row in found] == [
        (METHODS[name].title, ratio) for name, ratio in (("ce", 1.0), ("chain", 2.0), ("uld", 4.0))
    ]


def test_the_spread_of_one_computation_is_that_of_rows_with_equally_many_micro_batches() -> None:
    rows = [{"micro_batches": number, "forward_ms": time} for number, time in ((2, 1.0), (3, 5.0), (3, 4.0), (3, 7.0))]
    assert speed.forward_spread({"rows": rows}) == (3, 4.0, 7.0)


def test_the_page_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = json.loads(page.RESULT.read_text(encoding="utf-8"))
    row = {"method": "chain", "weight": "even", "tokens": 900, "micro_batches": 3, "teacher_ms": 7.0}
    row |= {"forward_ms": 1.0, "loss_ms": 2.5, "backward_ms": 3.0, "tokens_per_second": 123456.0, "peak_bytes": 2 << 30}
    file = tmp_path / "speed.json"
    machine = {"gpus": ["A GPU"], "cpus": 4, "python": "3", "torch": "2", "transformers": "5"}
    file.write_text(json.dumps({"machine": machine, "condition": "de-500k", "repeats": 7, "rows": [row]}))
    monkeypatch.setattr(speed, "RESULT", file)
    assert "| chain, one weight to the end | 2.5 |  | 2.00 |" in page.page(known)
