"""Materials of the controls and of the other direction: a teacher's own samples, chat text, a teacher for its own kind.

- *Samples*: the teacher continues the first tokens of each training document. A student that trains on them with
  cross-entropy has seen what the teacher would write, and none of its distributions.
- *Chat*: SmolLM2-Instruct answers questions about pages of the English handbook, each page in the split that it has
  everywhere. Text for a student that is no chat model, from a teacher that is.
- *Continued teacher*: the student's own model, trained on ten times the text of German, to teach without a second
  tokenizer.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from experiments.jobs import Job, finished
from experiments.real import instructions, word_problems
from experiments.real.methods import CHAT, CONDITIONS, CONTINUED, SMOLLM2, Cell, samples_file
from experiments.real.models import MissingSourceError
from xtoken_core.atomic import atomic_write

PREFIX_TOKENS, SAMPLE_TOKENS = 32, 320
"""Tokens of a document that the teacher is given, and that it adds."""
ANSWER_TOKENS = 256
QUESTIONS = (
    "Explain the following to a beginner.",
    "Summarise the following in your own words.",
    "Which three questions does the following answer? Answer each in one sentence.",
)
EXCERPT_CHARACTERS = 500
CONTINUED_STEPS, CONTINUED_BYTES = 240, 5_000_000
CONTINUED_SOURCES = ("handbook-de", "manual-de")
_BATCH = 1024
_CHAT_SPLITS = {"train": 600_000, "validation": 100_000, "test": 100_000}


def write_teacher_samples(state: Path, cell: Cell, device: str) -> None:
    """Write the teacher's continuations of a training text's documents, as many bytes as the condition trains.

    Args:
        state: Directory of models and texts.
        cell: A run of the condition and data seed.
        device: Where the teacher generates.
    """
    condition = CONDITIONS[cell.condition]
    target = state / "texts" / samples_file(cell.condition, cell.seed)
    if target.is_file():
        return
    model, tokenizer = _load(state / "models" / condition.teacher, device)
    texts = _texts(state / "texts" / f"{cell.condition}.s{cell.seed}.jsonl")
    prompts = [tokenizer(text)["input_ids"][:PREFIX_TOKENS] for text in texts] * 2
    _write(target, _limited(_generated(model, tokenizer, prompts, SAMPLE_TOKENS, seed=cell.seed), condition.size))


def write_chat(state: Path, device: str) -> None:
    """Write questions with SmolLM2's answers, in three splits.

    Args:
        state: Directory of models and texts.
        device: Where the model generates.
    """
    targets = {split: state / "texts" / f"{CHAT}.{split}.jsonl" for split in _CHAT_SPLITS}
    if all(file.is_file() for file in targets.values()):
        return
    model, tokenizer = _load(state / "models" / SMOLLM2, device)
    for split, target in targets.items():
        asked = questions(_texts(state / "texts" / f"handbook-en.{split}.jsonl"))
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
            for question in asked
        ]
        answers = _generated(model, tokenizer, prompts, ANSWER_TOKENS, seed=0, with_prompt=False)
        pairs = (f"{question}\n\n{answer.strip()}" for question, answer in zip(asked, answers, strict=False))
        _write(target, _limited(pairs, _CHAT_SPLITS[split]))


def write_answers(state: Path, name: str, device: str) -> None:
    """Write word problems or instructions with the greedy answers of a teacher, and how many of them are right.

    Args:
        state: Directory of models and texts.
        name: The condition.
        device: Where the teacher generates.
    """
    asked = CONDITIONS[name].source
    if (state / "texts" / f"{asked}.test.jsonl").is_file():
        return
    of_problems = asked == word_problems.SOURCE
    tokens = word_problems.ANSWER_TOKENS if of_problems else instructions.ANSWER_TOKENS
    model, tokenizer = _load(state / "models" / CONDITIONS[name].teacher, device)

    def answers(conversations: list[list[dict[str, str]]]) -> Iterator[str | None]:
        prompts = [
            tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in conversations
        ]
        for text in _generated(model, tokenizer, prompts, tokens, seed=None, with_prompt=False):
            yield text.strip() if len(tokenizer(text)["input_ids"]) < tokens else None

    write = word_problems.write_problems if of_problems else instructions.write_answers
    task = word_problems.TASK if of_problems else instructions.TASK
    right = write(state / "texts", answers)
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
        model, tokenizer = _load(state / name, device)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = instructions.TEMPLATE
        task = instructions.read_task(state / "texts")
        prompts = [
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            for messages, _ in task
        ]
        found, file = {}, _scores(state, name)
        for key, seed in ((instructions.TASK, None), (instructions.SAMPLED, 0)):
            answers = list(
                _generated(model, tokenizer, prompts, instructions.ANSWER_TOKENS, seed=seed, with_prompt=False)
            )
            right = [instructions.follows(text, checks) for text, (_, checks) in zip(answers, task, strict=True)]
            found[f"task_accuracy_{key}"] = statistics.fmean(right)
            _write(file.with_name(f"{file.stem}.{key}.jsonl"), iter(answers))
        atomic_write(file, json.dumps(found) + "\n")


def scored(state: Path, model: str) -> dict[str, float]:
    """Return what a model was found to follow of the held-out instructions; empty if it has not been asked."""
    file = _scores(state, model)
    found: dict[str, float] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def _scores(state: Path, model: str) -> Path:
    return state / "followed" / f"{model.replace('/', '-')}.json"


def questions(documents: Sequence[str]) -> list[str]:
    """Return a question about the beginning of each document; a second round has other questions.

    Args:
        documents: The documents, in their order.
    """
    rounds = []
    for shift in range(len(QUESTIONS)):
        for number, text in enumerate(documents):
            question = QUESTIONS[(number + shift) % len(QUESTIONS)]
            rounds.append(f"{question}\n\n{text[:EXCERPT_CHARACTERS].rpartition(' ')[0]}")
    return rounds


def continued_job(state: Path, device: str) -> Job:
    """Write the text of the continued teacher and return the run that trains it.

    Args:
        state: Directory of models and texts.
        device: `workers.device` of the run.

    Raises:
        MissingSourceError: A source has not been made.
    """
    target = state / "texts" / f"{CONTINUED}.jsonl"
    if not target.is_file():
        files = [state / "texts" / f"{source}.train.jsonl" for source in CONTINUED_SOURCES]
        texts = list(chain.from_iterable(map(_texts, files)))
        first = len(_texts(files[0]))
        rest = texts[first:]
        random.Random(0).shuffle(rest)
        _write(target, _limited(iter(texts[:first] + rest), CONTINUED_BYTES))
    dtype = "bfloat16" if device != "cpu" else "float32"
    return Job(
        CONTINUED,
        f"""name = "{CONTINUED}"
