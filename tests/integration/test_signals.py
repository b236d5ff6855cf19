"""Whole runs of real processes, once per way in which a teacher's signal can travel, a served teacher's too."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.integration.conftest import Start, Tiny
from tests.support.engine_server import ModelHandler, serving
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunState
from xtoken_services.common.stores.store_build import build_spec
from xtoken_services.supervisor.local_run import run_to_end
from xtoken_services.supervisor.store_build import store_build


def losses_of(tiny: Tiny, name: str, **changes: Any) -> torch.Tensor:
    """The losses of a tiny run that ended well, having trained each of its 48 positions once."""
    steps = tiny.start(tiny.spec(name, records=48, **changes)).complete(48)
    return torch.tensor([line["loss"] for line in steps])


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """What the run over shared memory gave, once it was made."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_hidden_states_train_as_logits_do(tiny: Tiny, expected: dict[str, torch.Tensor], transport: str) -> None:
    if not expected:
        expected["loss"] = losses_of(tiny, "logits", workers={"transport": "shared_memory"})
    teacher = [tiny.assets.first_teacher(content="hidden")]
    found = losses_of(tiny, "hidden", workers={"transport": transport}, teacher=teacher)
    torch.testing.assert_close(found, expected["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_packed_rows_train_as_padded_ones(tiny: Tiny) -> None:
    found = {}
    for packing in ("on", "off"):
        changes = {"train": {"packing": packing}, "loss": {"vocab_topk": None}}
        found[packing] = losses_of(tiny, packing, **changes)
    torch.testing.assert_close(found["on"], found["off"], rtol=1e-4, atol=1e-6)
    padding = [max(line["padding"] for line in steps_of(tiny.path / packing / "out")) for packing in ("on", "off")]
    assert padding[0] < padding[1]


@pytest.mark.slow
def test_a_killed_teacher_is_replaced_where_the_signal_goes_through_the_queue(tiny: Tiny) -> None:
    spec = tiny.spec(records=160, workers={"transport": "queue"})
    crew = tiny.start(spec)
    crew.wait_for_steps(3)
    crew.kill("teacher-0-0")
    crew.complete(160)


@pytest.mark.slow
def test_a_teacher_that_hangs_is_told_of_and_replaced(tiny: Tiny) -> None:
    spec = tiny.spec(records=160, workers={"transport": "shared_memory"})
    crew = tiny.start(spec)
    crew.wait_for_steps(3)
    psutil.Process(crew.pid("teacher-0-0")).suspend()
    crew.complete(160)
    trainer_log = next((spec.output / "logs").glob("trainer-0.*.log")).read_text()
    assert trainer_log.index("the teacher has ended: ring 1 is closed") < trainer_log.index(
        "ring 2 of the teacher is open"
    )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
def test_all_tokens_as_largest_logits_train_as_logits_do(tiny: Tiny, transport: str) -> None:
    teacher = tiny.assets.first_teacher()
    held_out = write_jsonl(tiny.path / "heldout.jsonl", documents(8, seed=5))
    changes: dict[str, Any] = {"loss": {"vocab_topk": None}, "eval": {"path": held_out}}
    whole = losses_of(tiny, "logits", **changes)
    changes |= {"teacher": [{**teacher, "content": "topk", "topk": 1000}], "workers": {"transport": transport}}
    found = losses_of(tiny, "topk", **changes)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    rows = [(tiny.path / name / "out" / "eval.jsonl").read_text().splitlines()[-1] for name in ("logits", "topk")]
    measured = [json.loads(row)["teacher_bits_per_byte"] for row in rows]
    assert measured[1] == pytest.approx(measured[0], rel=1e-4)


@pytest.mark.slow
def test_a_run_of_largest_logits_stops_and_resumes(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.path / "cache"))
    teachers = [
        {"model": tiny.assets.teacher, "context_length": 96, "content": "topk", "topk": 200},
        {"model": tiny.assets.student, "context_length": 64, "content": "topk", "weight": 0.5},
    ]
    # Random models: without cross-entropy nothing draws the student away from them.
    loss = {"mode": "chain", "ce_loss_scale": 0.0}
    spec = tiny.spec(records=96, teacher=teachers, loss=loss, workers={"transport": "queue"})
    crew = tiny.start(spec)
    crew.wait_for_steps(4)
    assert crew.stop().state == RunState.STOPPED
    assert 4 <= len(steps_of(spec.output)) < 12
    lines = tiny.start(spec).complete(96)
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


def test_a_model_that_does_not_say_its_hidden_size_cannot_send_hidden_states(tiny: Tiny) -> None:
    teacher = tiny.path / "teacher"
    shutil.copytree(tiny.assets.teacher, teacher)
    config = json.loads((teacher / "config.json").read_text())
    del config["hidden_size"]
    (teacher / "config.json").write_text(json.dumps(config))
    mine = tiny.assets.first_teacher(model=teacher)
    resolve_run(tiny.spec(teacher=[mine]))
    with pytest.raises(ConfigError, match="names no hidden_size: let the teacher send logits"):
        resolve_run(tiny.spec(teacher=[{**mine, "content": "hidden"}]))


# On a GPU


def gpu_workers(transport: str) -> dict[str, Any]:
    return {"transport": transport, "device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("transport", "content"), [("auto", None), ("cuda_ipc", None), ("cuda_ipc", "hidden"), ("queue", None)]
)
def test_every_signal_trains_alike_on_a_gpu(
    tiny: Tiny, expected: dict[str, torch.Tensor], transport: str, content: str | None
) -> None:
    if not expected:
        expected["gpu"] = losses_of(tiny, "logits", workers=gpu_workers("shared_memory"))
    teacher = [tiny.assets.first_teacher(content=content)]
    found = losses_of(tiny, "found", workers=gpu_workers(transport), teacher=teacher)
    torch.testing.assert_close(found, expected["gpu"], rtol=1e-3, atol=1e-4)
    teacher_log = next((tiny.path / "found" / "out" / "logs").glob("teacher-0-0.*.log")).read_text()
    assert ("slots in cuda_ipc" in teacher_log) == (transport != "queue")


@pytest.mark.gpu
def test_kills_on_a_gpu_lose_nothing_and_leave_no_memory(tiny: Tiny) -> None:
    torch.zeros(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    spec = tiny.spec(records=640, workers=gpu_workers("cuda_ipc"))
    crew = tiny.start(spec)
    for steps, victim in ((3, "teacher-0-0"), (12, "trainer-0"), (24, "teacher-0-0")):
        crew.wait_for_steps(steps)
        crew.kill(victim)
    crew.complete(640)
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("content", ["logits", "hidden"])
def test_a_teacher_on_another_gpu_trains_alike(tiny: Tiny, expected: dict[str, torch.Tensor], content: str) -> None:
    if not expected:
        expected["gpu"] = losses_of(tiny, "logits", workers=gpu_workers("shared_memory"))
    teacher = tiny.assets.first_teacher(gpu=1, content=content)
    found = losses_of(tiny, "found", workers=gpu_workers("cuda_ipc"), teacher=[teacher])
    torch.testing.assert_close(found, expected["gpu"], rtol=1e-3, atol=1e-4)
    trainer_log = next((tiny.path / "found" / "out" / "logs").glob("trainer-0.*.log")).read_text()
    assert "lies on cuda:1 and the trainer is on cuda:0" in trainer_log


TOPK = 64


def losses(spec: RunSpec, start: Start) -> torch.Tensor:
    """The losses of a run that ended well."""
    start(spec).complete()
    return torch.tensor([line["loss"] for line in steps_of(spec.output)])


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "packing"), [("vllm", "on"), ("sglang", "off")])
def test_a_run_with_a_served_teacher_equals_one_with_its_weights(tiny: Tiny, engine: str, packing: str) -> None:
    teacher = tiny.assets.first_teacher(topk=TOPK)
    changes = {"loss": {"vocab_topk": None, "temperature": 1.0}, "train": {"packing": packing}}
    loaded = tiny.spec(records=32, teacher=[teacher | {"content": "topk"}], **changes)
    expected = losses(loaded, tiny.start)
    servers = [ModelHandler(tiny.assets.teacher, busy=3), ModelHandler(tiny.assets.teacher)]
    with serving(servers[0]) as first, serving(servers[1]) as second:
        weightless = tiny.path / "weightless"
        weightless.mkdir()
        for file in tiny.assets.teacher.iterdir():
            if file.suffix != ".safetensors":
                (weightless / file.name).symlink_to(file)
        served = teacher | {"model": weightless, "url": [first, second], "url_engine": engine}
        run = tiny.spec(records=32, teacher=[served], output=tiny.path / "served", **changes)
        torch.testing.assert_close(losses(run, tiny.start), expected, rtol=1e-4, atol=1e-5)
        store = str(tiny.path / "store")
        built = run_to_end(store_build(build_spec(run, None, store), store, run=run), show=False)
        assert (built.state, len(TeacherStore.open(store).entries)) == (RunState.COMPLETED, 32), built.error
    assert sum(line["served_requests"] for line in steps_of(tiny.path / "store" / "build")) >= 32
    lines = steps_of(run.output)
    answered, repeated = (sum(line[f"served_{name}"] for line in lines) for name in ("requests", "retries"))
    assert answered >= 32 and repeated == 3
    assert all(line["served_bytes"] > 0 and line["served_wait_seconds"] > 0 for line in lines)
    assert all(len(server.seen) > 4 for server in servers)


@pytest.mark.slow
def test_a_server_of_another_tokenizer_ends_the_run(tiny: Tiny) -> None:
    with serving(ModelHandler(tiny.assets.other_teacher)) as url:
        teacher = tiny.assets.first_teacher(url=url)
        changes = {"loss": {"vocab_topk": None, "temperature": 1.0}}
        ending = tiny.start(tiny.spec(records=16, teacher=[teacher], **changes)).join()
    assert ending.state == RunState.FAILED
    assert "let both have the same tokenizer" in ending.error
