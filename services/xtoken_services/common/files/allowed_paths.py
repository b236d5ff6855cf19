"""Directories that a run may read and write: set for a control plane, inherited by every worker of its runs.

The control plane checks a run's paths before it starts anything, and every worker checks again when it opens them: a
symbolic link may have changed in between. A worker without a supervisor has no roots and may open what its user may.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtoken_core.errors import ConfigError

if TYPE_CHECKING:
    from xtoken_core.config.spec import RunSpec

VARIABLE = "XTOKEN_ROOTS"
URLS = "XTOKEN_ENGINE_URLS"
"""Addresses of servers, separated by commas, that the runs of a control plane may send requests to."""
WRITTEN = ("output",)
"""Fields whose paths are written; all others are read."""
MOST_ENTRIES = 100_000


class RefusedError(ConfigError):
    """A run was refused because of one of its settings, such as a path that leads out of the roots.

    Attributes:
        field: Name of the setting.
        message: What is wrong with it.

    Args:
        joint: Text between the two in the line that is printed.
    """

    def __init__(self, field: str, message: str, *, joint: str = ": ") -> None:
        super().__init__(f"{field}{joint}{message}")
        self.field, self.message = field, message


@dataclass(frozen=True)
class Roots:
    """Directories that runs may read, and those that they may write (and read).

    Attributes:
        read: Absolute and without symbolic links, like `write`.
    """

    read: tuple[Path, ...]
    write: tuple[Path, ...]

    @classmethod
    def of(cls, read: Sequence[Path], write: Sequence[Path]) -> Roots:
        """Return roots from directories that a user names.

        Raises:
            ConfigError: A root is not a directory.
        """
        for path in (*read, *write):
            if not path.is_dir():
                raise ConfigError(f"--root {path} is not a directory")
        return cls(tuple(path.resolve() for path in read), tuple(path.resolve() for path in write))

    @classmethod
    def of_environment(cls) -> Roots | None:
        """Return the roots that the control plane has set for this process; None without."""
        value = os.environ.get(VARIABLE)
        if value is None:
            return None
        try:
            roots = json.loads(value)
            return cls(tuple(map(Path, roots["read"])), tuple(map(Path, roots["write"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{VARIABLE} is not what a control plane writes: {error}") from error

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass the roots to a worker."""
        return {VARIABLE: json.dumps({"read": [str(p) for p in self.read], "write": [str(p) for p in self.write]})}

    def check_run(self, spec: RunSpec) -> None:
        """Check every path of a run.

        Raises:
            RefusedError: One leads out of the roots.
        """
        for field, path in paths_of(spec.model_dump()):
            self.check(path, field, write=field in WRITTEN)
        for number, teacher in enumerate(spec.teacher):
            if teacher.store is not None:
                self.check_store(teacher.store, f"teacher.{number}.store")
            self.check_urls(teacher.url, f"teacher.{number}.url")
        if spec.rollout is not None:
            self.check_urls(spec.rollout.url, "rollout.url")

    def check_store(self, store: str, field: str) -> None:
        """Check the directory of a store; an address lies in no root.

        Raises:
            RefusedError: It lies outside the roots.
        """
        if "://" in store:
            raise RefusedError(field, f"{store} lies under none of this control plane's roots: name a directory")
        self.check(Path(store), field)

    def check_urls(self, urls: Sequence[str], field: str) -> None:
        """Check the addresses of servers: a run sends requests only to those that the control plane's operator names.

        Raises:
            RefusedError: One is not among them.
        """
        allowed = {url.strip().rstrip("/") for url in os.environ.get(URLS, "").split(",")}
        for url in urls:
            if url not in allowed:
                raise RefusedError(field, f"{url} is none of the servers that this control plane allows ({URLS})")

    def check(self, path: Path, field: str, *, write: bool = False) -> None:
        """Check a path, and every symbolic link below it if it is a directory to read.

        Raises:
            RefusedError: It leads out of the roots.
        """
        allowed = self.write if write else (*self.read, *self.write)
        names = ", ".join(map(str, allowed))
        try:
            target = path.resolve()
            if not _within(target, allowed):
                shown = f"{path}, which is {target}," if str(target) != os.path.normpath(path.absolute()) else path
                if write:
                    raise RefusedError(field, f"{shown} is written: it must lie below --runs-dir ({names})")
                raise RefusedError(
                    field, f"{shown} lies under none of this control plane's roots ({names}), which --root adds to"
                )
            for link in () if write else _links(target):
                if not _within(link.resolve(), allowed):
                    raise RefusedError(field, f"{link} leads out of this control plane's roots ({names})")
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RefusedError(field, f"{str(path)!r} cannot be looked up: {reason}") from error


def check_allowed(path: Path, field: str, *, write: bool = False) -> Path:
    """Return the path, if this process may open it, or with `write` write there.

    Raises:
        RefusedError: It leads out of the roots that the control plane has set.
    """
    roots = Roots.of_environment()
    if roots is not None:
        roots.check(path, field, write=write)
    return path


def readable_roots() -> tuple[Path, ...] | None:
    """Return the directories that this process may read; None for any."""
    roots = Roots.of_environment()
    return None if roots is None else (*roots.read, *roots.write)


def values_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in a dumped specification with its field's name; a section or list before what it holds."""
    yield name, value
    items: Any = value.items() if isinstance(value, Mapping) else ()
    for key, item in enumerate(value) if isinstance(value, (list, tuple)) else items:
        yield from values_of(item, f"{name}.{key}" if name else str(key))


def paths_of(document: Any) -> Iterator[tuple[str, Path]]:
    """Yield every path in a dumped specification, with its field's name."""
    return ((name, value) for name, value in values_of(document) if isinstance(value, Path))


def _within(path: Path, roots: Sequence[Path]) -> bool:
    return any(path.is_relative_to(root) for root in roots)


def _links(directory: Path) -> Iterator[Path]:
    """Return the symbolic links in a directory and below; none if it is a file."""
    seen = 0
    for place, directories, files in os.walk(directory):
        for name in (*directories, *files):
            seen += 1
            if seen > MOST_ENTRIES:
                raise ValueError(f"more than {MOST_ENTRIES} files")
            path = Path(place, name)
            if path.is_symlink():
                yield path
