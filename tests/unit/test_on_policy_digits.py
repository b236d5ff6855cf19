"""On-policy digits: run files, equal tokens, the page."""

import tomllib

import pytest

from experiments.digits.settings import FULL, REDUCED
from experiments.on_policy import page
from experiments.on_policy.lengths import Lengths
from experiments.on_policy.methods import METHODS, file_of, planned
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


def test_the_page_is_in_step_with_the_results():
    assert page.written() == page.PAGE.read_text(encoding="utf-8"), "run: python -m experiments.on_policy.page"
