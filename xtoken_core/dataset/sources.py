"""Data files behind the paths that a user names, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xtoken_core.config.data import READ_SUFFIXES, TEXT_FORMS
from xtoken_core.dataset.unpacking import Progress, unpacked
from xtoken_core.errors import InputError, os_errors_as
from xtoken_core.regular_files import read_json_object

Kind = Literal["jsonl", "txt", "parquet", "arrow"]
LINES: tuple[Kind, ...] = ("jsonl", "txt")
"""Kinds of which a line is a record; of the others it is a row."""
_SUFFIXES: dict[str, Kind] = {".jsonl": "jsonl", ".txt": "txt", ".parquet": "parquet"}
"""Kinds by suffix; files with other suffixes that are read are unpacked to files of lines."""


@dataclass(frozen=True)
class Source:
    """A data file and its state when it was found.

    Attributes:
        path: Absolute.
        kind: Format.
        size: Bytes.
        mtime_ns: Time of its last change, in nanoseconds.
        name: Its path as the user knows it: that of the file that was unpacked.
    """

    path: Path
    kind: Kind
    size: int
    mtime_ns: int
    name: Path

    def check_unchanged(self) -> None:
        """Raise an InputError if the file has changed since."""
        now = _source(self.path, self.kind, self.name)
        if now != self:
            raise InputError(f"{self.name} has changed since it was indexed: start the run again to index it anew")


def find_sources(paths: Sequence[Path], progress: Progress | None = None) -> tuple[Source, ...]:
    """Return the files behind the paths, in the order given; a directory saved by `datasets` gives its shards.

    Args:
        paths: Files and directories.
        progress: As of `unpacked`.

    Raises:
        InputError: A path is missing, of an unknown kind, or a directory of another sort.
    """
    if not paths:
        raise InputError("no data file was named")
    sources: list[Source] = []
    for path in paths:
        absolute = path.expanduser().absolute()
        if absolute.is_dir():
            sources += [_source(shard, "arrow", shard) for shard in _shards(absolute)]
            continue
        kind, file = _SUFFIXES.get(absolute.suffix.lower()), absolute
        if kind is None and absolute.exists():
            if not absolute.name.lower().endswith(READ_SUFFIXES):
                found = f"the ending {path.suffix!r}" if path.suffix else "no ending"
                raise InputError(
                    f"{path} has {found}: data is read from {TEXT_FORMS} files, or a directory saved by `datasets`"
                )
            file = unpacked(absolute, progress)
            kind = _SUFFIXES[file.suffix]
        sources.append(_source(file, kind or "txt", absolute))
    return tuple(sources)


def _source(path: Path, kind: Kind, name: Path) -> Source:
    with os_errors_as(InputError, f"cannot read the data file {path}"):
        status = path.stat()
    if not path.is_file():
        raise InputError(f"the data file {path} is not a regular file")
    return Source(path, kind, status.st_size, status.st_mtime_ns, name)


def _shards(directory: Path) -> list[Path]:
    """Return the arrow files of a directory written by `datasets` (`save_to_disk`, or one of its cache directories)."""
    if (directory / "dataset_dict.json").is_file():
        splits = _read_json(directory / "dataset_dict.json").get("splits", [])
        names = ", ".join(str(directory / str(split)) for split in splits) or "none"
        raise InputError(f"{directory} holds several splits: name one of them ({names})")
    if (directory / "state.json").is_file():
        state = _read_json(directory / "state.json")
        if state.get("_indices_data_files"):
            raise InputError(f"{directory} was saved with an indices mapping: save it again after flatten_indices()")
        return [_inside(directory, item) for item in state.get("_data_files", [])]
    if (directory / "dataset_info.json").is_file():
        return sorted(directory.glob("*.arrow"))
    raise InputError(
        f"{directory} is not a directory saved by `datasets` (it has no state.json): name its files instead"
    )


def _inside(directory: Path, item: Any) -> Path:
    name = item.get("filename") if isinstance(item, dict) else None
    if not isinstance(name, str) or Path(name).name != name:
        raise InputError(f"{directory / 'state.json'} names a data file that does not lie beside it: {name!r}")
    return directory / name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is not what `datasets` writes: {error}") from error
