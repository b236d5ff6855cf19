"""Opening of files by name: FIFOs, devices, links, sizes."""

import os
import socket
from pathlib import Path

import pytest

from xtoken_core.atomic import atomic_write
from xtoken_core.regular_files import (
    IrregularFileError,
    append_regular,
    descriptor_path,
    names_below,
    open_below,
    open_regular,
    parse_object,
    read_below,
    read_regular,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (root / "inner" / "file").write_text("content")
    (tmp_path / "secret").write_text("secret")
    return root


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "device"])
def test_irregular_files_do_not_block(root: Path, kind: str) -> None:
    path = root / "x"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    for read in (lambda: read_regular(path, 10), lambda: read_below(path.parent, path.name, 10)):
        with pytest.raises(IrregularFileError, match="not a regular file"):
            read()


def test_links_are_followed_only_for_names_of_users(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(root / "inner" / "file")
    (root / "up").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    assert read_regular(root / "link", 10) == b"content"
    assert read_regular(root / "up" / "secret", 10) == b"secret"
    for name in ("link", "up/secret", "loop"):
        with pytest.raises(OSError):
            open_below(root, name)
    with pytest.raises(OSError):
        open_regular(root / "loop")


def test_append(root: Path) -> None:
    for text in (b"one ", b"two"):
        with os.fdopen(append_regular(root / "log"), "ab") as file:
            file.write(text)
    assert (root / "log").read_bytes() == b"one two"


@pytest.mark.parametrize("kind", ["link", "fifo", "read fifo", "directory", "linked directory"])
def test_append_to_what_is_no_file(root: Path, tmp_path: Path, kind: str) -> None:
    path, reader = root / "log", None
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
    elif kind == "directory":
        path.mkdir()
    elif kind == "linked directory":
        (root / "logs").symlink_to(tmp_path)
        path = root / "logs" / "secret"
    else:
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read fifo" else None
    with pytest.raises(OSError):
        append_regular(path)
    assert (tmp_path / "secret").read_text() == "secret"
    if reader is not None:
        os.close(reader)


def test_atomic_write_follows_no_link(root: Path, tmp_path: Path) -> None:
    (root / f".new.{os.getpid()}.tmp").symlink_to(tmp_path / "secret")
    atomic_write(root / "new", "text")
    assert (root / "new").read_text() == "text" and not (root / "new").is_symlink()
    assert (tmp_path / "secret").read_text() == "secret"


def test_confinement(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "secret")
    assert read_regular(root / "inner" / "file", 10, within=[root]) == b"content"
    with pytest.raises(IrregularFileError, match="leads out of the allowed directories"):
        read_regular(root / "link", 10, within=[root])
    for name in ("../secret", "/etc/passwd", "inner//file", "inner/../inner/file", "", "a\0b"):
        with pytest.raises(IrregularFileError, match="not a path below"):
            open_below(root, name)
    assert read_below(root, "inner/file", 10) == b"content"


def test_size_limit(root: Path) -> None:
    assert read_below(root, "inner/file", 7) == b"content"
    with pytest.raises(IrregularFileError, match="larger than 6 bytes"):
        read_below(root, "inner/file", 6)


def test_no_descriptor_is_left_open(root: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with descriptor_path(root / "inner" / "file") as path:
        assert path.read_text() == "content"
    for name in ("inner", "none", "inner/none"):
        with pytest.raises(OSError):
            open_below(root, name)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_names_below(root: Path, tmp_path: Path) -> None:
    os.mkfifo(root / "inner" / "fifo")
    (root / "inner" / "link").symlink_to(tmp_path / "secret")
    (root / "other").symlink_to(root / "inner")
    assert names_below(root, "inner") == ["file"]
    assert names_below(root, "other") == names_below(root, "none") == []


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[1]", b"{", b"\xff", b'{"n": ' + b"9" * 5000 + b"}"])
def test_text_that_is_no_object(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_object(text)
