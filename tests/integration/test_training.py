"""What training settings do, with real processes: shares of ranks, precision, held-out losses, no finite loss."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.conftest import Tiny
from tests.support.cases import cases
from tests.support.tiny_run import documents, make_model, steps_of, write_jsonl
from tests.unit.trainer.students import make_model as make_student
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunState

on_two_devices = cases(
    "device",
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
    ),
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_steps_without_a_finite_loss_are_left_out_and_end_the_run(tiny: Tiny) -> None:
    train = {"learning_rate": 1e20, "warmup_steps": 0}
    spec = tiny.spec(train=train, loss={"vocab_topk": 64, "dynamic_loss_scaling": True})
    ending = tiny.start(spec).join()
    assert ending.state == RunState.FAILED
    assert "5 steps in a row" in ending.error
    assert "learning_rate" in ending.error
    lines = steps_of(spec.output)
    assert [line.get("nonfinite", False) for line in lines] == [False] * (len(lines) - 5) + [True] * 5
    assert lines[-1]["loss"] is None or lines[-1]["grad_norm"] is None
    assert all("learning_rate" not in line for line in lines[-5:])


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "checkpoints"), [(1e-9, 4), ("none", 1)], ids=str)
def test_a_checkpoint_is_written_once_so_many_minutes_have_passed(
    tiny: Tiny, minutes: float | str, checkpoints: int
) -> None:
    train = {"checkpoint_every": 1000, "checkpoint_minutes": minutes, "keep_checkpoints": 9}
    spec = tiny.spec(records=32, train=train)
    tiny.start(spec).complete()
    assert len(list((spec.output / "checkpoints").glob("step-*"))) == checkpoints
    logs = "".join(file.read_text("utf-8") for file in (spec.output / "logs").glob("*.log"))
    assert "INFO xtoken.trainer" in logs and "WARNING xtoken.trainer the teacher has ended" not in logs


@pytest.mark.slow
def test_a_bfloat16_student_learns_from_masters(tiny: Tiny) -> None:
    held_out = write_jsonl(tiny.path / "heldout.jsonl", documents(12, seed=5))
    spec = tiny.spec(
        student={"dtype": "bfloat16", "blockwise_head": True, "checkpoint_activations": True},
        eval={"path": held_out, "every": 12},
        loss={"mode": "chain", "vocab_topk": None},
    )
    spec.output.mkdir(parents=True)
    (spec.output / "eval.jsonl").write_text('{"step": 0, "loss": -1.0}\n', encoding="utf-8")
    tiny.start(spec).complete()
    first, last = lines_of(spec.output / "eval.jsonl")
    assert 0 < last["loss"] < first["loss"], "without a checkpoint the evaluation of another start counts no more"
    begin, *_, step = steps_of(spec.output)
    assert step["kl_loss"] < begin["kl_loss"]
    assert step["memory_peak_bytes"] > 0
    assert 0 <= step["data_wait"] + step["teacher_wait"] <= 1
    parts = [step[f"{name}_seconds"] for name in ("forward", "loss", "backward", "optimizer")]
    assert min(parts) > 0 and sum(parts[:3]) <= step["seconds"]
    card = (spec.output / "model" / "README.md").read_text()
    assert f"{last['bits_per_byte']:.4f}" in card
    model = AutoModelForCausalLM.from_pretrained(spec.output / "model")
    assert model.dtype == torch.bfloat16


@pytest.mark.slow
def test_shares_of_two_ranks_stop_and_one_rank_goes_on(tiny: Tiny) -> None:
    changes: dict[str, Any] = {"records": 160, "loss": {"vocab_topk": None}}
    whole = tiny.spec("whole", **changes)
    tiny.start(whole).complete()
    train = {"parallel": "fsdp", "checkpoint_every": 1000}
    two = tiny.spec("parts", **changes, train=train, workers={"ranks": 2})
    crew = tiny.start(two)
    crew.wait_for_steps(6)
    assert crew.stop().state == RunState.STOPPED
    saved = [path.name for path in (two.output / "checkpoints").iterdir()]
    assert len(saved) == 1
    assert int(saved[0].removeprefix("step-")) >= 6
    one = tiny.spec("parts", **changes, train=train)
    tiny.start(one).complete(160)
    losses = [[line["loss"] for line in steps_of(spec.output)] for spec in (whole, one)]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "replicate"])
def test_ranks_that_wait_for_each_other_leave_together_and_save(tiny: Tiny, parallel: str) -> None:
    """One rank's teacher hangs, the other rank has done its part of the step: both are asked to leave."""
    held_out = write_jsonl(tiny.path / "heldout.jsonl", documents(4, seed=5))
    copy = shutil.copy(held_out, tiny.path / "copy.jsonl")
    train = {"parallel": parallel, "checkpoint_every": 100_000}
    task = tiny.path / "task.jsonl"
    task.write_text('{"prompt": "def x", "answer": "x"}\n{"prompt": "return value", "answer": "x"}\n')
    tasks = {"path": task, "match": "contains", "max_new_tokens": 5, "samples": 2, "temperature": 1.0}
    evaluation = {"path": held_out, "also": [copy], "every": 2, "tasks": tasks, "keep_best": False}
    changes: dict[str, Any] = {"workers": {"ranks": 2, "collators": 1}, "eval": evaluation}
    spec = tiny.spec(records=80_000, train=train, **changes)
    crew = tiny.start(spec)
    crew.wait_for_steps(4)
    hung = psutil.Process(crew.pid("teacher-0-1"))
    hung.suspend()
    time.sleep(1)
    crew.supervisor.stop()
    checkpoints, deadline = spec.output / "checkpoints", time.monotonic() + 25
    while not list(checkpoints.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    hung.resume()
    assert crew.join().state == RunState.STOPPED
    steps = len(steps_of(spec.output))
    assert [path.name for path in checkpoints.iterdir()] == [f"step-{steps:08d}"]
    rows = lines_of(spec.output / "eval.jsonl")
    assert len(rows) > 1
    for name in ("bits_per_byte", "tokens", "bytes"):
        assert [row[f"{name}_copy"] for row in rows] == pytest.approx([row[name] for row in rows], rel=1e-6), name
    assert all(row["task_accuracy_task"] <= row["task_any_task"] for row in rows)


@cases(
    "workers, tolerance",
    pytest.param({"ranks": 2}, 1e-4, marks=pytest.mark.slow),
    pytest.param({"device": "cuda"}, 1e-3, marks=pytest.mark.gpu),
    ids=["two-ranks", "cuda"],
)
def test_a_step_follows_the_better_teacher_of_each_micro_batch(
    tiny: Tiny, workers: dict[str, Any], tolerance: float
) -> None:
    """Two ranks, or a GPU, have the micro-batches of one, and so its losses; a step without its teacher is repeated."""
    other = shutil.copytree(tiny.assets.teacher, tiny.path / "other")
    make_model(other, seed=9, extra_rows=16)
    texts = documents(64, seed=2, words=80)  # every row is cut: two fill a slot
    data = write_jsonl(tiny.path / "long.jsonl", texts[:32] + [""] * 8 + texts[32:])  # one step has nothing to choose
    spec = {
        "data": {"path": data, "shuffle": False},
        "teacher": [
            {"model": place, "context_length": 64, "projection": tiny.assets.projection}
            for place in (tiny.assets.teacher, other)
        ],
        "train": {"micro_batch_tokens": 128, "checkpoint_every": 100, "parallel": "fsdp"},
        "loss": {"vocab_topk": None, "teacher_aggregation": "select_teacher"},
    }
    alone = tiny.spec("alone", **spec, workers={"collators": 1})
    beside = tiny.spec("beside", **spec, workers={"collators": 1, **workers})
    crews = tiny.start(alone), tiny.start(beside)
    for crew in crews:
        crew.wait_for_steps(3)
        crew.kill("teacher-1-0")
    one, two = (crew.complete() for crew in crews)
    assert len(list((alone.output / "logs").glob("trainer-0.*.log"))) == 1
    assert [line["step"] for line in one] == [line["step"] for line in two] == [0, 1, 2, 3, 5, 6, 7, 8]
    for line in one:
        assert line["num_selected_chunks"] == line["num_valid_pairs_t0"] == line["num_valid_pairs_t1"]
        assert 0.5 < line["chunk_mass_t0"] <= 1  # a mean over the step's chunks, whoever was chosen
    assert any(0 < line["weight_t0"] < 1 for line in one)
    assert all(0 <= line["mfu"] < 1 for line in two if "device" in workers)  # on a GPU that is in the table
    for name in ("loss", "kl_loss", "weight_t0"):
        expected, found = (torch.tensor([line[name] for line in lines]) for lines in (one, two))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.slow
def test_a_student_with_experts_learns_with_its_router(tiny: Tiny) -> None:
    place = shutil.copytree(tiny.assets.student, tiny.path / "experts")
    width = AutoModelForCausalLM.from_pretrained(place).config.vocab_size
    before = make_student("qwen3-moe", vocab_size=width, max_position_embeddings=256)
    before.save_pretrained(place)
    spec = tiny.spec(student={"model": place}, train={"parallel": "replicate"})
    lines = tiny.start(spec).complete()
    assert lines[-1]["kl_loss"] < lines[0]["kl_loss"]
    after = AutoModelForCausalLM.from_pretrained(spec.output / "model").state_dict()
    moved = {name for name, value in before.state_dict().items() if not torch.equal(value, after[name])}
    assert {"router" if "mlp.gate.weight" in name else "experts" for name in moved if ".mlp." in name} == {
        "router",
        "experts",
    }


@pytest.mark.slow
def test_adapters_are_trained_and_saved_alone(tiny: Tiny) -> None:
    pytest.importorskip("peft")
    lora = {"rank": 4, "export": "adapter"}
    spec = tiny.spec(train={"lora": lora, "learning_rate": 0.03})
    lines = tiny.start(spec).complete()
    assert lines[-1]["kl_loss"] < lines[0]["kl_loss"]
    exported = {path.name for path in (spec.output / "model").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= exported
    assert "model.safetensors" not in exported


@on_two_devices
def test_two_ranks_share_a_student_that_learns_from_hidden_states(tiny: Tiny, device: str) -> None:
    loss = {"vocab_topk": None, "kl_loss_weight_end": 0.0}
    changes: dict[str, Any] = {"records": 96, "loss": loss, "student": {"blockwise_head": True}}
    losses = []
    for ranks in (1, 2):
        workers = {"ranks": ranks, "device": device}
        spec = tiny.spec(
            str(ranks),
            **changes,
            teacher=[tiny.assets.first_teacher(content="hidden")],
            train={"parallel": "fsdp"},
            workers=workers,
        )
        tiny.start(spec).complete(96)
        losses.append(torch.tensor([line["loss"] for line in steps_of(spec.output)]))
        scales = [line["kl_loss_scale"] for line in steps_of(spec.output)]
        assert scales == pytest.approx([1 - step / 11 for step in range(12)]), "every rank has the step's weight"
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)


@on_two_devices
def test_a_teacher_that_is_divided_gives_the_losses_of_a_whole_one(tiny: Tiny, device: str) -> None:
    shutil.copytree(tiny.assets.teacher, tiny.path / "teacher")
    make_model(tiny.path / "teacher", seed=5, extra_rows=16, layers=2, key_value_heads=2)
    losses = []
    for gpus in (1, 2):
        spec = tiny.spec(str(gpus), records=48, workers={"device": device})
        teacher = spec.teacher[0].model_copy(update={"model": tiny.path / "teacher", "gpus": gpus})
        steps = tiny.start(spec.model_copy(update={"teacher": (teacher,)})).complete()
        losses.append(torch.tensor([line["loss"] for line in steps]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_long_documents_are_divided_and_a_resumed_run_divides_them_alike(tiny: Tiny) -> None:
    texts = ["".join(documents(12, seed=seed)) for seed in range(16)]
    data = write_jsonl(tiny.path / "long.jsonl", texts)
    changes: dict[str, Any] = {"data": {"path": data, "long": "split"}}
    spec = tiny.spec(**changes)
    whole = resolve_run(spec)
    crew = tiny.start(spec)
    crew.wait_for_steps(5)
    crew.stop()
    tiny.start(spec).complete()
    assert whole.records > 3 * len(texts)
    assert sorted(i for line in steps_of(spec.output) for i in line["ids"]) == list(range(whole.records))
    summary = json.loads((spec.output / "summary.json").read_text())
    assert summary["truncated"] < 0.05 * whole.records


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["owner", "part"])
def test_a_divided_teacher_restarts_as_a_whole(tiny: Tiny, killed: str) -> None:
    shutil.copytree(tiny.assets.teacher, tiny.path / "teacher")
    make_model(tiny.path / "teacher", seed=5, extra_rows=16, layers=2, key_value_heads=2)
    spec = tiny.spec(records=160)
    teacher = spec.teacher[0].model_copy(update={"model": tiny.path / "teacher", "gpus": 2})
    crew = tiny.start(spec.model_copy(update={"teacher": (teacher,)}))
    crew.wait_for_steps(2)
    owner = psutil.Process(crew.pid("teacher-0-0"))
    (part,) = owner.children()
    (owner if killed == "owner" else part).kill()
    crew.wait(lambda: not part.is_running() or part.status() == psutil.STATUS_ZOMBIE)
    crew.wait(lambda: crew.pid("teacher-0-0") != owner.pid)
    crew.complete(160)
