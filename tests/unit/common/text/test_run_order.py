"""Which record a position of a run reads, in runs with prompts."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import resolved_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.text.run_order import record_of


def run_of(
    directory: Path, *, records: int, shuffle: bool = False, block_size: int | None = None, **rollout: Any
) -> ResolvedRun:
    """Four steps of eight samples."""
    made = resolved_run(directory)
    raw = made.spec.model_dump()
    raw |= {"rollout": {"max_new_tokens": 8, **rollout}, "loss": {}, "queue": {"block_size": block_size}}
    raw["data"] |= {"shuffle": shuffle}
    return made.model_copy(update={"spec": RunSpec.model_validate(raw), "records": records})


def test_a_prompt_is_at_neighbouring_positions_and_every_record_comes_in_turn(tmp_path: Path) -> None:
    run = run_of(tmp_path, records=100, block_size=2, after=1, fraction=[0.5, 1.0], completions=2)
    assert [run.prompts.at(step) for step in range(4)] == [0, 4, 6, 8]
    assert [record_of(run, position) for position in range(32)] == [
        *range(8),
        8, 9, 10, 11, 12, 12, 13, 13,
        14, 15, 16, 16, 17, 17, 18, 18,
        19, 19, 20, 20, 21, 21, 22, 22,
    ]  # fmt: skip


@pytest.mark.parametrize("mixture", [(), ((16, 16), (8, 8))])
def test_no_record_comes_twice_before_all_have_come(tmp_path: Path, mixture: tuple[tuple[int, int], ...]) -> None:
    run = run_of(tmp_path, records=24, shuffle=True, after=2, completions=4).model_copy(update={"mixture": mixture})
    texts = [record_of(run, position) for position in range(16)]
    groups = [{record_of(run, position) for position in range(at, at + 4)} for at in range(16, 32, 4)]
    assert all(len(group) == 1 for group in groups), "its completions are of one prompt"
    assert len({*texts, *set.union(*groups)}) == 20


def test_a_fraction_of_the_runs_steps_is_at_least_one_step(tmp_path: Path) -> None:
    assert run_of(tmp_path, records=32, after=0.01).prompts.after == 1
    assert run_of(tmp_path, records=32, after=0.5).prompts.after == 2
    assert run_of(tmp_path, records=32, after=3).prompts.after == 3
