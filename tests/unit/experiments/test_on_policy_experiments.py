"""On-policy experiments: run files, equal tokens, the task of verbs, the page."""

import json
import tomllib

import pytest

from experiments.digits.settings import FULL, REDUCED
from experiments.on_policy import page
from experiments.on_policy.lengths import Lengths
from experiments.on_policy.methods import METHODS, file_of, planned
from experiments.on_policy.real import methods as real
from experiments.on_policy.real import task
from experiments.on_policy.real.__main__ import cells_of_first_seed
from xtoken_core.config.spec import RunSpec


@pytest.mark.parametrize("scale", [REDUCED, FULL], ids=["reduced", "full"])
@pytest.mark.parametrize("name", METHODS)
def test_run_files_differ_in_what_is_generated(scale, name):
    raw = tomllib.loads(file_of(scale, name, 1, steps=7, max_new_tokens=64))
    spec = RunSpec.model_validate(raw)
    prompts = 0 if spec.rollout is None else spec.rollout.prompts_of(spec.train.samples_per_step)
    assert prompts == METHODS[name].fraction * scale.go_on.samples
    assert spec.train.max_steps == 7
    assert (spec.loss.mode == "chain") == (METHODS[name].base == "chain")
    assert spec.loss.reverse_kl == (name == "on_policy_reverse")


def test_steps_have_equal_student_tokens():
    lengths = Lengths(text=60.0, generated=40.0)
    assert [lengths.steps(name, 100) for name in METHODS] == [100, 100, 150, 120, 150]
    assert len(planned(REDUCED)) == len(METHODS) * REDUCED.seeds


@pytest.mark.parametrize("size", real.SIZES)
@pytest.mark.parametrize("name", real.METHODS)
def test_run_files_of_verbs(name, size):
    spec = RunSpec.model_validate(tomllib.loads(real.job(real.Cell(name, 1e-4, 2), real.SIZES[size]).file))
    fraction = 0.0 if spec.rollout is None else spec.rollout.fraction
    assert (fraction, bool(spec.teacher)) == (real.METHODS[name].fraction, real.METHODS[name].taught)
    assert spec.eval is not None and spec.eval.tasks is not None
    assert [*spec.eval.tasks.by_name] == ["validation", "test"]
    other = real.job(real.Cell(name, 1e-4, 2), real.SIZES[size], rollout={"weights": "cuda_ipc"}).file
    assert ('weights = "cuda_ipc"' in other) == (fraction > 0)


@pytest.mark.parametrize("size", real.SIZES)
def test_rows_that_are_asked_for_are_run_first(size):
    cells = cells_of_first_seed(real.SIZES[size])
    count = len(real.ASKED_FOR) * len(real.SIZES[size].rates)
    assert {cell.method for cell in cells[:count]} == set(real.ASKED_FOR)
    assert {cell.method for cell in cells} == set(real.METHODS)
    assert len({cell.rate for cell in cells[: len(real.ASKED_FOR)]}) == 1


def test_verbs_of_the_test_are_in_no_prompt_of_the_training(tmp_path):
    files = task.write_files(tmp_path, train=200, validation=9, test=50)
    prompts = [json.loads(line)["prompt"] for line in files.prompts.read_text(encoding="utf-8").splitlines()]
    asked = [json.loads(line) for line in files.test.read_text(encoding="utf-8").splitlines()]
    for record in asked:
        assert not any(f": {record['answer']}\n" in prompt for prompt in prompts)
        stem = record["answer"].removesuffix("er")
        assert stem in record["prompt"].splitlines()[-1] and record["prompt"].count("\n") == task.SHOWN
    known = {verb.removesuffix("er") for verb in task.split_verbs()[0]}
    last = [prompt.splitlines()[-1].removesuffix(" :").split()[1] for prompt in prompts]
    assert all(any(form.startswith(stem) for stem in known) for form in last)


def test_the_page_is_in_step_with_the_results():
    assert page.written() == page.PAGE.read_text(encoding="utf-8"), "run: python -m experiments.on_policy.page"
