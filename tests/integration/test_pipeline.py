"""The whole pipeline with real processes: complete, killed in mid-run, resumed, in several node groups."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.conftest import Crew, Tiny
from tests.support.forks import ForkLauncher
from tests.support.tiny_run import documents, make_assets, steps_of, write_jsonl
from tests.support.trained_student import train_briefly
from xtoken_core.evaluation import evaluate
from xtoken_services.common.run.baseline import baseline_of
from xtoken_services.common.run.status import RunState, WorkerStatus


def trained_ids(output: Path) -> list[int]:
    return [i for line in steps_of(output) for i in line["ids"]]


def summary_of(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "summary.json").read_text()))


def test_a_run_trains_every_position_once_and_leaves_a_model(tiny: Tiny, forking: ForkLauncher) -> None:
    held_out = write_jsonl(tiny.path / "heldout.jsonl", documents(12, seed=5))
    copy = shutil.copy(held_out, tiny.path / "copy.jsonl")
    sums = tiny.path / "sums.jsonl"
    sums.write_text('{"prompt": "def x", "answer": "anything"}\n{"prompt": "return", "answer": ["="]}\n')
    tasks = {"path": sums, "match": "contains", "max_new_tokens": 4}
    spec = tiny.spec(eval={"path": held_out, "also": [copy], "every": 6, "tasks": tasks})
    crew = tiny.start(spec, forking)
    crew.complete(96)
    assert {k: summary_of(spec.output)[k] for k in ("positions", "trained", "skipped", "dead")} == {
        "positions": 96,
        "trained": 96,
        "skipped": 0,
        "dead": 0,
    }
    lines = steps_of(spec.output)
    assert [line["step"] for line in lines] == list(range(12))
    assert lines[-1]["kl_loss"] < lines[0]["kl_loss"]
    evaluations = [json.loads(line) for line in (spec.output / "eval.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [0, 6, 12]
    teacher = evaluate(
        AutoModelForCausalLM.from_pretrained(tiny.assets.teacher),
        AutoTokenizer.from_pretrained(tiny.assets.teacher),
        documents(12, seed=5),
        context_length=96,
        batch_tokens=2048,
        device="cpu",
        max_bytes=1 << 20,
    )
    for row in evaluations:
        assert row["teacher_bits_per_byte"] == pytest.approx(teacher.bits_per_byte, rel=1e-6)
        assert row["bits_per_byte_copy"] == pytest.approx(row["bits_per_byte"], rel=1e-6)
        assert row["task_accuracy_sums"] in (0.0, 0.5) and row["task_prompts_sums"] == 2
        assert row["task_finished_sums"] in (0.0, 0.5, 1.0)
    assert "| task sums: right of 2 prompts (greedy) |" in (spec.output / "model" / "README.md").read_text()
    assert evaluations[-1]["bits_per_byte"] < evaluations[0]["bits_per_byte"]
    tokenizer = AutoTokenizer.from_pretrained(spec.output / "model")
    model = AutoModelForCausalLM.from_pretrained(spec.output / "model")
    prompt = tokenizer("def x", return_tensors="pt")
    out = model.generate(prompt["input_ids"], max_new_tokens=4, do_sample=False)
    assert out.shape[1] > prompt["input_ids"].shape[1]


def whole_and_killed(tiny: Tiny, steps: int, **settings: Any) -> tuple[Path, Path]:
    """Outputs of two runs with these settings; the trainer of the second is killed after so many steps."""
    whole, broken = (tiny.spec(name, **settings) for name in ("whole", "broken"))
    tiny.start(whole).complete()
    crew = tiny.start(broken)
    crew.wait_for_steps(steps)
    crew.kill("trainer-0")
    crew.complete()
    return whole.output, broken.output


@pytest.mark.slow
def test_an_adaptive_weight_follows_the_evaluations_also_after_a_kill(tiny: Tiny) -> None:
    tiny = replace(tiny, assets=make_assets(tiny.path / "assets"))
    train_briefly(tiny.assets.teacher, steps=3)
    held_out = write_jsonl(tiny.path / "heldout.jsonl", documents(1000, seed=5))
    settings: dict[str, Any] = {
        "loss": {"mode": "chain", "kl_loss_weight": 2.0, "kl_loss_weight_end": "adaptive"},
        "eval": {"path": held_out, "every": 2},
    }
    whole, broken = whole_and_killed(tiny, 7, **settings)
    lines = steps_of(whole)
    rows = [json.loads(line) for line in (whole / "eval.jsonl").read_text().splitlines()]
    bits = {row["step"]: row["bits_per_byte"] for row in rows}
    for line in lines:
        last = [bits[step] for step in range(2, line["step"] + 1, 2)][-3:] or [bits[0]]
        behind = sum(last) / len(last) - rows[0]["teacher_bits_per_byte"]
        assert line["kl_loss_scale"] == pytest.approx(2 * min(max(1 + behind / 0.1, 0.0), 1.0), rel=1e-6)
    assert lines[0]["kl_loss_scale"] == 2.0 and lines[-1]["kl_loss_scale"] < 2.0, "the student passes its teacher"
    for name in ("ids", "loss", "kl_loss_scale"):
        assert [line[name] for line in steps_of(broken)] == [line[name] for line in lines]


@pytest.mark.slow
def test_without_held_out_text_the_first_pass_decides_the_weight_also_after_a_kill(tiny: Tiny) -> None:
    settings: dict[str, Any] = {
        "records": 1024,
        "loss": {"mode": "chain", "kl_loss_weight": 2.0, "kl_loss_weight_end": "adaptive"},
        "data": {"epochs": 2},
        "train": {"samples_per_step": 128, "micro_batch_tokens": 2048, "checkpoint_every": 3},
    }
    whole, broken = whole_and_killed(tiny, 6, **settings)
    lines = steps_of(whole)
    assert [line["step"] for line in lines if "text_bytes_t0" in line] == list(range(8)), "the first of two passes"
    windows = [(0.0, 0.0)]
    for line in lines:
        last = windows[:-1][-3:]
        behind = math.fsum(nats for nats, _ in last) / math.log(2) / sum(size for _, size in last) if last else 1.0
        assert line["kl_loss_scale"] == pytest.approx(2 * min(max(1 + behind / 0.1, 0.0), 1.0), abs=1e-6)
        nats, size = windows.pop()
        nats += line.get("text_nats_t0", 0.0) - line.get("text_teacher_nats_t0", 0.0)
        size += line.get("text_bytes_t0", 0.0)
        windows += [(nats, size)] + [(0.0, 0.0)] * (size >= 1 << 16)
    assert lines[0]["kl_loss_scale"] == 2.0 and lines[-1]["kl_loss_scale"] < 2.0, "the student passes its teacher"
    assert len({line["kl_loss_scale"] for line in lines[8:]}) == 1, "constant after the first pass"
    for name in ("ids", "loss", "kl_loss_scale"):
        assert [line[name] for line in steps_of(broken)] == [line[name] for line in lines]


@pytest.mark.slow
def test_killed_collator_and_teacher_lose_and_double_nothing(tiny: Tiny) -> None:
    spec = tiny.spec(records=400)
    crew = tiny.start(spec)
    crew.wait_for_steps(3)
    crew.kill("collator-0")
    crew.wait_for_steps(10)
    crew.kill("teacher-0-0")
    crew.complete(400)
    attempts = {w.name: len(list((spec.output / "logs").glob(f"{w.name}.*.log"))) for w in workers(crew)}
    assert attempts["collator-0"] >= 2
    assert attempts["teacher-0-0"] >= 2


def workers(crew: Crew) -> list[WorkerStatus]:
    return list(crew.supervisor.status().workers)


@pytest.mark.slow
def test_killed_student_resumes_bit_for_bit(tiny: Tiny) -> None:
    whole, broken = whole_and_killed(tiny, 7, loss={"kl_loss_weight_end": 0.0})
    expected, found = steps_of(whole), steps_of(broken)
    assert [line["ids"] for line in found] == [line["ids"] for line in expected]
    assert [line["loss"] for line in found] == [line["loss"] for line in expected]
    assert [line["kl_loss_scale"] for line in found] == pytest.approx([1 - step / 11 for step in range(12)])
    weights = [load_file(output / "model" / "model.safetensors") for output in (whole, broken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(list((broken / "logs").glob("trainer-0.*.log"))) == 2


@pytest.mark.slow
def test_killed_queue_is_filled_again_from_the_checkpoint(tiny: Tiny) -> None:
    spec = tiny.spec(records=240)
    crew = tiny.start(spec)
    crew.wait_for_steps(9)
    crew.kill("queue")
    crew.complete(240)


@pytest.mark.slow
def test_two_teachers_two_epochs_and_bad_records(tiny: Tiny) -> None:
    texts = documents(44, seed=3)
    data = tiny.path / "train.jsonl"
    lines = [json.dumps({"text": text}).encode() for text in texts]
    lines[5] = json.dumps({"text": "  "}).encode()
    lines[17] = b'{"text": "\xff\xfe"}'
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    lines[25] = json.dumps({"messages": chat}).encode()
    lines[30] = json.dumps({"text": " ".join(texts)}).encode()
    data.write_bytes(b"\n".join(lines) + b"\n")
    teacher = {"model": tiny.assets.other_teacher, "context_length": 80, "projection": tiny.assets.other_projection}
    # The content that no other quick test sends through real processes.
    first = tiny.assets.first_teacher(weight=0.5, content="hidden")
    teachers = [first, {**teacher, "content": "hidden"}]
    spec = tiny.spec(data={"path": data, "epochs": 2}, teacher=teachers)
    tiny.start(spec).complete()
    summary = summary_of(spec.output)
    assert (summary["positions"], summary["trained"], summary["skipped"], summary["truncated"]) == (88, 82, 6, 2)
    assert all("train.jsonl:" in reason for reason in summary["skipped_reasons"].values())
    stray = [reason for reason in summary["skipped_reasons"].values() if "no chat template" in reason]
    assert [reason.partition(": ")[0] for reason in stray] == [f"{data}:26"] * 2
    skipped = {int(i) for i in summary["skipped_reasons"]}
    assert sorted(trained_ids(spec.output)) == sorted(set(range(88)) - skipped)
    assert {"kl_loss_t0", "kl_loss_t1"} <= set(steps_of(spec.output)[0])


@pytest.mark.slow
def test_two_ranks_train_as_one(tiny: Tiny) -> None:
    one = tiny.spec("one", records=64, loss={"vocab_topk": None})
    two = tiny.spec("two", records=64, loss={"vocab_topk": None}, workers={"ranks": 2})
    for spec in (one, two):
        tiny.start(spec).complete()
    losses = [[line["loss"] for line in steps_of(spec.output)] for spec in (one, two)]
    assert trained_ids(two.output) == list(range(64))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_bad_record_ends_a_run_that_says_so(tiny: Tiny) -> None:
    data = tiny.path / "train.jsonl"
    write_jsonl(data, [*documents(10, seed=4), "", *documents(10, seed=5)])
    spec = tiny.spec(data={"path": data, "on_bad_record": "fail"})
    ending = tiny.start(spec).join()
    assert (ending.state, ending.exit_code) == (RunState.FAILED, 2)
    assert "train.jsonl:11" in ending.error
    assert "\n" not in ending.error


def test_a_run_without_a_teacher_starts_none_and_trains(tiny: Tiny, forking: ForkLauncher) -> None:
    spec = baseline_of(tiny.spec(eval={"path": tiny.path / "train.jsonl", "every": 6}))
    crew = tiny.start(spec, forking)
    assert {w.kind for w in crew.supervisor.status().workers} == {"queue", "collator", "trainer"}
    crew.complete(96)
    lines = steps_of(spec.output)
    assert lines[-1]["ce_loss"] < lines[0]["ce_loss"]
    assert lines[0]["loss"] == lines[0]["ce_loss"] and not any(name.startswith("kl") for name in lines[0])
    card = (spec.output / "model" / "README.md").read_text()
    assert "trained by xtoken on text, without a teacher" in card


@pytest.mark.slow
def test_two_groups_take_the_steps_of_one_with_two_ranks(tiny: Tiny) -> None:
    """The last step is short, and the second group has no share of it. Chosen columns would depend on micro-batches."""
    changes: dict[str, Any] = {"records": 28, "queue": {"block_size": 2}, "loss": {"vocab_topk": None}}
    one = tiny.spec("one", **changes, workers={"ranks": 2, "collators": 1})
    two = tiny.spec("two", **changes, workers={"nodes": 2, "collators": 1})
    for spec in (one, two):
        tiny.start(spec).complete()
    lines = [steps_of(spec.output) for spec in (one, two)]
    assert [i for line in lines[1] for i in line["ids"]] == list(range(28))
    for name in ("loss", "kl_loss", "ce_loss", "grad_norm"):
        found = [torch.tensor([line[name] for line in of_run]) for of_run in lines]
        torch.testing.assert_close(
            found[1], found[0], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert [line["tokens"] for line in lines[0]] == [line["tokens"] for line in lines[1]]
    weights = [load_file(spec.output / "model" / "model.safetensors") for spec in (one, two)]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["node1-queue", "node1-trainer-0", "node1-teacher-0-0", "node1-collator-0"])
def test_a_process_of_one_group_is_killed_and_every_position_is_trained_once(tiny: Tiny, victim: str) -> None:
    spec = tiny.spec(records=160, workers={"nodes": 2, "collators": 1})
    crew = tiny.start(spec)
    crew.wait_for_steps(5)
    crew.kill(victim)
    crew.complete()
    assert sorted(i for line in steps_of(spec.output) for i in line["ids"]) == list(range(160))
