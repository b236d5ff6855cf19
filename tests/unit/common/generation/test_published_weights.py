"""Published weights: whole or not at all, checked, swept once their trainer is gone."""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import signal
import time
import zlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from xtoken_core.errors import InputError
from xtoken_core.transports.shared_files import WEIGHTS_PREFIX, remove_stale_files
from xtoken_services.common.generation import published_weights
from xtoken_services.common.generation.published_weights import (
    HEADER,
    ON_DEVICE,
    WRITING,
    Version,
    WeightsWriter,
    load_weights,
    read_version,
)

WAIT_S = 200.0
"""A process on a GPU may take a minute to import and to open its device."""


class Tied(nn.Module):
    def __init__(self, seed: int, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding, self.head = nn.Embedding(width, 3), nn.Linear(3, width, bias=False)
        self.head.weight = self.embedding.weight


def test_weights_are_read_as_they_were_published(tmp_path: Path) -> None:
    writer, file = WeightsWriter(tmp_path / "w"), tmp_path / "w"
    for seed in (1, 2):
        model, version = Tied(seed), Version(seed, 9)
        writer.write(dict(model.named_parameters()), version)
        other = Tied(7)
        assert load_weights(other, file) == read_version(file) == version
        assert torch.equal(other.head.weight, model.head.weight)
    assert file.stat().st_mode & 0o777 == 0o600
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_damage_and_other_models_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w"
    WeightsWriter(file).write(dict(Tied(1).named_parameters()), Version(3, 9))
    with pytest.raises(InputError, match="not those of the run's student"):
        load_weights(Tied(1, width=5), file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="checksum differs"):
        load_weights(Tied(1), file)
    file.write_bytes(data[: HEADER.size - 1])
    with pytest.raises(InputError, match="holds no published weights"):
        read_version(file)
    file.chmod(0o644)
    with pytest.raises(InputError, match="not a private file"):
        read_version(file)
    file.unlink()
    file.symlink_to("/dev/null")
    with pytest.raises(InputError, match="cannot be opened"):
        read_version(file)


def test_unfinished_and_unknown_weights_in_device_memory_are_refused(tmp_path: Path) -> None:
    file, model = tmp_path / "w", Tied(1)

    def put(step: int, payload: bytes) -> None:
        file.write_bytes(HEADER.pack(ON_DEVICE, step, 9, zlib.crc32(payload)) + payload)
        file.chmod(0o600)

    put(WRITING, b"{}")
    with pytest.raises(InputError, match="are being written"):
        read_version(file)
    tensors = {"embedding.weight": ["torch.float32", [4, 3], 0]}
    sound = {"handle": "00" * 64, "uuid": "00" * 16, "bytes": 48, "tensors": tensors}
    for change in (
        {"tensors": {}},
        {"bytes": 47},
        {"handle": "x"},
        {"tensors": {"other": ["torch.float32", [4, 3], 0]}},
    ):
        put(3, json.dumps(sound | change).encode())
        with pytest.raises(InputError, match="not those of the run's student"):
            load_weights(model, file)
    put(3, json.dumps(sound).encode())
    assert read_version(file) == Version(3, 9)
    with pytest.raises(InputError, match="lie on a GPU that this process does not see"):
        load_weights(model, file)


def publish_on_device(file: Path, published: Any, loaded: Any) -> None:
    model, writer = Tied(1).cuda(), WeightsWriter(file, on_device=True)
    for step in (1, 2):
        with torch.no_grad():
            model.embedding.weight.fill_(step)
        writer.write(dict(model.named_parameters()), Version(step, 9))
        published.set()
        assert loaded.wait(WAIT_S)
        loaded.clear()
    writer.close()


@pytest.mark.gpu
def test_weights_of_another_process_are_read_from_device_memory(tmp_path: Path) -> None:
    context, file, model = multiprocessing.get_context("spawn"), tmp_path / "w", Tied(7).cuda()
    published, loaded = context.Event(), context.Event()
    process = context.Process(target=publish_on_device, args=(file, published, loaded))
    process.start()
    for step in (1, 2):
        assert published.wait(WAIT_S)
        published.clear()
        assert load_weights(model, file) == Version(step, 9)
        assert (model.head.weight == step).all()
        assert file.read_bytes().startswith(ON_DEVICE)
        loaded.set()
    process.join(WAIT_S)
    assert process.exitcode == 0
    assert not file.exists()


class HostMemory:
    """Memory of a file in place of a GPU's: another process opens it likewise."""

    file: ClassVar[Path]
    handle = bytes(64)

    def __init__(self, nbytes: int) -> None:
        with self.file.open("r+b") as file:
            self.nbytes, self._mapping = nbytes, mmap.mmap(file.fileno(), nbytes)

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> HostMemory:
        cls.file.write_bytes(bytes(nbytes))
        return cls(nbytes)

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> HostMemory:
        return cls(nbytes)

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.uint8)


