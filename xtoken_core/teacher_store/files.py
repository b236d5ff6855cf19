"""Files of a store: in a local directory, or at an address of `fsspec` such as `s3://bucket/name`."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, NamedTuple

from xtoken_core.atomic import atomic_write
from xtoken_core.errors import ConfigError, OutputError, os_errors_as
from xtoken_core.regular_files import open_regular, read_regular
from xtoken_core.teacher_store.identity import StoreError

MAX_JSON = 1 << 30
"""Largest JSON file of a store that is read."""
MAPPED = 64
"""Shards that stay mapped."""


class Part(NamedTuple):
    """A part of a file.

    Attributes:
        name: Name of the file.
        start: Its first byte.
        size: Its bytes.
    """

    name: str
    start: int
    size: int


class MissingFileError(StoreError):
    """A file of a store is not there, or is empty."""


def is_address(store: str) -> bool:
    """Return whether a store is named by an address instead of a directory."""
    return "://" in store


class StoreFiles(ABC):
    """The files of one store.

    Attributes:
        name: The directory or address.
    """

    name: str

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files, sorted; none if the store does not exist.

        Raises:
            StoreError: They cannot be listed.
        """

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a whole file.

        Raises:
            StoreError: It cannot be read.
        """

    @abstractmethod
    def read_parts(self, parts: Sequence[Part]) -> list[bytes | memoryview | StoreError]:
        """Return parts of files, fewer bytes of one whose file ends before. Any thread may call it.

        In the place of a part that cannot be read stands the error: `MissingFileError` if there is no such file.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all.

        Raises:
            OutputError: It cannot be written.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file; one that does not exist is no error."""


class LocalFiles(StoreFiles):
    """A store in a directory; shards are mapped into memory."""

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._directory = directory
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._lock = Lock()

    def names(self) -> list[str]:
        """See `StoreFiles.names`."""
        try:
            return sorted(entry.name for entry in os.scandir(self._directory) if entry.is_file(follow_symlinks=False))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot list the store {self.name}: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        """See `StoreFiles.read`."""
        with os_errors_as(StoreError, f"cannot read {self._directory / name}"):
            return read_regular(self._directory / name, MAX_JSON)

    def read_parts(self, parts: Sequence[Part]) -> list[bytes | memoryview | StoreError]:
        """See `StoreFiles.read_parts`."""
        return [self._read_part(part) for part in parts]

    def _read_part(self, part: Part) -> memoryview | StoreError:
        try:
            return memoryview(self._mapped(part.name))[part.start : part.start + part.size]
        except StoreError as error:
            return error

    def write(self, name: str, data: bytes) -> None:
        """See `StoreFiles.write`."""
        with os_errors_as(OutputError, f"cannot write {self._directory / name}"):
            self._directory.mkdir(parents=True, exist_ok=True)
            atomic_write(self._directory / name, data)

    def remove(self, name: str) -> None:
        """See `StoreFiles.remove`."""
        with contextlib.suppress(FileNotFoundError):
            (self._directory / name).unlink()

    def _mapped(self, name: str) -> mmap.mmap:
        with self._lock:
            if name in self._maps:
                self._maps.move_to_end(name)
                return self._maps[name]
            try:
                descriptor = open_regular(self._directory / name)
                try:
                    opened = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
                finally:
                    os.close(descriptor)
            except (FileNotFoundError, ValueError) as error:  # ValueError: an empty file
                raise MissingFileError(f"{self._directory / name} is not there, or is empty") from error
            except OSError as error:
                raise StoreError(f"cannot read {self._directory / name}: {error.strerror}") from error
            self._maps[name] = opened
            if len(self._maps) > MAPPED:
                self._maps.popitem(last=False)  # unmapped once the last view of it is gone
            return opened


class RemoteFiles(StoreFiles):
    """A store at an address of `fsspec`; parts of shards are read by range, many at a time where it can do that.

    Object stores show a file only when it is complete; on other file systems it is written under another name first.
    """

    def __init__(self, address: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped] # it has no stubs
        except ImportError as error:
            raise ConfigError(f"{address}: reading it needs fsspec: install it by pip install fsspec") from error
        self.name = address
        try:
            self._files, root = fsspec.core.url_to_fs(address)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"cannot open the store {address}: {error}") from error
        self._root = PurePosixPath(root)

    def names(self) -> list[str]:
        """See `StoreFiles.names`."""
        listed: list[str] = self._try(self._names)
        return listed

    def _names(self) -> list[str]:
        try:
            self._files.invalidate_cache()
            entries = self._files.ls(str(self._root), detail=True)
        except FileNotFoundError:
            return []
        return sorted(PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "file")

    def read(self, name: str) -> bytes:
        """See `StoreFiles.read`."""
        return bytes(self._try(lambda: self._files.cat_file(self._path(name)), name))

    def read_parts(self, parts: Sequence[Part]) -> list[bytes | memoryview | StoreError]:
        """See `StoreFiles.read_parts`."""
        paths = [self._path(part.name) for part in parts]
        starts, ends = [part.start for part in parts], [part.start + part.size for part in parts]
        read: list[Any] = self._try(lambda: self._files.cat_ranges(paths, starts, ends, on_error="return"))
        return [self._part(part, data) for part, data in zip(parts, read, strict=True)]

    def _part(self, part: Part, data: Any) -> bytes | StoreError:
        """Return the bytes of a part, or the error of reading it."""
        if isinstance(data, FileNotFoundError):
            return MissingFileError(f"{self.name}/{part.name} is not there")
        if isinstance(data, BaseException):
            return StoreError(f"cannot read {self.name}/{part.name}: {data or type(data).__name__}")
        return bytes(data)

    def write(self, name: str, data: bytes) -> None:
        """See `StoreFiles.write`."""
        scratch = self._path(f".{name}.{os.getpid()}.tmp")
        try:
            self._files.makedirs(str(self._root), exist_ok=True)
            self._files.pipe_file(scratch, data)
            self._files.mv(scratch, self._path(name))
        except Exception as error:  # each file system of fsspec raises its own
            raise OutputError(f"cannot write {self.name}/{name}: {error}") from error

    def remove(self, name: str) -> None:
        """See `StoreFiles.remove`."""
        with contextlib.suppress(Exception):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return str(self._root / name)

    def _try(self, read: Any, name: str = "") -> Any:
        try:
            return read()
        except Exception as error:  # each file system of fsspec raises its own
            raise StoreError(f"cannot read {self.name}/{name}: {error or type(error).__name__}") from error


def open_files(store: str) -> StoreFiles:
    """Return the files of a store.

    Args:
        store: A directory, or an address with `://`.

    Raises:
        ConfigError: The address needs a package that is not installed, or is none.
    """
    return RemoteFiles(store) if is_address(store) else LocalFiles(Path(store))
