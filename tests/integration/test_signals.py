"""Whole runs of real processes, once per way in which a teacher's signal can travel: all must train alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.integration.conftest import Crew
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunState

Start = Callable[[RunSpec], Crew]


def losses_of(assets: TinyAssets, directory: Path, start: Start, **changes: Any) -> torch.Tensor:
    """The losses of a tiny run that ended well, having trained each of its 48 positions once."""
    spec = tiny_spec(assets, directory, records=48, **changes)
    steps = start(spec).complete(48)
    return torch.tensor([line["loss"] for line in steps])


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What the run over shared memory gave, once it was made."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_hidden_states_train_as_logits_do(
    assets: TinyAssets, tmp_path: Path, start: Start, expected: dict[str, torch.Tensor], transport: str
) -> None:
    if not expected:
        expected["loss"] = losses_of(assets, tmp_path / "logits", start, workers={"transport": "shared_memory"})
    teacher = [assets.first_teacher(content="hidden")]
    found = losses_of(assets, tmp_path / "hidden", start, workers={"transport": transport}, teacher=teacher)
    torch.testing.assert_close(found, expected["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_packed_rows_train_as_padded_ones(assets: TinyAssets, tmp_path: Path, start: Start) -> None:
    found = {}
    for packing in ("on", "off"):
        changes = {"train": {"packing": packing}, "loss": {"vocab_topk": None}}
        found[packing] = losses_of(assets, tmp_path / packing, start, **changes)
    torch.testing.assert_close(found["on"], found["off"], rtol=1e-4, atol=1e-6)
    padding = [max(line["padding"] for line in steps_of(tmp_path / packing / "out")) for packing in ("on", "off")]
    assert padding[0] < padding[1]


@pytest.mark.slow
def test_a_killed_teacher_is_replaced_where_the_signal_goes_through_the_queue(
    assets: TinyAssets, tmp_path: Path, start: Start
) -> None:
    spec = tiny_spec(assets, tmp_path, records=160, workers={"signal": "queue"})
    crew = start(spec)
    crew.wait_for_steps(3)
    crew.kill("teacher-0-0")
    crew.complete(160)


@pytest.mark.slow
def test_a_teacher_that_hangs_is_told_of_and_replaced(assets: TinyAssets, tmp_path: Path, start: Start) -> None:
    spec = tiny_spec(assets, tmp_path, records=160, workers={"signal": "shared_memory"})
    crew = start(spec)
    crew.wait_for_steps(3)
    psutil.Process(crew.pid("teacher-0-0")).suspend()
    crew.complete(160)
    trainer_log = next((spec.output / "logs").glob("trainer-0.*.log")).read_text()
    assert trainer_log.index("the teacher has ended: ring 1 is closed") < trainer_log.index(
        "ring 2 of the teacher is open"
    )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_all_tokens_as_largest_logits_train_as_logits_do(
    assets: TinyAssets, tmp_path: Path, start: Start, transport: str
) -> None:
    teacher = {"model": assets.teacher, "context_length": 96, "projection": assets.projection}
    held_out = write_jsonl(tmp_path / "heldout.jsonl", documents(8, seed=5))
    changes: dict[str, Any] = {"loss": {"vocab_topk": None}, "eval": {"path": held_out, "teacher_kl": True}}
    whole = losses_of(assets, tmp_path / "logits", start, **changes)
    changes |= {"teacher": [{**teacher, "content": "topk", "topk": 1000}], "workers": {"transport": transport}}
    found = losses_of(assets, tmp_path / "topk", start, **changes)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    rows = [(tmp_path / name / "out" / "eval.jsonl").read_text().splitlines()[-1] for name in ("logits", "topk")]
    measured = [json.loads(row)["held_out_kl_loss_t0"] for row in rows]
    assert measured[1] == pytest.approx(measured[0], rel=1e-4)


@pytest.mark.slow
def test_a_run_of_largest_logits_stops_and_resumes(
    assets: TinyAssets, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    teachers = [
        {"model": assets.teacher, "context_length": 96, "content": "topk", "topk": 200},
        {"model": assets.student, "context_length": 64, "content": "topk", "weight": 0.5},
    ]
    # Random models: without cross-entropy nothing draws the student away from them.
    loss = {"mode": "chain", "ce_loss_scale": 0.0}
    spec = tiny_spec(assets, tmp_path, records=96, teacher=teachers, loss=loss, workers={"transport": "queue"})
    crew = start(spec)
    crew.wait_for_steps(4)
    assert crew.stop().state == RunState.STOPPED
    assert 4 <= len(steps_of(spec.output)) < 12
    lines = start(spec).complete(96)
    assert 0 < lines[0]["chunk_mass_t0"] < 1
    assert lines[-1]["kl_loss_t0"] < lines[0]["kl_loss_t0"]


def test_signals_that_the_queue_cannot_hold_are_refused_before_the_start(assets: TinyAssets, tmp_path: Path) -> None:
    rows = resolve_run(tiny_spec(assets, tmp_path, queue={"memory_limit": 400_000}))
    assert rows.spec.workers.transport == "auto"
    with pytest.raises(ConfigError, match=r"bytes of signals \(workers\.slots = 8\): \d+ bytes are needed"):
        resolve_run(
            tiny_spec(assets, tmp_path, queue={"memory_limit": 400_000}, workers={"transport": "queue", "slots": 8})
        )
    chosen = {"queue": {"memory_limit": 400_000}, "loss": {"teacher_aggregation": "select_teacher"}}
    with pytest.raises(ConfigError, match=r"signals \(8 slots: select_teacher holds a step's signals at once\): \d+ b"):
        resolve_run(tiny_spec(assets, tmp_path, workers={"transport": "queue", "slots": 6}, **chosen))


def test_a_model_that_does_not_say_its_hidden_size_cannot_send_hidden_states(
    assets: TinyAssets, tmp_path: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(assets.teacher, teacher)
    config = json.loads((teacher / "config.json").read_text())
    del config["hidden_size"]
    (teacher / "config.json").write_text(json.dumps(config))
    mine = assets.first_teacher(model=teacher)
    resolve_run(tiny_spec(assets, tmp_path, teacher=[mine]))
    with pytest.raises(ConfigError, match="names no hidden_size: let the teacher send logits"):
        resolve_run(tiny_spec(assets, tmp_path, teacher=[{**mine, "content": "hidden"}]))


# On a GPU


def gpu_workers(transport: str) -> dict[str, Any]:
    return {"transport": transport, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("transport", "content"), [("auto", None), ("cuda_ipc", None), ("cuda_ipc", "hidden"), ("queue", None)]
)
def test_every_signal_trains_alike_on_a_gpu(
    assets: TinyAssets,
    tmp_path: Path,
    start: Start,
    expected: dict[str, torch.Tensor],
    transport: str,
    content: str | None,
) -> None:
    if not expected:
        expected["gpu"] = losses_of(assets, tmp_path / "logits", start, workers=gpu_workers("shared_memory"))
    teacher = [assets.first_teacher(content=content)]
    found = losses_of(assets, tmp_path / "found", start, workers=gpu_workers(transport), teacher=teacher)
    torch.testing.assert_close(found, expected["gpu"], rtol=1e-3, atol=1e-4)
    teacher_log = next((tmp_path / "found" / "out" / "logs").glob("teacher-0-0.*.log")).read_text()
    assert ("slots in cuda_ipc" in teacher_log) == (transport != "queue")


@pytest.mark.gpu
def test_kills_on_a_gpu_lose_nothing_and_leave_no_memory(assets: TinyAssets, tmp_path: Path, start: Start) -> None:
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    spec = tiny_spec(assets, tmp_path, records=640, workers=gpu_workers("cuda_ipc"))
    crew = start(spec)
    for steps, victim in ((3, "teacher-0-0"), (12, "trainer-0"), (24, "teacher-0-0")):
        crew.wait_for_steps(steps)
        crew.kill(victim)
    crew.complete(640)
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("content", ["logits", "hidden"])
def test_a_teacher_on_another_gpu_trains_alike(
    assets: TinyAssets, tmp_path: Path, start: Start, expected: dict[str, torch.Tensor], content: str
) -> None:
    if not expected:
        expected["gpu"] = losses_of(assets, tmp_path / "logits", start, workers=gpu_workers("shared_memory"))
    teacher = assets.first_teacher(gpu=1, content=content)
    found = losses_of(assets, tmp_path / "found", start, workers=gpu_workers("cuda_ipc"), teacher=[teacher])
    torch.testing.assert_close(found, expected["gpu"], rtol=1e-3, atol=1e-4)
    trainer_log = next((tmp_path / "found" / "out" / "logs").glob("trainer-0.*.log")).read_text()
    assert "lies on cuda:1 and the trainer is on cuda:0" in trainer_log
