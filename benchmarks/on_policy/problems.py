"""Right answers to word problems after the same steps of this package and of TRL, from one student.

    python -m benchmarks.on_policy.problems --student DIR --teacher DIR --texts DIR

Same records with `messages`, lengths, steps, highest learning rate and shape of its schedule; one function asks what
each side has made. `--texts` holds `problems-en.train.jsonl` and `problems-en.task.jsonl`, which `controls` of
`experiments.real` writes. This package trains by its defaults, on the student's completions or on the teacher's
answers, and once more with `--template`, as GOLD's teacher can have none of its own; TRL by GOLD with its alignment by
bytes, where the answers are its off-policy data. With `--same` both models have one tokenizer, and TRL's trainer is its
DistillationTrainer, which reads no answers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.end_to_end.pipeline import run_command, step_rows, tail
from benchmarks.gpu_tests import machine
from benchmarks.harness import command_line, write_result
from benchmarks.on_policy import MODULE, ours
from xtoken_core.tasks import accuracy_of, read_prompts

WARM_UP_PART = 20
"""One of so many parts of the steps is the warm-up."""


def main() -> None:
    """Train each side on each kind of text; the file is written after each."""
    parser = command_line(__doc__, "problems")
    for name in ("student", "teacher", "texts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--same", action="store_true", help="the models have one tokenizer")
    parser.add_argument("--template", type=Path, help="chat template of this package's teacher, for a side of its own")
    parser.add_argument("--sides", nargs="*", default=["ours", "trl"])
    parser.add_argument("--texts-of", nargs="*", default=["student", "teacher"], help="whose answers are trained on")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3e-5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--asked", type=int, default=1200, help="problems of the task")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--part-seconds", type=float, default=600.0, help="each side is ended after so long")
    parser.add_argument("--work", type=Path, default=Path("/tmp/xtoken-problems"))
    options = parser.parse_args()
    options.sides += ["template"] if options.template else []
    options.prompts = options.texts / "problems-en.train.jsonl"
    options.records = len(options.prompts.read_text(encoding="utf-8").splitlines())
    options.dtype, options.weights = "bfloat16" if options.device == "cuda" else "float32", "auto"
    options.micro_batch_tokens, options.extended, options.context, options.batch = 6912, True, 384, 32
    result: dict[str, Any] = {
        "machine": machine() if options.device == "cuda" else {},
        "settings": {name: str(value) for name, value in vars(options).items()},
        "before": right_answers(options.student, options),
        "rows": [],
    }
    for whose in options.texts_of:
        for side in options.sides:
            directory = options.work / f"{side}-{whose}"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            row: dict[str, Any] = {"side": side, "answers": whose}
            try:
                row |= (_trl if side == "trl" else _ours)(options, directory, whose)
                row["right"] = right_answers(directory / "out" / "model", options)
            except Exception as error:  # the other rows are measured all the same
                row["error"] = f"{error}"[-1500:]
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
            write_result(options.out, result)


def right_answers(model: Path, options: Any) -> float:
    """Return the fraction of the task that a model answers right with its most likely tokens.

    Args:
        model: Its directory.
        options: As `main` reads them.
    """
    student = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options.dtype)).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    task = read_prompts(options.texts / "problems-en.task.jsonl", "last_number", options.asked)
    rows = tokenizer.apply_chat_template(
        [list(prompt.messages) for prompt in task], add_generation_prompt=True, return_dict=True, padding=True,
        return_tensors="pt",
    ).to(options.device)  # fmt: skip
    with torch.no_grad():
        made = student.generate(
            **rows, max_new_tokens=options.new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    texts = tokenizer.batch_decode(made[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)
    return accuracy_of(task, ([text] for text in texts))[0]


def _ours(options: Any, directory: Path, whose: str) -> dict[str, Any]:
    spec = tomllib.loads(ours.run_file(options, options.batch, directory / "out", steps=options.steps, mode="chain"))
    spec["train"] |= {"learning_rate": options.rate, "warmup_steps": max(1, options.steps // WARM_UP_PART)}
    if options.same:
        del spec["loss"]
    if whose == "teacher":
        del spec["rollout"], spec["queue"]
    if directory.name.startswith("template"):
        spec["teacher"]["chat_template"] = str(options.template.absolute())
    (directory / "run.toml").write_text(tomli_w.dumps(spec), encoding="utf-8")
    code = run_command(directory, options.part_seconds)
    rows = step_rows(directory / "out")
    if code or len(rows) < options.steps:
        raise RuntimeError(f"xtoken run ended with {code} after {len(rows)} steps:\n{tail(directory)}")
    first = len(rows) // 4
    return {"seconds_per_step": (rows[-1]["time"] - rows[first]["time"]) / (len(rows) - 1 - first)}


def _trl(options: Any, directory: Path, whose: str) -> dict[str, Any]:
    file, log = directory / "trl.json", directory / "trl.log"
    own = {
        "seconds": options.part_seconds - 30, "out": file, "warm_up_steps": max(1, options.steps // WARM_UP_PART),
        "of_student": float(whose == "student"), "save": directory / "out" / "model",
    }  # fmt: skip
    command = [sys.executable, "-m", MODULE, json.dumps({**vars(options), **own}, default=str)]
    environment, limit = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}, options.part_seconds
    with log.open("w", encoding="utf-8") as out:
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit, env=environment, check=False)
    if not own["save"].is_dir():
        raise RuntimeError(log.read_text(encoding="utf-8")[-1500:])
    row = json.loads(file.read_text(encoding="utf-8"))
    return {"seconds_per_step": row["seconds_per_step"], "steps": row["warm_up"] + row["steps"]}


if __name__ == "__main__":
    main()