output = "runs/{CONTINUED}"

[student]
model = "models/{SMOLLM2}"
context_length = 768
dtype = "{dtype}"

[data]
path = "texts/{CONTINUED}.jsonl"
epochs = 1000

[eval]
path = "texts/handbook-de.validation.jsonl"
every = {CONTINUED_STEPS // 4}
max_bytes = 80000
keep_best = true

[loss]
kl_loss_weight = 0.0
ce_loss_scale = 1.0

[train]
samples_per_step = 24
max_steps = {CONTINUED_STEPS}
micro_batch_tokens = 9216
learning_rate = 4e-4
min_learning_rate = 4e-5
warmup_steps = {CONTINUED_STEPS // 20}
weight_decay = 0.01
checkpoint_every = {CONTINUED_STEPS}

[workers]
collators = 1
device = "{device}"
""",
    )


def keep_continued(state: Path) -> None:
    """Copy the model of the finished run to the other models.

    Args:
        state: Directory of models and runs.

    Raises:
        MissingSourceError: The run has not finished.
    """
    if not finished(state, CONTINUED):
        raise MissingSourceError(f"the run {CONTINUED} has not finished: run the stage `controls` again")
    target = state / "models" / CONTINUED
    if not target.is_dir():
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(state / "runs" / CONTINUED / "model", partial)
        partial.rename(target)


def _texts(file: Path) -> list[str]:
    if not file.is_file():
        raise MissingSourceError(f"there is no {file}: run the stage `texts` first")
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def _load(directory: Path, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not directory.is_dir():
        raise MissingSourceError(f"there is no {directory}: run the stage `models` first")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16 if on_gpu else torch.float32)
    return model.to("cuda" if on_gpu else "cpu").eval(), AutoTokenizer.from_pretrained(directory)


def _generated(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], tokens: int, *, seed: int | None, with_prompt: bool = True
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
        for prompt, row in zip(batch, made, strict=True):
            own = row[width - len(prompt) :] if with_prompt else row[width:]
            yield tokenizer.decode(own, skip_special_tokens=True)


def _limited(texts: Iterator[str], size: int) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        yield text
        size -= len(text.encode())


def _write(file: Path, texts: Iterator[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
