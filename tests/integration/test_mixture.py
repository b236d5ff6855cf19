"""Weighted texts through real processes: the rows of every step, and a run that is stopped and resumed."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import Crew
from tests.support.collators import CollatorCrew
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.run.resolve import file_warnings, resolve_run
from xtoken_services.supervisor.run import check_output


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
def test_rows_of_every_step_have_the_weights(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    spec = spec_of(assets, tmp_path, queue={"block_size": 4, "span_steps": 10})
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
def test_a_mixture_resumes_and_belongs_to_the_run(
    assets: TinyAssets, tmp_path: Path, start: Callable[[RunSpec], Crew]
) -> None:
    spec = spec_of(assets, tmp_path)
    assert any(
        "data.sources.1: its 5 records" in line
        for line in file_warnings(resolve_run(spec_of(assets, tmp_path, (1, 1))))
    )
    crew = start(spec)
    crew.wait_for_steps(5)
    crew.kill("trainer-0")
    crew.complete()
    trained = {row["step"]: row["ids"] for row in steps_of(spec.output)}
    assert [p for step in sorted(trained) for p in trained[step]] == list(range(80))
    with pytest.raises(ConfigError, match=r"what differs is .*the weights of data\.sources"):
        check_output(resolve_run(spec_of(assets, tmp_path, (2, 1))))
