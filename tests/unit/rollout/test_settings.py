"""Settings of rollouts: what is refused, and how a step is divided."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import cases
from tests.support.runs import resolved_run
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.stores.store_build import build_spec
from xtoken_services.rollout.main import make_sampler

TRAIN = {"samples_per_step": 24}
TASKS = {"tasks": {"path": Path("t.jsonl")}}
SERVED = {"model": Path("n"), "context_length": 256, "url": "http://t:1"}
STORED = {"model": Path("m"), "context_length": 256, "store": "s"}


def spec(rollout: dict[str, Any] | RolloutSpec, **parts: Any) -> RunSpec:
    model = {"model": Path("m"), "context_length": 256}
    raw = {"output": Path("out"), "student": model, "teacher": [model], "data": {"path": Path("d.jsonl")}, **parts}
    return RunSpec.model_validate({"train": TRAIN, **raw, "rollout": rollout})


@cases(
    "rollout, parts, reason",
    ({"publish_every": 3}, {}, "publish_every = 3 is more than rollout.max_staleness \\+ 1 = 2"),
    ({"fraction": 0.01}, {}, "is 0 prompts"),
    ({"fraction": 0.99}, {}, "is 24 prompts"),
    ({"fraction": 0.5}, {"queue": {"block_size": 8}}, "must divide the 12 prompts"),
    ({"fraction": [0.25, 0.5]}, {"queue": {"block_size": 12}}, "must divide the 6 prompts"),
    ({"after": 1.0}, {}, "less than 1"),
    ({"completions": 5}, {}, "rollout.completions = 5 must divide train.samples_per_step = 24 and the 24 prompts"),
    ({"completions": 4, "fraction": 0.3}, {}, "and the 7 prompts of a step"),
    ({"completions": 4}, {"queue": {"block_size": 6}}, "must be a multiple of rollout.completions = 4"),
    ({"completions": 4, "temperature": 0}, {}, "makes rollout.completions = 4 the same text"),
    ({"max_new_tokens": 256}, {}, "leaves no room for a prompt"),
    ({}, {"teacher": []}, "this run has none"),
    ({}, {"teacher": [STORED]}, "stored output is of given text"),
    ({}, {"loss": {"dynamic_loss_scaling": True}}, "no cross-entropy to scale by"),
    (
        {"url": "http://a:1", "url_engine": "sglang", "temperature": 0.7}, {"loss": {"importance_cap": 2.0}},
        "SGLang gives log-probabilities at temperature = 0.7",
    ),
    ({"url": "http://a:1", "url_engine": "sglang", "url_weights": "nccl"}, {}, '"nccl" is for vLLM, not sglang'),
    ({"url_weights": "ipc"}, {}, "url_weights belongs to url"),
    ({}, {"loss": {"kl_loss_weight": 0.0}}, "by the divergence alone"),
    ({}, {"loss": {"kl_loss_weight_end": 0.5}}, "unset loss.kl_loss_weight_end"),
    ({"stop_when_worse": 2}, {}, r"this run has none: name them in \[eval.tasks\]"),
    ({"stop_when_worse": 2}, {"eval": {}}, "goes by the accuracy on tasks"),
    ({"stop_when_worse": 2}, {"eval": TASKS | {"patience": 3}}, "eval.patience both end the run"),
    ({"fraction": [0.5, 1.0]}, {"loss": {"kl_loss_weight_end": 0.5}}, "unset loss.kl_loss_weight_end"),
    ({"after": 2}, {"loss": {"kl_loss_weight": 0.0}}, "set loss.kl_loss_weight above 0"),
    ({"after": 2}, {"loss": {"kl_loss_weight_end": 0.0}}, "set loss.kl_loss_weight_end above 0"),
    ({"after": 2}, {"loss": {"kl_loss_weight_end": "adaptive"}}, "unset loss.kl_loss_weight_end"),
    ({}, {"workers": {"nodes": 2}}, "single node group"),
    ({"teacher_temperature": 0.5}, {"teacher": [SERVED]}, "set teacher_temperature = 1"),
    ids=[
        "publish", "no-prompt", "no-text", "block", "first-block", "after", "completions", "completions-of-prompts",
        "completions-of-a-block", "same-completions", "length", "teacher", "store", "scaling", "cap", "ipc-of-sglang",
        "ipc-of-none", "weight", "weight-end", "worse-without-eval", "worse-without-tasks", "worse-and-patience",
        "weight-at-last", "cold-weight", "cold-weight-end", "cold-adaptive", "nodes", "served",
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(rollout: dict[str, Any], parts: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        spec(rollout, **parts)


@pytest.mark.parametrize(("fraction", "prompts", "block"), [(1.0, 24, 12), (0.5, 12, 12), (0.3, 7, 1), (0.25, 6, 6)])
def test_prompts_are_whole_blocks_of_a_step(fraction: float, prompts: int, block: int) -> None:
    run = spec({"fraction": fraction})
    assert (run.prompts_per_step, run.block_size) == ((prompts, prompts), block)


@cases(
    "rollout, prompts, block",
    ({"fraction": [0.25, 1.0]}, (6, 24), 6),
    ({"fraction": [1.0, 0.5], "completions": 4}, (24, 12), 12),
    ({"completions": 8}, (24, 24), 8),
    ({"completions": 24}, (24, 24), 24),
)
def test_a_block_holds_all_completions_of_a_prompt(
    rollout: dict[str, Any], prompts: tuple[int, int], block: int
) -> None:
    run = spec(rollout)
    assert (run.prompts_per_step, run.block_size) == (prompts, block)


def test_a_cold_start_may_be_supervised() -> None:
    supervised = spec({"after": 0.25}, loss={"kl_loss_weight": 0.0, "kl_loss_weight_end": 0.5})
    assert supervised.has_text and not spec({}).has_text and spec({"fraction": [0.5, 1.0]}).has_text
    weights = [supervised.loss.kl_weight_at(step, 8, after=2) for step in range(8)]
    assert weights == [0.0, 0.0, *[0.5] * 6]
    one = spec({"after": 2}).loss
    assert [one.kl_weight_at(step, 8, after=2) for step in (0, 2, 8)] == [1.0] * 3


def test_completions_have_one_weight_by_default() -> None:
    assert spec({}).loss.kl_loss_weight_end is None
    assert spec({"fraction": 0.5}).loss.kl_loss_weight_end is None


def test_settings_made_in_python_have_the_defaults_of_a_run_file() -> None:
    assert spec({"fraction": 0.5}, loss=LossConfig()).loss == spec({"fraction": 0.5}).loss
    assert spec({"fraction": 0.5}, loss=LossConfig(kl_loss_weight_end=0.0)).loss.kl_loss_weight_end == 0
    whole = spec({}).model_copy(update={"rollout": None})
    text_only = {name: getattr(whole, name) for name in ("output", "student", "data", "train")}
    assert RunSpec(**text_only, loss=LossConfig()) == RunSpec(**text_only)


def test_the_weight_of_the_divergence_may_change_beside_text() -> None:
    assert spec({"fraction": 0.5}, loss={"kl_loss_weight_end": 0.0}).loss.kl_loss_weight_end == 0


def test_publishing_as_rarely_as_staleness_allows_is_taken() -> None:
    run = spec({"publish_every": 4, "max_staleness": 3})
    assert run.rollout is not None
    assert spec({}).rollout is not None


@pytest.mark.parametrize("form", [{"reverse_kl": True}, {"beta": 0.5}, {"importance_cap": 2.0}])
def test_reverse_forms_of_chain_need_generated_text(form: dict[str, Any]) -> None:
    loss = {"mode": "chain", **form}
    assert spec({}, loss=loss).rollout is not None
    with pytest.raises(ValueError, match="add \\[rollout\\] or unset it"):
        RunSpec.model_validate({**spec({}, loss=loss).model_dump(), "rollout": None})


def test_a_run_that_trains_on_completions_has_no_store_to_build() -> None:
    with pytest.raises(ConfigError, match=r"leave \[rollout\] out of the run file to build a store"):
        build_spec(spec({}), None, "store")


def test_weights_in_a_gpus_memory_need_a_gpu(tmp_path: Path) -> None:
    made = resolved_run(tmp_path)
    for by in ("ipc", "nccl"):
        rollout = spec({"url": "http://a:1", "url_weights": by}).rollout
        run = made.model_copy(update={"spec": made.spec.model_copy(update={"rollout": rollout})})
        with pytest.raises(ConfigError, match=f'"{by}" needs a GPU for the rollout worker'):
            make_sampler(run, None, torch.device("cpu"))  # type: ignore[arg-type]


def test_stopping_when_worse_is_taken_and_may_change_in_a_resume_as_servers_may(tmp_path: Path) -> None:
    served = {"url": "http://a:1"}
    others = {"url": ["http://b:1"], "url_engine": "sglang", "url_timeout_s": 60.0, "url_connections": 2}
    run = spec({"stop_when_worse": 2, "url_weights": "ipc", **served}, eval=TASKS)
    assert run.rollout is not None and run.rollout.stop_when_worse == 2
    made = resolved_run(tmp_path)
    one, other = (
        made.model_copy(update={"spec": made.spec.model_copy(update={"rollout": each})}).identity()
        for each in (run.rollout, spec(others).rollout)
    )
    assert one == other


@cases(
    "rollout, loss, beta, rate",
    ({}, {}, 0.5, 3e-5),
    ({}, {"beta": "none"}, None, 3e-5),
    ({}, {"beta": 0.2}, 0.2, 3e-5),
    ({}, {"reverse_kl": True}, None, 3e-5),
    ({"after": 2}, {}, 0.5, 1e-4),
    ({}, {"teacher_modes": ["chain"]}, 0.5, 3e-5),
    ({}, {"teacher_modes": ["none"]}, 0.5, 3e-5),
    ({}, {"reverse_kl": "false"}, 0.5, 3e-5),
    ({}, {"mode": "gold", "teacher_modes": ["gold"]}, None, 3e-5),
)
def test_completions_have_defaults_of_their_own(
    rollout: dict[str, Any], loss: dict[str, Any], beta: float | None, rate: float
) -> None:
    raw = spec({}).model_dump() | {"loss": {"mode": "chain", **loss}, "rollout": {"max_new_tokens": 8, **rollout}}
    made = RunSpec.model_validate(raw | {"train": {"samples_per_step": 8, "micro_batch_tokens": 4096}})
    assert (made.loss.beta, made.loss.kl_loss_weight_end, made.train.learning_rate) == (beta, None, rate)


@pytest.mark.parametrize(
    ("teacher", "temperature"),
    [("n", 0.5), (SERVED, 1.0), ("m", 1.0), ("student", 1.0)],
    ids=["other", "served", "same", "student"],
)
def test_teachers_that_are_loaded_and_not_the_student_are_sharper_on_completions(
    teacher: Any, temperature: float
) -> None:
    teachers = [{"model": teacher, "context_length": 256} if isinstance(teacher, str) else teacher]
    made = spec({"fraction": 0.5}, teacher=teachers)
    assert made.rollout is not None and made.rollout.teacher_temperature == temperature
    assert RunSpec.model_validate(made.model_dump()) == made
    assert spec(RolloutSpec(fraction=0.5), teacher=teachers) == made


def test_a_setting_of_p_kl_alone_means_p_kl_on_completions_too() -> None:
    raw = spec({}).model_dump() | {"loss": {"vocab_topk": 64}, "rollout": {"max_new_tokens": 8}}
    assert (RunSpec.model_validate(raw).loss.mode, RunSpec.model_validate(raw).loss.beta) == ("p_kl", None)
