"""Sample completions: the same prompts at every evaluation, to be read, not judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_services.trainer.generate import Completer
from xtoken_services.trainer.student import Student


class EvalSamples:
    """The prompts of `eval.samples`, tokenized once.

    Args:
        spec: The run, with `eval.samples`.
        tokenizer: The student's.

    Raises:
        InputError: A prompt leaves no room for its completion.
    """

    def __init__(self, spec: RunSpec, tokenizer: Any) -> None:
        assert spec.eval is not None and spec.eval.samples is not None
        settings = spec.eval.samples
        self._completer = Completer(tokenizer, settings.max_new_tokens)
        self.prompts = settings.prompts
        self._ids = [self._completer.encoder.begin(prompt).tolist() for prompt in self.prompts]
        room = spec.student.context_length - settings.max_new_tokens
        for prompt, ids in zip(self.prompts, self._ids, strict=True):
            if not 0 < len(ids) <= room:
                raise InputError(
                    f"eval.samples: the prompt {prompt[:40]!r} has {len(ids)} tokens: with "
                    f"eval.samples.max_new_tokens = {settings.max_new_tokens}, student.context_length has room for 1 "
                    f"to {max(0, room)}"
                )

    def measure(self, student: Student, *, progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return `samples` of a line of `eval.jsonl`: a list of objects with `prompt` and `completion`.

        Args:
            student: The student, on all ranks if it is sharded.
            progress: Called after every token; it may raise to stop.
        """
        with torch.no_grad():
            made = [self._completer.complete(student, [ids], progress)[0][0] for ids in self._ids]
        return {
            "samples": [{"prompt": prompt, "completion": text} for prompt, text in zip(self.prompts, made, strict=True)]
        }
