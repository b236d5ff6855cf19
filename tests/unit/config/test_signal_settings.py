"""What a run's settings make of its rings, and which settings cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.cases import cases
from tests.support.runs import changed, resolved_run, revised
from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec, parse_run_spec
from xtoken_core.config.validation_errors import NAMED_ELSEWHERE, describe
from xtoken_core.errors import ConfigError
from xtoken_services.common.batches.step_plan import ring_shape, selects_columns


def run_with(directory: Path, transport: str, content: str | None = None, **loss: object) -> ResolvedRun:
    """A run whose teacher has hidden states of 16."""
    run = resolved_run(directory, transport=transport)
    document = run.spec.model_dump()
    document["teacher"] = [{**document["teacher"][0], "content": content}]
    spec = RunSpec.model_validate({**document, "loss": loss})
    teacher = run.teachers[0].model_copy(update={"hidden_size": 16})
    return run.model_copy(update={"spec": spec, "teachers": (teacher,)})


@pytest.mark.parametrize("transport", ["auto", "cuda_ipc", "shared_memory"])
def test_slots_of_logits_are_as_wide_as_the_head(tmp_path: Path, transport: str) -> None:
    shape = ring_shape(run_with(tmp_path, transport, vocab_topk=8), 0)
    assert (shape.width, shape.hidden, shape.max_rows, shape.head_bytes) == (64, 0, 0, 0)


@pytest.mark.parametrize(
    ("transport", "content"), [("cuda_ipc", "hidden"), ("shared_memory", "hidden"), ("queue", None)]
)
def test_slots_of_hidden_states_have_room_for_every_rows_maxima(
    tmp_path: Path, transport: str, content: str | None
) -> None:
    run = run_with(tmp_path, transport, content, vocab_topk=8)
    shape = ring_shape(run, 0)
    assert (shape.width, shape.hidden, shape.head_bytes) == (16, 16, 64 * 16 * 4)
    assert shape.max_rows == run.spec.train.samples_per_step == 8
    assert shape.slot_bytes < ring_shape(run_with(tmp_path, "auto"), 0).slot_bytes


@cases(
    "loss, needed",
    ({"vocab_topk": 8}, True),
    ({"vocab_topk": None}, False),
    ({"vocab_topk": 60}, False),
    ({"vocab_topk": 8, "gold_loss": True}, False),
    ({"vocab_topk": 8, "teacher_modes": ["gold"]}, False),
    ids=str,
)
def test_maxima_come_only_where_columns_are_selected(tmp_path: Path, loss: dict[str, object], needed: bool) -> None:
    run = run_with(tmp_path, "queue", **loss)
    assert selects_columns(run, 0) == needed
    assert (ring_shape(run, 0).max_rows > 0) == needed


@cases(
    "place, value, said",
    ("student.dtype", "float16", "student is not trained in float16"),
    ("train.betas", [0.9, 1.5], "train.betas"),
    ("workers.transport", "cuda_ipc", 'workers.transport = "cuda_ipc" needs GPUs'),
    ("teacher.0.quantized", "fp8", 'teacher.0.quantized = "fp8" needs a GPU'),
    ("eval", {"samples": {"prompts": ["a"]}}, "eval.samples: it takes a list"),
    ("teacher.0.prompt", {"path": "x"}, 'teacher.0.prompt: it takes a text, or { file = "PATH" }'),
    ("workers", {"ranks": 2, "stop_timeout_s": 5}, "workers.stop_timeout_s = 5: several ranks"),
)
def test_what_cannot_be_is_refused_before_a_file_is_read(tmp_path: Path, place: str, value: object, said: str) -> None:
    raw: Any = resolved_run(tmp_path, device="cpu").spec.model_dump(mode="json")
    part: Any = raw
    *parents, name = place.split(".")
    for key in parents:
        part = part[int(key)] if key.isdigit() else part[key]
    part[name] = value
    with pytest.raises(ValidationError) as found:
        RunSpec.model_validate(raw)
    assert said in describe(found.value, RunSpec)


@cases(
    "change, said",
    ({"trian": {}}, "trian: there is no such field; did you mean train?"),
    (
        {"train": {"sample_per_step": 8}},
        "train.sample_per_step: there is no such field; did you mean samples_per_step?",
    ),
    ({"train": {"lora": {"rnk": 8}}}, "train.lora.rnk: there is no such field; did you mean rank?"),
    ({"teacher": [{"tokeniser": "t"}]}, "teacher.tokeniser: there is no such field; did you mean tokenizer?"),
    ({"rollout": {"after": 1.5}}, "rollout.after: input should be a valid integer, or input should be less than 1"),
    ({"ray": {"zzz": 1}}, "ray.zzz: there is no such field; there are "),
    ({"train": {"lr": 1}}, "train.lr: there is no such field; did you mean learning_rate?"),
    ({"train": {"num_train_epochs": 1}}, "there is no such field; did you mean data.epochs?"),
    ({"train": {"max_length": 8}}, "there is no such field; did you mean student.context_length?"),
    ({"teacher": [{"max_length": 8}]}, "teacher.max_length: there is no such field; did you mean context_length?"),
    ({"train": {"epochs": 1}}, "train.epochs: there is no such field; did you mean data.epochs?"),
    ({"train": {"seed": 1}}, "train.seed: there is no such field; did you mean seed?"),
)
def test_a_field_that_is_none_is_told_with_the_one_that_was_meant(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_run_spec(change, source="run.toml")
    assert said in str(found.value)


def test_names_of_other_trainers_lead_to_settings_that_there_are() -> None:
    for name in NAMED_ELSEWHERE.values():
        table, _, key = name.partition(".")
        assert key in RunSpec.model_fields[table].annotation.model_fields, name


def settings(directory: Path, workers: dict[str, Any] | None = None, **teacher: Any) -> RunSpec:
    """A run whose teacher and workers have these settings too."""
    return revised(resolved_run(directory).spec, teacher=teacher, workers=workers or {})


@cases(
    "workers, given, transport, content",
    ({}, None, "auto", "logits"),
    ({"transport": "cuda_ipc"}, "hidden", "cuda_ipc", "hidden"),
    ({"transport": "shared_memory"}, "hidden", "shared_memory", "hidden"),
    ({"transport": "queue"}, None, "queue", "hidden"),
    ({"transport": "queue"}, "topk", "queue", "topk"),
)
def test_content_and_transport(
    tmp_path: Path, workers: dict[str, Any], given: str | None, transport: str, content: str
) -> None:
    spec = settings(tmp_path, workers, content=given)
    assert (spec.workers.transport, spec.content_of(0)) == (transport, content)
    assert RunSpec.model_validate(spec.model_dump()) == spec


@cases(
    "workers, teacher, message",
    ({"transport": "queue"}, {"content": "logits"}, "too large for the queue"),
    ({"transport": "cuda_ipc", "device": "cpu"}, {}, 'workers.transport = "cuda_ipc" needs GPUs'),
    ({}, {"topk": 8}, 'topk belongs to content = "topk"'),
    ({}, {"content": "hidden", "topk": 5}, 'topk belongs to content = "topk"'),
    ({}, {"content": "topk", "topk": 0}, "teacher.0.topk"),
    ids=str,
)
def test_contradictions_of_content_and_transport(
    tmp_path: Path, workers: dict[str, Any], teacher: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as found:
        settings(tmp_path, workers, **teacher)
    assert message in describe(found.value, RunSpec)


@pytest.mark.parametrize(("k", "listed"), [(16, 16), (1000, 60)])
def test_slots_of_largest_logits(tmp_path: Path, k: int, listed: int) -> None:
    spec = settings(tmp_path, content="topk", topk=k, dtype="bfloat16")
    run = resolved_run(tmp_path).model_copy(update={"spec": spec})
    shape = ring_shape(run, 0)
    assert (shape.topk, shape.width, shape.dtype, shape.max_rows) == (listed, 2 * listed + 4, "float32", 0)
    assert run.identity().teacher[0].topk == k


def test_another_weight_at_the_end_is_another_run(tmp_path: Path) -> None:
    run = resolved_run(tmp_path)
    fading = changed(run, loss={"kl_loss_weight_end": 0.5})
    assert run.identity().differences(fading.identity()) == ["loss.kl_loss_weight_end"]
    less, more = (changed(run, eval=EvalSpec(max_bytes=size)).identity() for size in (1 << 16, 1 << 20))
    assert less.differences(more) == ["held_out_bytes"] and less.differences(run.identity()) == []
