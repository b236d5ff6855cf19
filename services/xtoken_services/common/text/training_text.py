"""The records that a run trains on: its documents, or the pieces into which long ones are divided. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import DataIndex, JoinedIndex, PieceIndex, TextIndex
from xtoken_core.dataset.held_out import Part
from xtoken_core.dataset.records import Document
from xtoken_core.errors import InputError
from xtoken_services.common.files.allowed_paths import check_allowed


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


def scored_documents(spec: RunSpec, text: DataIndex) -> Iterator[Document]:
    """Return the documents that an evaluation reads; with `data.train_on = "all"` records are plain text."""
    if spec.data.train_on == "all":
        return text.documents()
    return (value.get("text", value) for value in text.values())


def open_scored(spec: RunSpec) -> DataIndex:
    """Return the index of the held-out text of a run with an evaluation.

    Raises:
        InputError: It is all conversations without an answer, of which nothing would be scored.
    """
    assert spec.eval is not None
    index = open_held_out(spec)
    if not any(map(_may_be_scored, scored_documents(spec, index))):
        named = ", ".join(map(str, spec.eval.paths)) or "what data.path holds back"
        raise InputError(
            f"no record of the held-out text ({named}) has an answer, and of conversations only answers are scored: "
            'name text with answers in eval.path, or do without an evaluation by eval = "none"'
        )
    return index


def _may_be_scored(document: Document) -> bool:
    """Return whether a document that an evaluation reads is plain text, or has an answer."""
    if isinstance(document, str):
        return True
    return "completion" in document or any(each["role"] == "assistant" for each in document["messages"])


def open_text(spec: RunSpec, limit: int, progress: Callable[[int, int], None] | None = None) -> TextIndex:
    """Return the index of the training text, of all its sources.

    Args:
        spec: The run's settings.
        limit: Bytes of a piece at most; 0: documents are not divided.
        progress: As of `DataIndex.build`; called with documents while they are divided. It may raise to stop.
    """
    documents = list(documents_of(spec, progress))
    parts: list[DataIndex | PieceIndex] = list(documents)
    if limit:
        parts = [PieceIndex.build(part, limit, cache_dir=_cache(spec), progress=progress) for part in documents]
    return JoinedIndex(parts) if spec.data.sources else parts[0]


def documents_of(spec: RunSpec, progress: Callable[[int, int], None] | None = None) -> Iterator[DataIndex]:
    """Yield the index of every training text, of which each record is a document."""
    for text in spec.data.texts:
        part: Part | None = "train" if spec.holds_back else None
        yield open_index(spec, text.paths, text.field or spec.data.field, progress, part)


def _cache(spec: RunSpec) -> Path:
    return spec.output / "cache" / "index"
