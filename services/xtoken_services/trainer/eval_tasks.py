"""Completions at an evaluation: accuracy on tasks, and samples to be read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from xtoken_core.config.eval import SAMPLE_TOKENS, TasksSpec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_core.tasks import Prompt, accuracy_of, read_prompts
from xtoken_services.common.files.allowed_paths import readable_roots
from xtoken_services.common.generation.sampling import Sampling
from xtoken_services.common.processes import run_code
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
        self._tokenizer = tokenizer
        self._completer = _completer_of(spec, self.spec, tokenizer)
        self._room = spec.student.context_length - self.spec.max_new_tokens
        self.prompts: dict[str, list[Prompt]] = {}
        self._ids: dict[str, list[list[int]]] = {}
        for name, path in self.spec.by_name.items():
            prompts = read_prompts(path, self.spec.match, self.spec.max_prompts, within=readable_roots())
            self.prompts[name] = prompts
            self._ids[name] = [self._encoded(path, number, prompt) for number, prompt in enumerate(prompts, 1)]

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

    def _encoded(self, path: Path, number: int, prompt: Prompt) -> list[int]:
        if prompt.messages:
            try:
                ids = self._tokenizer.apply_chat_template(
                    list(prompt.messages), add_generation_prompt=True, return_dict=False
                )
            except Exception as error:  # templates raise whatever they like
                raise InputError(
                    f"eval.tasks: prompt {number} of {path} holds messages that the student's chat template does not "
                    f"take: {str(error).partition(chr(10))[0]}"
                ) from error
        else:
            ids = self._completer.encoder.begin(prompt.text).tolist()
        if not 0 < len(ids) <= self._room:
            raise InputError(
                f"eval.tasks: prompt {number} of {path} has {len(ids)} tokens: with eval.tasks.max_new_tokens = "
                f"{self.spec.max_new_tokens}, student.context_length has room for 1 to {max(0, self._room)}"
            )
        return [int(token) for token in ids]


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
        count = min(SAMPLE_TOKENS, spec.student.context_length // 2)
        self._completer = Completer(tokenizer, Sampling(count, temperature=0))
        self.prompts = spec.eval.samples
        self._ids = [self._completer.encoder.begin(prompt).tolist() for prompt in self.prompts]
        room = spec.student.context_length - count
        for prompt, ids in zip(self.prompts, self._ids, strict=True):
            if not 0 < len(ids) <= room:
                raise InputError(
                    f"eval.samples: the prompt {prompt[:40]!r} has {len(ids)} tokens: beside {count} new ones, "
                    f"student.context_length has room for 1 to {max(0, room)}"
                )

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
