"""Collators of real runs: killed and replaced in mid-run, and texts with weights."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.integration.conftest import Tiny
from tests.support.alignments import collator_of
from tests.support.collators import DEADLINE_S, CollatorCrew
from tests.support.columns import row_of
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl
from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import record_at
from xtoken_core.errors import ConfigError
from xtoken_services.common.run.resolve import file_warnings, resolve_run
from xtoken_services.supervisor.run import check_output

RECORDS, EPOCHS = 5000, 2
FIELDS = ["input_ids", "teacher_0_input_ids", "alignment_0_student_chunk_id"]


@pytest.fixture
def crew(assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CollatorCrew, RunSpec]]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = write_jsonl(tmp_path / "text.jsonl", documents(RECORDS, seed=3, words=60))
    steps = RECORDS * EPOCHS // 8
    data = {"path": text, "epochs": EPOCHS, "shuffle": True}
    spec = tiny_spec(assets, tmp_path, data=data, queue={"block_size": 4, "span_steps": steps})
    found = CollatorCrew(spec)
    yield found, spec
    found.close()


def check_rows(crew: CollatorCrew, spec: RunSpec, texts: list[str]) -> None:
    """Every position was put once, and its row is what collating its record gives."""
    assert crew.rows_put() == crew.positions == len(texts) * EPOCHS
    student, teacher = (AutoTokenizer.from_pretrained(m.model) for m in (spec.student, spec.teacher[0]))
    collator = collator_of(
        student, [teacher], spec.student.context_length, spec.teacher[0].context_length, aligner=None
    )
    expected = collator.rows([{"text": text} for text in texts])
    assert not expected.refused
    seen: list[int] = []
    for step in range(crew.positions // crew.samples_per_step):
        rows = crew.run.window(step, FIELDS, rewinds=crew.rewinds, wait_s=5.0)
        assert rows is not None and not rows.skipped and not rows.dead
        for name in FIELDS:
            column = rows.columns[name]
            values = np.frombuffer(column.values, dtype=column.dtype)
            parts = np.split(values, np.asarray(column.offsets)[1:-1])
            for position, part in zip(rows.ids, parts, strict=True):
                record = record_at(position, records=len(texts), seed=spec.seed, shuffle=True)
                assert np.array_equal(part, row_of(expected.columns[name], record)), (position, name)
        seen += rows.ids
    assert seen == list(range(crew.positions))


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_killed_and_added_collators_leave_every_position_with_one_row(crew: tuple[CollatorCrew, RunSpec]) -> None:
    workers, spec = crew
    for name in ("collator-0", "collator-1"):
        workers.start(name)
    workers.wait(lambda: workers.rows_put() >= 200)
    workers.kill("collator-0")
    before = workers.rows_put()
    workers.wait(lambda: workers.rows_put() >= before + 200)
    workers.kill("collator-1")
    assert workers.rows_put() < workers.positions, "the run was over before the second kill"
    for name in ("collator-0", "collator-1", "collator-2"):
        workers.start(name)
    workers.wait(lambda: workers.rows_put() >= workers.positions)
    check_rows(workers, spec, documents(RECORDS, seed=3, words=60))


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_a_killed_collator_without_a_successor_is_given_up_by_its_silence(crew: tuple[CollatorCrew, RunSpec]) -> None:
    workers, spec = crew
    workers.start("collator-0")
    workers.start("collator-1")
    workers.wait(lambda: {"collator-0", "collator-1"} <= workers.running() and workers.rows_put() >= 100)
    workers.kill("collator-0")
    workers.wait(lambda: workers.rows_put() >= workers.positions)
    check_rows(workers, spec, documents(RECORDS, seed=3, words=60))


@pytest.mark.slow
def test_a_bad_record_ends_a_run_without_a_supervisor_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = write_jsonl(tiny.path / "text.jsonl", [*documents(10, seed=4), "", *documents(10, seed=5)])
    crew = CollatorCrew(tiny.spec(data={"path": text, "on_bad_record": "fail"}))
    try:
        crew.start("collator-0")
        assert crew.ended("collator-0") == 2, crew.log()
        assert f"{text}:11: empty text" in crew.failed()
        assert crew.failed() in crew.log()
    finally:
        crew.close()


def spec_of(assets: TinyAssets, directory: Path, weights: tuple[float, float] = (3, 1), **changes: Any) -> RunSpec:
    """A run over 60 long texts, under `text`, and 5 short ones, under `body`."""
    write_jsonl(directory / "long.jsonl", documents(60, seed=3))
    (directory / "short.jsonl").write_text("".join(json.dumps({"body": f"{n} {n}"}) + "\n" for n in range(5)))
    sources = [
        {"path": directory / "long.jsonl", "weight": weights[0]},
        {"path": directory / "short.jsonl", "field": "body", "weight": weights[1]},
    ]
    return tiny_spec(assets, directory, data={"path": (), "sources": sources}, **changes)


@pytest.mark.slow
def test_rows_of_every_step_have_the_weights(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = spec_of(tiny.assets, tiny.path, queue={"block_size": 4, "span_steps": 10})
    crew = CollatorCrew(spec)
    try:
        assert crew.positions == 80
        crew.start("one")
        rows: list[tuple[int, ...]] = []
        for step in range(10):
            window = crew.run.window(step, ["input_ids"], rewinds=crew.rewinds, wait_s=60.0)
            assert window is not None and not window.skipped
            column = window.columns["input_ids"]
            values = np.frombuffer(column.values, dtype=column.dtype)
            rows += [tuple(part) for part in np.split(values, np.asarray(column.offsets)[1:-1])]
    finally:
        crew.close()
    short = [len(row) < 6 for row in rows]
    assert all(sum(short[first : first + 8]) == 2 for first in range(0, 80, 8))
    times = Counter(rows)
    assert sorted(times.values()) == [1] * 60 + [4] * 5


@pytest.mark.slow
def test_a_mixture_resumes_and_belongs_to_the_run(tiny: Tiny) -> None:
    spec = spec_of(tiny.assets, tiny.path)
    assert any(
        "data.sources.1: its 5 records" in line
        for line in file_warnings(resolve_run(spec_of(tiny.assets, tiny.path, (1, 1))))
    )
    crew = tiny.start(spec)
    crew.wait_for_steps(5)
    crew.kill("trainer-0")
    crew.complete()
    trained = {row["step"]: row["ids"] for row in steps_of(spec.output)}
    assert [p for step in sorted(trained) for p in trained[step]] == list(range(80))
    with pytest.raises(ConfigError, match=r"what differs is .*the weights of data\.sources"):
        check_output(resolve_run(spec_of(tiny.assets, tiny.path, (2, 1))))
