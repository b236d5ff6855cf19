"""A whole run, tiny: two different tokenizers, two small models, a projection, some text. Made in seconds, all real."""

import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from xtoken_core.config.spec import RunSpec
from xtoken_core.projection import build_projection, write_projection
from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer

WORDS = re.split(
    " ",
    "def return value import self class for in range print result number list dict 12 345 2024 7 x = ( ) : + - * "
    "日本 naïve Größe مرحبا 👍🏽 while yield lambda None True",
)


def documents(count: int, *, seed: int, words: int = 24) -> list[str]:
    """Texts of a few dozen words, all different."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(words // 2, words))) + f"\n# {n}\n" for n in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One record per text, under `text`."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_run(directory: Path, document: dict[str, Any]) -> Path:
    """A run file of a document; what is None is left out."""

    def told(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: told(part) for key, part in value.items() if part is not None}
        return [told(part) for part in value] if isinstance(value, list) else value

    path = directory / "run.toml"
    path.write_text(tomli_w.dumps(told(document)), encoding="utf-8")
    return path


RUN_NAME = f"tiny-{os.getpid()}"
"""The name of this process's runs, which what they leave in shared memory would carry."""


@dataclass(frozen=True)
class TinyAssets:
    """What a tiny run reads."""

    student: Path
    teacher: Path
    other_teacher: Path
    projection: Path
    other_projection: Path

    def first_teacher(self, **settings: Any) -> dict[str, Any]:
        """Return the table of a run's teacher, with further settings."""
        return {"model": self.teacher, "context_length": 96, "projection": self.projection, **settings}


def make_assets(directory: Path, *, layers: int = 1, extra_rows: int = 16) -> TinyAssets:
    """Tokenizers, models with random weights and projections; the teacher's head is wider than its vocabulary."""
    texts = documents(400, seed=1)
    student, teacher, other = directory / "student", directory / "teacher", directory / "other-teacher"
    train_student_tokenizer(texts, student, vocabulary=420)
    train_teacher_tokenizer(texts, teacher, vocabulary=500)
    train_teacher_tokenizer(texts, other, vocabulary=360)
    for seed, place in enumerate((student, teacher, other)):
        make_model(place, seed=seed, layers=layers, extra_rows=extra_rows if place is teacher else 0)
    projections = directory / "to-teacher.safetensors", directory / "to-other.safetensors"
    for target, file in zip((teacher, other), projections, strict=True):
        tokenizers = [AutoTokenizer.from_pretrained(place) for place in (student, target)]
        write_projection(build_projection(*tokenizers), file)
    return TinyAssets(student, teacher, other, *projections)


def make_model(
    directory: Path, *, seed: int, extra_rows: int, layers: int = 1, key_value_heads: int = 1, positions: int = 256
) -> None:
    """A small Llama beside the tokenizer in a directory; its head may be wider than the vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(directory)) + extra_rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=positions,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def tiny_spec(assets: TinyAssets, directory: Path, *, records: int = 96, **changes: Any) -> RunSpec:
    """A run over `records` texts in steps of 8; `changes` replace parts of it, given as nested dicts."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "train.jsonl"
    if not data.exists():
        write_jsonl(data, documents(records, seed=2))
    raw: dict[str, Any] = {
        "name": RUN_NAME,
        "output": directory / "out",
        "seed": 7,
        "student": {"model": assets.student, "context_length": 64},
        "teacher": [assets.first_teacher()],
        "data": {"path": data},
        "train": {
            "samples_per_step": 8,
            "micro_batch_tokens": 320,
            "learning_rate": 3e-3,
            "warmup_steps": 2,
            "checkpoint_every": 4,
        },
        "loss": {"vocab_topk": 64},
        "queue": {"block_size": 4},
        "workers": {"collators": 1, "device": "cpu"},
    }
    for part, value in changes.items():
        raw[part] = {**raw[part], **value} if isinstance(value, dict) and part in raw else value
    return RunSpec.model_validate(raw)


def steps_of(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's `steps.jsonl`."""
    path = output / "steps.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
