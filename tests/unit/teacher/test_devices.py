"""Which GPU a trainer and a teacher take, and that one which is thereby shared is told of."""

import logging
from pathlib import Path

import pytest
import torch

from tests.support.runs import resolved_run
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.models.loading import pick_device
from xtoken_services.teacher.prepare import device_of


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(logging.getLogger("xtoken"), "propagate", True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def spec_with(directory: Path, gpu: int | None, device: str = "auto") -> RunSpec:
    raw = resolved_run(directory, ranks=4, device=device).spec.model_dump()
    return RunSpec.model_validate({**raw, "teacher": [{**raw["teacher"][0], "gpu": gpu}]})


@pytest.mark.parametrize(("rank", "gpu", "told"), [(0, 0, False), (1, 1, False), (2, 0, True), (5, 1, True)])
def test_ranks_beyond_the_gpus_share_them_and_say_so(
    two_gpus: None, caplog: pytest.LogCaptureFixture, rank: int, gpu: int, told: bool
) -> None:
    assert pick_device("auto", rank) == torch.device("cuda", gpu)
    expected = [f"rank {rank} would be on GPU {rank}, torch sees 2 here: it shares cuda:{gpu}"] if told else []
    assert caplog.messages == expected


def test_a_rank_of_torchrun_is_its_own(
    two_gpus: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("cuda", 0) == torch.device("cuda", 1)
    assert caplog.messages == ["rank 3 would be on GPU 3, torch sees 2 here: it shares cuda:1"]


@pytest.mark.parametrize(
    ("gpu", "rank", "found", "told"),
    [
        (None, 1, 1, ""),
        (None, 3, 1, "rank 3 would be on GPU 3"),
        (1, 0, 1, ""),
        (0, 1, 1, ""),
        (1, 1, 0, "teacher of rank 1 (teacher.gpu = 1) would be on GPU 2"),
        (0, 3, 1, "teacher of rank 3 (teacher.gpu = 0) would be on GPU 3"),
    ],
)
def test_a_teacher_on_a_gpu_of_its_own_says_what_became_of_it(
    two_gpus: None, caplog: pytest.LogCaptureFixture, tmp_path: Path, gpu: int | None, rank: int, found: int, told: str
) -> None:
    assert device_of(spec_with(tmp_path, gpu), 0, rank) == torch.device("cuda", found)
    expected = [f"{told}, torch sees 2 here: it shares cuda:{found}"] if told else []
    assert caplog.messages == expected


def test_without_gpus_nothing_is_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(spec_with(tmp_path, 1), 0, 3) == pick_device("auto", 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        device_of(spec_with(tmp_path, 1, "cuda"), 0, 0)


def test_on_the_cpu_by_choice_no_gpu_is_taken(two_gpus: None, tmp_path: Path) -> None:
    assert device_of(spec_with(tmp_path, 1, "cpu"), 0, 3) == pick_device("cpu", 3) == torch.device("cpu")
