"""Files that only their owner may have written."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from xtoken_core.errors import InputError
from xtoken_services.common.files.private_files import check_private_directory, read_private

LIMIT = 100


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def link(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("content")
    path.symlink_to(other)


def hard_link(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("content")
    path.hardlink_to(other)


def writable(path: Path) -> None:
    path.write_text("content")
    path.chmod(0o620)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))


def too_large(path: Path) -> None:
    path.write_bytes(bytes(LIMIT + 1))


def read(path: Path) -> bytes:
    return read_private(path.parent, path.name, LIMIT)


def test_private_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(LIMIT))
    assert read(tmp_path / "a") == bytes(LIMIT)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (fifo, OSError, "not a regular file"),
        (bound_socket, OSError, "not a regular file"),
        (link, OSError, "not a regular file"),
        (Path.mkdir, OSError, "not a regular file"),
        (too_large, OSError, "larger than 100 bytes"),
        (hard_link, InputError, "a has 2 hard links: replace it by a copy that has one"),
        (writable, InputError, r"others may write to .*a: make sure .*, then chown it and chmod 600 it"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, make: Callable[[Path], None], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make(Path("a"))
    with pytest.raises(error, match=message):
        read(tmp_path / "a")


def test_foreign_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("content")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(InputError, match="others may write to"):
        read(tmp_path / "a")
    with pytest.raises(InputError, match="chmod 700 it"):
        check_private_directory(tmp_path)


def test_a_directory_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="not a directory"):
        check_private_directory(tmp_path / "link")
    (tmp_path / "real").chmod(0o770)
    with pytest.raises(InputError, match="others may write"):
        check_private_directory(tmp_path / "real")
