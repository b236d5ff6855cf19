"""The demo's models."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtoken_services.demo.teacher import ModelSize, TeacherTraining, train_teacher, write_student
from xtoken_services.demo.vocabularies import train_teacher_tokenizer

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(200)]
TRAINING = TeacherTraining(steps=30, rows=2, context_length=32, warmup_steps=3, eval_every=10, threads=1)
SIZE = ModelSize(hidden=64, layers=1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("teacher")
    train_teacher_tokenizer(TEXTS, root / "tokenizer", vocabulary=400)
    for name, texts in (("train", TEXTS[:150]), ("heldout", TEXTS[150:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return root


def train(files: Path, directory: Path) -> list[dict]:
    seen: list[dict] = []
    train_teacher(
        directory,
        files / "tokenizer",
        files / "train.jsonl",
        files / "heldout.jsonl",
        size=SIZE,
        training=TRAINING,
        progress=seen.append,
    )
    return seen


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_teacher_learns_and_leaves_model_tokenizer_and_curves(files: Path, tmp_path: Path) -> None:
    seen = train(files, tmp_path)
    steps, evals = lines(tmp_path / "steps.jsonl"), lines(tmp_path / "eval.jsonl")
    assert [line["step"] for line in steps] == list(range(30))
    assert [line["step"] for line in evals] == [10, 20, 30]
    assert sorted(map(str, seen)) == sorted(map(str, steps + evals))
    assert evals[-1]["bits_per_byte"] < 0.8 * evals[0]["bits_per_byte"]
    assert evals[-1]["bytes"] == sum(len(text) for text in TEXTS[150:])
    rates = [line["learning_rate"] for line in steps]
    assert max(rates) == pytest.approx(TRAINING.learning_rate)
    assert rates[0] < max(rates) > rates[-1]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_training_again_gives_the_same_curve_and_replaces_the_files(files: Path, tmp_path: Path) -> None:
    train(files, tmp_path)
    first = [line["loss"] for line in lines(tmp_path / "steps.jsonl")]
    train(files, tmp_path)
    assert [line["loss"] for line in lines(tmp_path / "steps.jsonl")] == first


def test_the_student_is_random_seeded_and_loads(files: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    models = [
        AutoModelForCausalLM.from_pretrained(write_student(tmp_path / name, files / "tokenizer", size=SIZE, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    weights = [model.get_input_embeddings().weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == weights[0].shape[0]
