"""Runs whose teacher is the student: with its first weights, and with their moving average, also after kills."""

from typing import Any

import pytest

from tests.integration.conftest import Tiny
from tests.support.tiny_run import steps_of
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.resolve import resolve_run


def of_itself(tiny: Tiny, name: str, **teacher: Any) -> RunSpec:
    """A run of the student with itself as the teacher, at a rate that moves its weights."""
    own = {"model": "student", "context_length": 64, **teacher}
    loss = {"mode": "chain", "vocab_topk": None, "kl_loss_weight": 0.1}
    return tiny.spec(name, teacher=[own], loss=loss, train={"max_steps": 8, "learning_rate": 1e-2})


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_teacher_has_the_average_of_every_step_s_beginning_also_after_kills(tiny: Tiny) -> None:
    first, same, moving = (
        of_itself(tiny, name, **settings)
        for name, settings in (
            ("first", {}),
            ("same", {"sync": "ema", "sync_decay": 1e-9}),
            ("moving", {"sync": "ema", "sync_decay": 0.8}),
        )
    )
    divergences = []
    for spec in (first, same, moving):
        tiny.start(spec).complete(64)
        divergences.append([line["kl_loss"] for line in steps_of(spec.output)])
    fixed, none, ema = divergences
    # Without memory the average is the student as the step finds it: any other step's weights would differ from it.
    assert max(map(abs, none)) < 1e-5 < fixed[1]
    assert abs(ema[0]) < 1e-5 and all(1e-5 < e < f for e, f in zip(ema[1:], fixed[1:], strict=True))
    broken = of_itself(tiny, "broken", sync="ema", sync_decay=0.8)
    crew = tiny.start(broken)
    crew.wait_for_steps(2)
    crew.kill("teacher-0-0")
    crew.wait_for_steps(6)
    crew.kill("trainer-0")
    crew.complete(64)
    assert [line["kl_loss"] for line in steps_of(broken.output)] == ema


def test_a_teacher_that_is_the_student_has_its_files_and_one_weight(tiny: Tiny) -> None:
    spec = of_itself(tiny, "itself", sync="ema")
    assert (spec.teacher[0].model, spec.teacher[0].dtype) == (spec.student.model, spec.student.dtype)
    assert spec.loss.kl_loss_weight_end is None and spec.sync_decays == {0: 0.99}
    assert RunSpec.model_validate(spec.model_dump()) == spec
    identity, other = (each.identity() for each in map(resolve_run, (spec, of_itself(tiny, "other"))))
    assert identity.differences(other) == ["teacher.0.sync_decay"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sync": "ema", "content": "hidden"}, 'content = "hidden"'),
        ({"sync": "ema", "dtype": "bfloat16"}, "in its dtype"),
        ({"sync_decay": 0.5}, r"teacher.0.sync_decay belongs to teacher.0.sync"),
    ],
)
def test_weights_that_cannot_be_replaced_are_refused(tiny: Tiny, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        of_itself(tiny, "refused", **settings)


def test_another_model_s_weights_do_not_move(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=r'set teacher.0.model = "student"'):
        tiny.spec("other", teacher=[tiny.assets.first_teacher(sync="ema")])
