"""Published weights: whole or not at all, checked, swept once their trainer is gone."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from services.common.published_weights import HEADER, Version, WeightsWriter, load_weights, read_version
from xtoken_core.errors import InputError
from xtoken_core.transports.shared_files import WEIGHTS_PREFIX, sweep


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
        writer.write(model, version)
        other = Tied(7)
        assert load_weights(other, file) == read_version(file) == version
        assert torch.equal(other.head.weight, model.head.weight)
    assert file.stat().st_mode & 0o777 == 0o600
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_damage_and_other_models_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "w"
    WeightsWriter(file).write(Tied(1), Version(3, 9))
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


def test_a_sweep_takes_the_weights_of_a_trainer_that_is_gone(tmp_path: Path) -> None:
    kept, lost = tmp_path / f"{WEIGHTS_PREFIX}kept", tmp_path / f"{WEIGHTS_PREFIX}lost"
    writer = WeightsWriter(kept)
    writer.write(Tied(1), Version(0, 1))
    half = tmp_path / f".{lost.name}.1.tmp"
    for file in (lost, half):
        file.write_bytes(b"")
    assert sweep(tmp_path) == [half, lost]
    assert kept.exists()
    writer.close()


def publish_for_ever(file: Path) -> None:
    """Publish version after version, all weights of one being its number."""
    torch.set_num_threads(1)
    model, writer, step = Tied(0, width=40_000), WeightsWriter(file), 0
    with torch.no_grad():
        while True:
            step += 1
            model.embedding.weight.fill_(step)
            writer.write(model, Version(step, 1))


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
