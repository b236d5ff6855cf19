"""Measurement of how much of a long document every side's context holds, by which a run divides its text. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import DataIndex, Record
from xtoken_core.errors import InputError
from xtoken_services.common.processes.child_process import ask_child
from xtoken_services.common.text.training_text import documents_of

SAMPLED_RECORDS = 128
SAMPLED_CHARACTERS = 65_536
"""Of each record of the sample."""
SILENCE_S = 300.0
PROGRAM = "xtoken_services.common.text.piece_bytes"


def measure_pieces(
    spec: RunSpec, same_tokenizer: Sequence[bool], progress: Callable[[int, int], None] | None = None
) -> int:
    """Return the bytes of a run's pieces at most: what every side's context holds; 0 where documents are not divided.

    Args:
        spec: The run's settings.
        same_tokenizer: Per teacher, True if it has the student's tokenizer.
        progress: As of `DataIndex.build`. It may raise to stop.

    Raises:
        InputError: The text or a tokenizer cannot be read.
    """
    if spec.data.long != "split":
        return 0
    texts = [text for part in documents_of(spec, progress) for text in _sample(part)]
    return _measure(spec, same_tokenizer, texts) if texts else 0


def _sample(documents: DataIndex) -> list[str]:
    """Return the beginnings of documents that lie evenly in the data; empty if none of them is plain text."""
    step = max(1, len(documents) // SAMPLED_RECORDS)
    numbers = range(0, len(documents), step)
    records = (record for number in numbers for record in documents.read([number]))
    texts = (str(r.value["text"]) for r in records if isinstance(r, Record) and "text" in r.value)
    return [text[:SAMPLED_CHARACTERS] for text in texts]


def _measure(spec: RunSpec, same_tokenizer: Sequence[bool], texts: list[str]) -> int:
    """Return the bytes that fit the context of every side, measured in a child process: transformers imports torch."""
    sides = [("student", spec.student.tokenizer_dir, spec.student.context_length)]
    for number, (teacher, same) in enumerate(zip(spec.teacher, same_tokenizer, strict=True)):
        sides += [] if same else [(spec.teacher_name(number), teacher.tokenizer_dir, teacher.context_length)]
    document = {"sides": [(what, str(directory), context) for what, directory, context in sides], "texts": texts}
    try:
        return int(ask_child(PROGRAM, document, silence_s=SILENCE_S))
    except (InputError, ValueError) as error:
        raise InputError(f'data.long = "split": cannot measure the text\'s bytes per token: {error}') from error
