"""The records that a run trains on: its documents, or the pieces into which long ones are divided. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import DataIndex, JoinedIndex, PieceIndex, Record, TextIndex
from xtoken_core.dataset.held_out import Part
from xtoken_core.errors import InputError
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.processes.child_process import ask_child

SAMPLED_RECORDS = 128
SAMPLED_CHARACTERS = 65_536
"""Of each record of the sample."""
SILENCE_S = 300.0
PROGRAM = "xtoken_services.common.text.piece_bytes"


def open_index(
    spec: RunSpec,
    paths: Sequence[Path],
    field: str,
    progress: Callable[[int, int], None] | None = None,
    part: Part | None = None,
) -> DataIndex:
    """Return the index of a run's text, or of a part of it, from the run's own cache."""
    for path in paths:
        check_allowed(path, "the text")
    return DataIndex.build(paths, field=field, cache_dir=_cache(spec), progress=progress, part=part)


def open_held_out(spec: RunSpec, progress: Callable[[int, int], None] | None = None) -> DataIndex:
    """Return the index of the held-out text of a run with an evaluation."""
    assert spec.eval is not None
    if spec.holds_back:
        return open_index(spec, spec.data.paths, spec.data.field, progress, part="held_out")
    return open_index(spec, spec.eval.paths, spec.eval.field, progress)


def resolve_text(
    spec: RunSpec, same_tokenizer: Sequence[bool], progress: Callable[[int, int], None] | None = None
) -> tuple[TextIndex, int]:
    """Return the records of a run, and the bytes of a piece at most; 0 where documents are not divided.

    Args:
        spec: The run's settings.
        same_tokenizer: Per teacher, True if it has the student's tokenizer.
        progress: As of `DataIndex.build`; called with documents while they are divided. It may raise to stop.

    Raises:
        InputError: The text or a tokenizer cannot be read.
    """
    limit = measure_pieces(spec, same_tokenizer, progress)
    return open_text(spec, limit, progress), limit


def measure_pieces(
    spec: RunSpec, same_tokenizer: Sequence[bool], progress: Callable[[int, int], None] | None = None
) -> int:
    """Return the bytes of a run's pieces at most: what every side's context holds; 0 where documents are not divided.

    Args:
        spec: The run's settings.
        same_tokenizer: As of `resolve_text`.
        progress: Likewise.

    Raises:
        InputError: The text or a tokenizer cannot be read.
    """
    if spec.data.long != "split":
        return 0
    texts = [text for part in documents_of(spec, progress) for text in _sample(part)]
    return _measure(spec, same_tokenizer, texts) if texts else 0


def open_text(spec: RunSpec, limit: int, progress: Callable[[int, int], None] | None = None) -> TextIndex:
    """Return the index of the training text, of all its sources.

    Args:
        spec: The run's settings.
        limit: Bytes of a piece at most; 0: documents are not divided.
        progress: As of `resolve_text`.
    """
    documents = list(documents_of(spec, progress))
    parts: list[DataIndex | PieceIndex] = list(documents)
    if limit:
        parts = [PieceIndex.build(part, limit, cache_dir=_cache(spec), progress=progress) for part in documents]
    return JoinedIndex(parts) if spec.data.sources else parts[0]


def mixture_of(spec: RunSpec, index: TextIndex) -> tuple[tuple[int, int], ...]:
    """Return per source of weighted texts its records and its samples in an epoch; empty without weights."""
    if not isinstance(index, JoinedIndex):
        return ()
    records = tuple(map(len, index.parts))
    return tuple(zip(records, spec.data.samples_per_epoch(records), strict=False))


def documents_of(spec: RunSpec, progress: Callable[[int, int], None] | None = None) -> Iterator[DataIndex]:
    """Yield the index of every training text, of which each record is a document."""
    for text in spec.data.texts:
        part: Part | None = "train" if spec.holds_back else None
        yield open_index(spec, text.paths, text.field or spec.data.field, progress, part)


def _cache(spec: RunSpec) -> Path:
    return spec.output / "cache" / "index"


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
