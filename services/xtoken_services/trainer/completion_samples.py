"""Completions for the web page: tokens of both sides and the divergence of every chunk, in `rollouts.json`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from xtoken_core import schema
from xtoken_core.alignment.tables import token_table
from xtoken_core.atomic import atomic_write
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.losses.objective import Values
from xtoken_services.common.tokenizers.loading import tokenizer_of

FILE = "rollouts.json"
KEPT = 8
"""Completions in the file, the newest first."""
PERIOD_S = 5.0
"""Minimum of seconds between two of them: reading a divergence back waits for the device."""
MAX_TOKENS = 512
"""Maximum of tokens of a side: the last ones."""


class CompletionSamples:
    """Writes one completion every few seconds.

    Args:
        run: The run; one without rollouts writes nothing.
        writes: False on all ranks but one.
    """

    def __init__(self, run: ResolvedRun, *, writes: bool) -> None:
        self.run, self.path = run, run.spec.output / FILE
        self._writes = writes and run.spec.rollout is not None
        self._next = 0.0
        self._kept: list[dict[str, Any]] = []
        self._values: Values | None = None
        self._pieces: list[Sequence[str]] = []

    def due(self, batch: Mapping[str, Tensor]) -> bool:
        """Return True if a completion of this micro-batch, on the host, is to be written."""
        if not self._writes or time.monotonic() < self._next:
            return False
        return bool((batch[schema.WEIGHTS_VERSION.name] >= 0).any())

    def observe(self, values: Values) -> None:
        """Store the divergences of a micro-batch for `write`; with a head in blocks the last call counts."""
        self._values = values

    @torch.no_grad()
    def write(self, step: int, batch: Mapping[str, Tensor], teachers: Sequence[int]) -> None:
        """Write the first completion of a micro-batch.

        Args:
            step: Number of the optimiser step.
            batch: The micro-batch, on the host.
            teachers: Numbers of the teachers that compare it.
        """
        self._next = time.monotonic() + PERIOD_S
        values, self._values = self._values, None
        if values is None:
            return
        if not self._pieces:
            specs = self.run.spec.student, *self.run.spec.teacher
            self._pieces = [_pieces(tokenizer_of(spec, "a model")) for spec in specs]
        versions = batch[schema.WEIGHTS_VERSION.name]
        sample = int(torch.nonzero(versions >= 0)[0])
        compared = [
            self._teacher(batch, sample, number, torch.stack(divergence.parts).sum(0))
            for number, divergence in zip(teachers, values.divergences, strict=False)  # averaged logits have one
        ]
        shown = {"step": step, "version": int(versions[sample]), "teachers": compared}
        self._kept = [shown, *self._kept][:KEPT]
        atomic_write(self.path, json.dumps({"samples": self._kept}) + "\n")

    def _teacher(self, batch: Mapping[str, Tensor], sample: int, number: int, values: Tensor) -> dict[str, Any]:
        """Return both sides' tokens with their chunks, and the chunks' divergences in nats."""
        own = schema.INPUT_IDS, schema.STUDENT_SAMPLE, schema.INPUT_LENGTHS, schema.STUDENT_CHUNK_ID
        other = schema.TEACHER_INPUT_IDS, schema.TEACHER_SAMPLE, schema.TEACHER_INPUT_LENGTHS, schema.TEACHER_CHUNK_ID
        sides: list[list[tuple[str, int]]] = []
        for fields, pieces in ((own, self._pieces[0]), (other, self._pieces[1 + number])):
            ids, chunks = _of_sample(batch, sample, [schema.field_name(field, number) for field in fields])
            sides.append([(pieces[token], chunk) for token, chunk in zip(ids, chunks, strict=True)][-MAX_TOKENS:])
        of_chunk = values[0 if schema.STUDENT_SAMPLE.name in batch else sample].float().cpu()
        shown = sorted({chunk for side in sides for _, chunk in side if chunk >= 0})
        divergence = {str(chunk): round(float(of_chunk[chunk]), 4) for chunk in shown}
        return {"number": number, "student": sides[0], "teacher": sides[1], "divergence": divergence}


def _of_sample(batch: Mapping[str, Tensor], sample: int, columns: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the tokens of a sample and their chunks.

    Args:
        batch: A padded or packed micro-batch.
        sample: Index of the sample.
        columns: Names of the columns of ids, of samples in a packed row, of lengths and of chunks.
    """
    ids, packed, lengths, chunks = columns
    length = int(batch[lengths][sample])  # in a packed row the padding has the index of the last sample
    at = (0, batch[packed][0] == sample) if packed in batch else sample
    return batch[ids][at][:length].tolist(), batch[chunks][at][:length].tolist()


def _pieces(tokenizer: Any) -> list[str]:
    """Return the text of every token by id: a special by its name, a part of a character by its bytes."""
    table = token_table(tokenizer)
    names = tokenizer.convert_ids_to_tokens(range(len(table.pieces)))
    texts = (bytes(piece).decode("utf-8", "backslashreplace") for piece in table.pieces)
    return [text or str(name) for text, name in zip(texts, names, strict=True)]
