"""TRL's GOLD trainer on its student's own completions, timed step by step.

`benchmarks.on_policy` runs it alone in a process, with its settings as JSON. The trainer generates with transformers,
trains on all of a step's completions in one micro-batch, and is given what makes it fast: bfloat16 weights (but for
a student that is kept), no recomputed activations, a fused optimiser.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
WARM_UP = 2
"""Steps that do not count; only the first of a run that is out of time before its third step."""
Counts = dict[str, float]


class Clock:
    """Wall seconds of parts of a step, the device's work included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time is added to a part's."""

        def run(*args: Any, **options: Any) -> Any:
            began = now()
            result = function(*args, **options)
            self.seconds[name] = self.seconds.get(name, 0.0) + now() - began
            return result

        return run


def now() -> float:
    """Return the time once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def main() -> None:
    """Train as the one argument says, a JSON object, and write a line of figures per step."""
    options = argparse.Namespace(**json.loads(sys.argv[1]))
    options.prompts, options.out = Path(options.prompts), Path(options.out)
    usual = {"rate": 1e-5, "warm_up_steps": 0, "of_student": 1.0, "same": False, "save": ""}
    options = argparse.Namespace(**{**usual, **vars(options)})
    train(options)


def train(options: argparse.Namespace) -> None:
    """Run the trainer.

    Args:
        options: As `main` reads them.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    clock, counts = Clock(), list[Counts]()
    record = recorder(options, clock, counts)  # its time includes the loading
    records = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    wanted = steps_of(options) * options.batch
    records = (records * (wanted // len(records) + 1))[:wanted]
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (options.student, options.teacher)]
    for tokenizer in tokenizers:
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (options.student, options.teacher)
    ]
    if options.save:  # the student is judged: bfloat16 loses small updates
        models[0].float()
    if options.same:
        records = [{"prompt": record["messages"][:-1]} for record in records]
    kind, config = (DistillationTrainer, DistillationConfig) if options.same else (GOLDTrainer, GOLDConfig)
    trainer = kind(
        model=models[0], teacher_model=models[1], args=config(**settings_of(options)),
        train_dataset=Dataset.from_list(records), processing_class=tokenizers[0],
        callbacks=[record],
    )  # fmt: skip
    if not options.same:
        _count(trainer, options, clock, counts)
    trainer.train()
    if options.save:
        trainer.save_model(options.save)
        tokenizers[0].save_pretrained(options.save)


def steps_of(options: argparse.Namespace) -> int:
    """Return the steps of a run: of one that is timed those of its warm-up come first."""
    return int(options.steps) + (0 if options.save else WARM_UP)


def _count(trainer: Any, options: argparse.Namespace, clock: Clock, counts: list[Counts]) -> None:
    """Time the parts of a GOLD trainer's steps, and count its completions."""
    generate = clock.timed("generation", trainer.generate_on_policy_outputs)

    def counted(*args: Any, **settings: Any) -> Any:
        made = generate(*args, **settings)
        ids, _, labels = made[:3]
        lengths = (labels != -100).sum(1)
        counts.append(
            {
                "completion_tokens": int(lengths.sum()),
                "finished": float((lengths < options.new_tokens).float().mean()),
                "width": ids.shape[1],
            }
        )
        return made

    trainer.generate_on_policy_outputs = counted
    trainer.compute_loss = clock.timed("forward", trainer.compute_loss)
    trainer.accelerator.backward = clock.timed("backward", trainer.accelerator.backward)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the trainer's settings.

    Args:
        options: As `main` reads them.
    """
    cuda = torch.cuda.is_available()
    of_gold = {
        "lmbda": options.of_student, "max_length": options.context, "use_uld_loss": True,
        "use_extended_uld": options.extended, "uld_use_hybrid_loss": True,
        "teacher_tokenizer_name_or_path": str(options.teacher),
    }  # fmt: skip
    return ({"beta": 0.5} if options.same else of_gold) | {
        "output_dir": str(options.out.with_suffix(".run")), "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": 1, "max_steps": steps_of(options), "learning_rate": options.rate, "bf16": cuda,
        "warmup_steps": options.warm_up_steps, "lr_scheduler_type": "cosine" if options.save else "linear",
        "optim": "adamw_torch_fused" if cuda else "adamw_torch", "gradient_checkpointing": False,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_completion_length": options.new_tokens,
        "save_strategy": "no", "report_to": [], "logging_steps": 1, "disable_tqdm": True, "use_cpu": not cuda,
    }  # fmt: skip


def recorder(options: argparse.Namespace, clock: Clock, counts: list[Counts]) -> Any:
    """Return a callback that writes the result after every step, and begins none when the time is over.

    Args:
        options: As `main` reads them.
        clock: Seconds of the parts of the current step.
        counts: Completions of every step so far.
    """
    from transformers import TrainerCallback

    began, steps = time.monotonic(), list[Counts]()

    class Recorder(TrainerCallback):
        """Writes the result after every step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Stop when the time is over."""
            control.should_training_stop = time.monotonic() - began > options.seconds

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Write the step's figures."""
            steps.append({"time": now(), **clock.seconds})
            clock.seconds.clear()
            options.out.write_text(json.dumps(result(steps, counts, options)) + "\n", encoding="utf-8")
            if time.monotonic() - began > options.seconds:
                control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Print the loss."""
            print(logs, flush=True)

    return Recorder()


def result(steps: list[Counts], counts: list[dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all steps behind the warm-up; those of the second step if there are only two.

    Args:
        steps: Per step its end and seconds of its parts.
        counts: Per step its completions.
        options: As `main` reads them.
    """
    warm_up = max(0, min(WARM_UP, len(steps) - 1))
    kept = steps[warm_up:] if warm_up else []
    row: dict[str, Any] = {"batch": options.batch, "steps": len(kept), "new_tokens": options.new_tokens}
    if kept:
        seconds = kept[-1]["time"] - steps[warm_up - 1]["time"]
        row |= {"warm_up": warm_up, "seconds_per_step": seconds / len(kept)}
    if kept and counts:
        tokens = sum(each["completion_tokens"] for each in counts[warm_up : len(steps)])
        parts = {name: sum(each.get(name, 0.0) for each in kept) for name in ("generation", "forward", "backward")}
        row |= {
            "completion_tokens_per_step": tokens / len(kept),
            "tokens_per_second": tokens / seconds,
            "generated_tokens_per_second": tokens / parts["generation"],
            "trained_tokens_per_second": tokens / (seconds - parts["generation"]),
            "seconds": {name: value / len(kept) for name, value in parts.items()},
            "finished": sum(each["finished"] for each in counts[warm_up : len(steps)]) / len(kept),
        }
    if torch.cuda.is_available():
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


if __name__ == "__main__":
    main()