@pytest.fixture
def host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostMemory.file = tmp_path / "memory"
    monkeypatch.setattr(published_weights, "DeviceMemory", HostMemory)
    monkeypatch.setattr(published_weights, "device_uuid", lambda device: bytes(16))
    monkeypatch.setattr(published_weights, "device_of", lambda uuid: torch.device("cpu"))
    monkeypatch.setattr(published_weights, "why_not_on_device", lambda weights: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_weights_that_are_written_in_place_are_never_read_half(host_memory: None, tmp_path: Path) -> None:
    file, other, seen = tmp_path / "w", Tied(7, width=40_000), set()
    process = multiprocessing.get_context("fork").Process(
        target=publish_for_ever, args=(file,), kwargs={"device": True}
    )
    process.start()
    try:
        while len(seen) < 40:
            with contextlib.suppress(InputError):  # there are none yet, or they are being written
                version = load_weights(other, file)
                assert (other.head.weight == version.step).all()
                seen.add(version.step)
            assert process.is_alive()
        assert file.read_bytes().startswith(ON_DEVICE)
    finally:
        process.kill()
        process.join()


def test_a_sweep_takes_the_weights_of_a_trainer_that_is_gone(tmp_path: Path) -> None:
    kept, lost = tmp_path / f"{WEIGHTS_PREFIX}kept", tmp_path / f"{WEIGHTS_PREFIX}lost"
    writer = WeightsWriter(kept)
    writer.write(dict(Tied(1).named_parameters()), Version(0, 1))
    half = tmp_path / f".{lost.name}.1.tmp"
    for file in (lost, half):
        file.write_bytes(b"")
    assert remove_stale_files(tmp_path) == [half, lost]
    assert kept.exists()
    writer.close()


def publish_for_ever(file: Path, *, device: bool = False) -> None:
    """Publish version after version, all weights of one being its number."""
    torch.set_num_threads(1)
    model, writer, step = Tied(0, width=40_000), WeightsWriter(file, on_device=device), 0
    with torch.no_grad():
        while True:
            step += 1
            model.embedding.weight.fill_(step)
            writer.write(dict(model.named_parameters()), Version(step, 1))


@pytest.mark.slow
def test_a_trainer_killed_while_it_publishes_leaves_whole_weights(tmp_path: Path) -> None:
    """Most kills hit a write: it takes longer than what lies between two."""
    file, half_written, other = tmp_path / "w", 0, Tied(7, width=40_000)
    for kill in range(25):
        process = multiprocessing.get_context("fork").Process(target=publish_for_ever, args=(file,))
        process.start()
        while not file.exists():
            time.sleep(0.001)
        time.sleep(0.0007 * kill)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        half_written += len(list(tmp_path.iterdir())) > 1
        version = load_weights(other, file)
        assert (other.head.weight == version.step).all()
        WeightsWriter(file)  # the next trainer's
        assert list(tmp_path.iterdir()) == [file]
        file.unlink()
    assert half_written >= 5
