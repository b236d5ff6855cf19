"""Settings of the text to train on."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from xtoken_core.config.base import ConfigModel, Count

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Compressions of files of text by suffix, as pyarrow names them."""


def _packed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + packed for packed in ("", *COMPRESSIONS) for suffix in suffixes)


TEXT_SUFFIXES = (".parquet", *_packed(".jsonl", ".txt", ".csv"))
"""Suffixes of files that are taken for text where none is named."""
READ_SUFFIXES = (*TEXT_SUFFIXES, *_packed(".json"))
"""Suffixes of files of text that a run reads."""
TEXT_FORMS = ".jsonl, .json, .csv or .txt (also with .gz or .zst), or .parquet"
"""They in words."""
MOST_TEXT_BYTES = 64 << 30
"""Bytes of one text in the user's cache at most."""


class DataSource(ConfigModel):
    """One of several texts. All of them have a weight, or none has."""

    path: Path | tuple[Path, ...]
    """Same forms as `data.path`."""
    field: str | None = None
    """Field of a record that holds the text; left out: `data.field`."""
    weight: Annotated[float | None, Field(ge=1e-4, le=1e4)] = None
    """Part of the samples that come from this text, relative to the other weights: of every step, as exactly as whole
    samples allow. An epoch is as long as the text needs that is passed last; the others are repeated meanwhile. Without
    weights the texts are one, and every record is read once in an epoch."""
    teachers: tuple[str, ...] | None = None
    """Names (`teacher.name`) of the teachers that compare this text; no other teacher computes anything for it. Left
    out: all of them. A record's field `teacher`, a name or a list of names, goes before."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path or paths, always as a tuple."""
        return self.path if isinstance(self.path, tuple) else (self.path,)


class DataSpec(ConfigModel):
    """The text to train on."""

    path: Path | tuple[Path, ...] = ()
    """A file or files (`.jsonl`, `.json`, `.csv`, `.txt`, these also with `.gz` or `.zst`, or `.parquet`), or a
    directory saved by `datasets`. `xtoken run` also takes an address (`https://`, or one of `fsspec` such as `s3://`),
    and the id of a data set on the Hugging Face Hub: `org/name`, `org/name@revision`, with `:PATTERN` for its files.
    Required without `data.sources`."""
    field: str = "text"
    """Field of a record that holds the text; `.txt` has none."""
    epochs: Count = 1
    """Passes over the records."""
    on_bad_record: Literal["skip", "fail"] = "skip"
    """Handling of an empty or undecodable record: skip and count it, or end the run."""
    append_eos: bool = True
    """Append the end-of-text token to every document that was not truncated, on both sides. Of `messages` learn the
    special token by which the chat template ends an answer; without it a model is not taught to stop."""
    long: Literal["cut", "split"] = "cut"
    """A document longer than the contexts: cut it there, or divide it at line or word ends into several records, each
    of which begins as a text does (BOS). Their size in bytes follows from the bytes per token of a sample; one that is
    still too long is cut."""
    train_on: Literal["completions", "all"] = "completions"
    """Of records with `prompt` and `completion`, or with `messages`: learn the completion, or the assistant's messages;
    or `all`, prompts and every role's messages too. Plain text is learnt whole in either case."""
    shuffle: bool = True
    """Permute the records in every epoch, by an index of offsets."""
    sources: tuple[DataSource, ...] = ()
    """Several texts, each with a `path` and, if they are mixed, a `weight`; instead of `path`."""

    @model_validator(mode="after")
    def _one_text_or_several(self) -> DataSpec:
        if bool(self.sources) == (self.path != ()):
            raise ValueError("path: name the text by path, or several by [[data.sources]]: one of the two")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("sources: some have a weight and some have none: give one to all or to none")
        return self

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path or paths, always as a tuple; of all sources."""
        return tuple(path for source in self.texts for path in source.paths)

    @property
    def texts(self) -> tuple[DataSource, ...]:
        """The sources, each with its field; a single text is one."""
        if not self.sources:
            return (DataSource(path=self.path, field=self.field),)
        return tuple(source.model_copy(update={"field": source.field or self.field}) for source in self.sources)

    def samples_per_epoch(self, records: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many samples of an epoch come from each source; empty without weights.

        The epoch is the shortest one that holds every record of every source and the weights' fractions, rounded to
        whole samples.

        Args:
            records: Records of each source.
        """
        weights = [Fraction(source.weight) for source in self.sources if source.weight is not None]
        if not weights:
            return ()
        longest = max(Fraction(count) / weight for count, weight in zip(records, weights, strict=True))
        return tuple(int(longest * weight + Fraction(1, 2)) for weight in weights)
