"""What teachers write for runs on questions and instructions, and what students are asked after them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.real import instructions
from experiments.real.methods import CONDITIONS, QUESTIONS
from experiments.real.models import MissingSourceError
from experiments.real.questions import lines_of
from xtoken_core.atomic import atomic_write

_BATCH = 1024


def write_answers(state: Path, name: str, device: str) -> None:
    """Write questions or instructions with the greedy answers of a teacher, and how many of them are right.

    Args:
        state: Directory of models and texts.
        name: The condition.
        device: Where the teacher generates.
    """
    asked = CONDITIONS[name].source
    if (state / "texts" / f"{asked}.test.jsonl").is_file():
        return
    questions, tokens = QUESTIONS.get(asked), CONDITIONS[name].completion_tokens
    model, tokenizer = load(state / "models" / CONDITIONS[name].teacher, device)

    def answers(conversations: list[list[dict[str, str]]]) -> Iterator[str | None]:
        prompts = [
            tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in conversations
        ]
        for text in _generated(model, tokenizer, prompts, tokens, seed=None):
            yield text.strip() if len(tokenizer(text)["input_ids"]) < tokens else None

    write = partial(questions.write, source=asked) if questions else instructions.write_answers
    task = questions.task if questions else instructions.TASK
    right = write(state / "texts", generate=answers)
    atomic_write(state / f"teacher-{name}.json", json.dumps({f"task_accuracy_{task}": right}) + "\n")


def score(state: Path, models: Iterable[str], device: str) -> None:
    """Ask models for the held-out instructions, where they are there and have not been asked.

    Args:
        state: Directory of models and runs.
        models: Directories relative to it.
        device: Where they generate.
    """
    for name in models:
        if _scores(state, name).is_file() or not (state / name / "config.json").is_file():
            continue
        model, tokenizer = load(state / name, device)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = instructions.TEMPLATE
        task = instructions.read_task(state / "texts")
        prompts = [
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            for messages, _ in task
        ]
        found, file = {}, _scores(state, name)
        for key, seed in ((instructions.TASK, None), (instructions.SAMPLED, 0)):
            answers = list(_generated(model, tokenizer, prompts, instructions.ANSWER_TOKENS, seed=seed))
            right = [instructions.follows(text, checks) for text, (_, checks) in zip(answers, task, strict=True)]
            found[f"task_accuracy_{key}"] = statistics.fmean(right)
            file.parent.mkdir(exist_ok=True)
            lines = lines_of({"text": text} for text in answers)
            atomic_write(file.with_name(f"{file.stem}.{key}.jsonl"), lines)
        atomic_write(file, json.dumps(found) + "\n")


def scored(state: Path, model: str) -> dict[str, float]:
    """Return the accuracy of a model on the held-out instructions; empty if it has not been asked."""
    file = _scores(state, model)
    found: dict[str, float] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def _scores(state: Path, model: str) -> Path:
    return state / "followed" / f"{model.replace('/', '-')}.json"


def load(directory: Path, device: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer, in bfloat16 on a GPU unless the device is the CPU.

    Raises:
        MissingSourceError: The model has not been made.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not directory.is_dir():
        raise MissingSourceError(f"there is no {directory}: run the stage `models` first")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16 if on_gpu else torch.float32)
    return model.to("cuda" if on_gpu else "cpu").eval(), AutoTokenizer.from_pretrained(directory)


def _generated(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], tokens: int, *, seed: int | None
) -> Iterator[str]:
    """Yield a completion of each prompt in their order: the most likely tokens without a seed, else temperature 1."""
    import torch

    drawing: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        torch.manual_seed(seed)
        drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), pad)  # [B, T], padded on the left
        mask = torch.zeros_like(ids)
        for index, prompt in enumerate(batch):
            ids[index, width - len(prompt) :] = torch.tensor(prompt)
            mask[index, width - len(prompt) :] = 1
        with torch.no_grad():
            made = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=tokens, pad_token_id=pad,
                **drawing,
            )  # fmt: skip
        yield from tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
