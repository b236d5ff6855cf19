"""The time of a step by loss: measured with tiny models, and shown on the page."""

import json
from pathlib import Path

import pytest

from experiments.real import speed
from experiments.real.methods import GEMMA3, METHODS, SMOLLM2
from tests.support.tiny_run import documents, make_model, write_jsonl
from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer

PARTS = ("forward_ms", "loss_ms", "backward_ms")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("real")
    for train, name in ((train_student_tokenizer, SMOLLM2), (train_teacher_tokenizer, GEMMA3)):
        train(documents(40, seed=1), directory / "models" / name, vocabulary=420)
        make_model(directory / "models" / name, seed=0, extra_rows=0)
        config = directory / "models" / name / "config.json"
        longer = json.loads(config.read_text()) | {"max_position_embeddings": 1024}  # the experiments' contexts
        config.write_text(json.dumps(longer))
    (directory / "texts").mkdir()
    for split in ("train", "validation"):
        write_jsonl(directory / "texts" / f"handbook-de.{split}.jsonl", documents(20, seed=len(split)))
    return directory


@pytest.mark.slow
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


def test_rows_are_ordered_by_the_time_of_the_loss_and_compared_with_cross_entropy() -> None:
    rows = [
        {"method": name, "tokens_per_second": rate, "loss_ms": loss}
        for name, rate, loss in (("ce", 100.0, 1.0), ("uld", 25.0, 9.0), ("chain", 50.0, 3.0))
    ]
    found = speed.shown({"rows": rows})
    assert [(row["title"], row["ratio"]) for row in found] == [
        (METHODS[name].title, ratio) for name, ratio in (("ce", 1.0), ("chain", 2.0), ("uld", 4.0))
    ]
