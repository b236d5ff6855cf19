"""Runs that cannot end well: each is refused or fails with its reason, and none leaves a model behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import Crew
from tests.support.forks import ForkLauncher
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.run_warnings import warnings_of
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.json_files import last_line
from xtoken_services.supervisor.run_files import Curve, with_files

Start = Callable[..., Crew]
REFUSING = (
    "{% if messages[0].role == 'user' %}{{ raise_exception('no user here') }}{% endif %}{{ messages[0].content }}"
)


def chats(directory: Path, count: int) -> Path:
    """Conversations of one message each."""
    file = directory / "user.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in documents(count, seed=5)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def refusing(assets: TinyAssets, directory: Path, data: Path, **changes: Any) -> RunSpec:
    """A run whose chat templates take no user's message."""
    template = directory / "refusing.jinja"
    template.write_text(REFUSING, encoding="utf-8")
    student = {"model": assets.student, "context_length": 64, "chat_template": template}
    teacher = [assets.first_teacher(chat_template=template)]
    return tiny_spec(assets, directory, data={"path": data}, student=student, teacher=teacher, **changes)


def failed(crew: Crew) -> str:
    """The reason of a run that has failed once and for all, without a model."""
    ending = crew.join()
    assert (ending.state, ending.exit_code) == (RunState.FAILED, 2), ending
    assert not (crew.spec.output / "model").exists() and not (crew.spec.output / "summary.json").exists()
    return ending.error


def test_a_run_without_a_usable_record_ends_before_its_first_step(
    assets: TinyAssets, tmp_path: Path, start: Start, forking: ForkLauncher
) -> None:
    crew = start(refusing(assets, tmp_path, chats(tmp_path, 40)), forking)
    reason = failed(crew)
    assert "none of 40 samples, evenly spread over the run, can be used" in reason
    assert "user.jsonl:" in reason and "no user here" in reason
    assert steps_of(crew.spec.output) == []


def test_a_run_whose_every_loss_is_not_finite_writes_no_model(
    assets: TinyAssets, tmp_path: Path, start: Start, forking: ForkLauncher
) -> None:
    student = tmp_path / "nan"
    shutil.copytree(assets.student, student)
    weights = load_file(student / "model.safetensors")
    save_file({k: torch.full_like(v, torch.nan) for k, v in weights.items()}, student / "model.safetensors")
    spec = tiny_spec(replace(assets, student=student), tmp_path, records=16, train={"packing": "off"})
    crew = start(spec, forking)
    assert "nothing was trained, no model is written: of 16 samples 2 steps had no finite loss" in failed(crew)


def test_many_skipped_and_cut_samples_are_said_from_the_start_to_the_end(
    assets: TinyAssets, tmp_path: Path, start: Start, forking: ForkLauncher
) -> None:
    mixed = [json.dumps({"text": text}) for text in documents(14, seed=4, words=12)]
    mixed += chats(tmp_path, 10).read_text("utf-8").splitlines()
    long = json.dumps({"text": " ".join(documents(20, seed=6))})
    data = tmp_path / "mixed.jsonl"
    data.write_text("\n".join([*mixed, *[long] * 8]) + "\n", encoding="utf-8")
    crew = start(refusing(assets, tmp_path, data), forking)
    crew.complete()
    status = with_files(crew.supervisor.status(), last_line(crew.spec.output / "steps.jsonl"), Curve(tmp_path / "none"))
    assert status.summary is not None and status.summary["skipped"] == 10
    before = status.model_copy(update={"last": None, "summary": None})
    under_way = status.model_copy(update={"summary": None})
    for said in (before, under_way, status):
        lines = warnings_of(said)
        assert lines["skipped"].startswith("10 of 32 samples are skipped"), lines
        assert "no user here" in lines["skipped"]
        assert lines["truncated"].startswith("8 of 32 samples are cut at a context")
    assert status.last is not None and (status.last["skipped_total"], status.last["truncated_total"]) == (10, 8)
