"""EvalSpec: the settings of a run's evaluations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from xtoken_core.config.base import ConfigModel, Count, OrNone

Match = Literal["exact", "number", "last_number", "boxed", "choice", "contains", "code"]
"""How a completion is judged."""
HELD_OUT_PERCENT = 2
"""Percent of the records of `data.path` that are held out where no text is named."""
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")


def names_of(paths: Path | tuple[Path, ...]) -> dict[str, Path]:
    """Return files by the name that their metrics carry: the file's, without the last suffix."""
    return {NOT_IN_A_NAME.sub("_", path.stem): path for path in (paths if isinstance(paths, tuple) else (paths,))}


class TasksSpec(ConfigModel):
    """Prompts with answers, completed by the student at every evaluation."""

    path: Path | tuple[Path, ...]
    """A `.jsonl` file or files, each a task under the name of its file without the last suffix. A record has `prompt`
    (or `messages`) and `answer`, a text, a number or a list of accepted ones; it may have `choices` and a `match` of
    its own. With `match = "code"` it has `tests`, a text of Python, instead of `answer`."""
    match: Match = "exact"
    """`exact`: the first line of the completion is the answer. `number`: the first number in it is; a comma belongs to
    a number only as in `12,345.6`, not in `5,2024` or `1,2,3`. `last_number`: the last number in it is. `boxed`: what
    its last `\\boxed{}` holds is. `choice`: of the record's `choices`, the first that occurs in it is. `contains`: the
    answer occurs anywhere in it. `code`: it and the record's `tests` are a program that ends without an error."""
    run_code: bool = False
    """Run the programs of `match = "code"`, each for at most 10 s in a child process that reaches no network, writes no
    file and starts no process, but reads what this user can. Linux only, with user namespaces. A control plane takes it
    only where its operator sets `XTOKEN_RUN_CODE=1`."""
    max_prompts: Count = 200
    """Prompts of each task, the first ones of its file."""
    max_new_tokens: Count = 32
    """Tokens of a completion."""
    samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Completions of a prompt; with several, the accuracy is their mean, and `task_any_NAME` is the fraction of prompts
    with a right one."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of the completions; 0 takes the most likely token."""

    @property
    def by_name(self) -> dict[str, Path]:
        """The tasks by the name that their metrics carry."""
        return names_of(self.path)

    @model_validator(mode="after")
    def _possible(self) -> TasksSpec:
        if self.samples > 1 and not self.temperature:
            raise ValueError("eval.tasks.samples: without a temperature all samples are alike: set temperature")
        if isinstance(self.path, tuple) and len(self.by_name) < len(self.path):
            raise ValueError("eval.tasks.path: two tasks have the same file name: rename one, since metrics carry it")
        return self


PromptText = Annotated[str, Field(min_length=1, max_length=4096)]
SAMPLE_TOKENS = 64
"""Tokens of a completion of `eval.samples`, where the context is at least twice as long."""


class EvalSpec(ConfigModel):
    """Held-out text, read every so many steps and at the end."""

    path: Path | tuple[Path, ...] = ()
    """Same forms as `data.path`. Left out: 2% of the records of `data.path`, at most 4 MiB, chosen by a hash of their
    content; the run is not trained on them."""
    field: str = "text"
    """Same meaning as `data.field`, for `path` and `also`."""
    every: Count = 100
    """Optimiser steps between two evaluations; the first comes before any step, one more at the end."""
    keep_best: bool = True
    """Keep the checkpoint of the evaluation with the fewest bits per byte of the held-out text, as `checkpoints/best`,
    and export its weights as `model/` when the run ends. The student of step 0 does not take part."""
    patience: OrNone[Count | Literal["half"]] = "half"
    """End the run after so many evaluations in a row that were no better than the best one; "none": never. "half": half
    of all evaluations, at least 8; with `keep_best` only, and never with `[rollout]`."""
    also: Path | tuple[Path, ...] = ()
    """More held-out texts, such as a test set or another language. Each is read as `path` is and reported by itself,
    under the name of its file without the last suffix: `bits_per_byte_NAME`."""
    max_bytes: Count = 1 << 20
    """Bytes that are read of the held-out text, and of every text of `also`, in UTF-8."""
    tasks: OrNone[TasksSpec] = None
    samples: Annotated[tuple[PromptText, ...], Field(max_length=32)] = ()
    """Texts that the student continues at every evaluation, for reading, such as `["Once upon a time"]`: by the most
    likely token each time, up to 64 or half of the context. `eval.jsonl` gets `samples`, a list of objects with
    `prompt` and `completion`."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path or paths, always as a tuple."""
        return self.path if isinstance(self.path, tuple) else (self.path,)

    def evaluations(self, steps: int) -> int:
        """Return the number of evaluations of a run of so many steps."""
        return -(-steps // self.every) + 1

    @property
    def also_by_name(self) -> dict[str, Path]:
        """The texts of `also` by the name that their metrics carry."""
        return names_of(self.also)

    @model_validator(mode="after")
    def _distinct_names(self) -> EvalSpec:
        count = len(self.also) if isinstance(self.also, tuple) else 1
        if len(self.also_by_name) < count:
            raise ValueError("eval.also: two texts have the same file name: rename one, since metrics carry that name")
        return self
