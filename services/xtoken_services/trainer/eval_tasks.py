"""Completions at an evaluation: accuracy on tasks, and samples to be read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from xtoken_core.config.eval import TasksSpec
from xtoken_core.config.spec import RunSpec
from xtoken_core.tasks import accuracy_of
from xtoken_services.common.generation.sampling import Sampling
from xtoken_services.common.processes import run_code
from xtoken_services.common.text.prompts import sample_prompts, sample_tokens, task_prompts
from xtoken_services.trainer.generate import Completer
from xtoken_services.trainer.student import Student

ACCURACY, ANY, FINISHED, PROMPTS = "task_accuracy_", "task_any_", "task_finished_", "task_prompts_"
BETWEEN_S = 0.1
"""Time between two looks at the programs that run."""


class EvalTasks:
    """The tasks of a run, read and tokenized once.

    Args:
        spec: The run, with `eval.tasks`.
        tokenizer: The student's.

    Raises:
        ConfigError: Code is to be run, and cannot be isolated on this machine.
        InputError: A task cannot be read, or a prompt leaves no room for its completion.
    """

    def __init__(self, spec: RunSpec, tokenizer: Any) -> None:
        assert spec.eval is not None and spec.eval.tasks is not None
        self.spec: TasksSpec = spec.eval.tasks
        if self.spec.run_code:
            run_code.check_isolation()
        self._completer = _completer_of(spec, self.spec, tokenizer)
        self.prompts, self._ids = task_prompts(spec, self._completer.encoder)

    def measure(
        self,
        student: Student,
        *,
        progress: Callable[[], None] = lambda: None,
        on_fraction: Callable[[float], None] = lambda _: None,
        judges: bool = True,
    ) -> dict[str, float]:
        """Return every task's accuracy, finished fraction and number of prompts; with samples how often one was right.

        Args:
            student: The student; all ranks of a sharded one call.
            progress: Called after every token; it may raise to stop.
            on_fraction: Called after every batch with the fraction of the completions that is done.
            judges: This rank runs programs; on another, completions with `match = "code"` count as wrong.
        """
        ids = [ids for of_task in self._ids.values() for ids in of_task]
        texts, finished = self._completer.complete(student, ids, progress, on_fraction)
        every = [prompt for prompts in self.prompts.values() for prompt in prompts]
        pairs = zip(every, texts, strict=True)
        programs = {prompt.program(text) for prompt, own in pairs if prompt.match == "code" for text in own}
        passed = _passed(programs if judges else (), student, progress) if programs else set()
        row: dict[str, float] = {}
        rest, ends = iter(texts), iter(finished)
        for name, prompts in self.prompts.items():
            accuracy, some = accuracy_of(prompts, [next(rest) for _ in prompts], passed.__contains__)
            row |= {f"{ACCURACY}{name}": accuracy, f"{PROMPTS}{name}": len(prompts)}
            row[f"{FINISHED}{name}"] = sum(next(ends) for _ in prompts) / (len(prompts) * self.spec.samples)
            if self.spec.samples > 1:
                row[f"{ANY}{name}"] = some
        return row


def _passed(programs: Collection[str], student: Student, progress: Callable[[], None]) -> set[str]:
    """Return the programs that pass; they run on half of the cores, while all ranks of a sharded student wait."""
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        running: dict[str, Future[bool]] = {text: pool.submit(run_code.passes, text) for text in programs}
        try:
            while student.any_rank(not all(one.done() for one in running.values())):
                progress()
                time.sleep(BETWEEN_S)
        finally:
            pool.shutdown(cancel_futures=True)
    return {text for text, one in running.items() if one.result()}


def _completer_of(run: RunSpec, tasks: TasksSpec, tokenizer: Any) -> Completer:
    """Return the completer of a run's tasks, with the distribution of its rollouts if it has any."""
    settings = Sampling(tasks.max_new_tokens, tasks.temperature)
    if run.rollout is not None:
        settings = replace(Sampling.of(run.rollout), max_new_tokens=tasks.max_new_tokens, temperature=tasks.temperature)
    return Completer(tokenizer, settings, samples=tasks.samples, seed=run.seed)


class EvalSamples:
    """The prompts of `eval.samples`, tokenized once.

    Args:
        spec: The run, with `eval.samples`.
        tokenizer: The student's.

    Raises:
        InputError: A prompt leaves no room for its completion.
    """

    def __init__(self, spec: RunSpec, tokenizer: Any) -> None:
        assert spec.eval is not None
        self._completer = Completer(tokenizer, Sampling(sample_tokens(spec), temperature=0))
        self.prompts, self._ids = spec.eval.samples, sample_prompts(spec, self._completer.encoder)

    def measure(self, student: Student, *, progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return `samples` of a line of `eval.jsonl`: a list of objects with `prompt` and `completion`.

        Args:
            student: The student, on all ranks if it is sharded.
            progress: Called after every token; it may raise to stop.
        """
        made, _ = self._completer.complete(student, self._ids, progress)
        return {
            "samples": [{"prompt": prompt, "completion": one} for prompt, [one] in zip(self.prompts, made, strict=True)]
        }
