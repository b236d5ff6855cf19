"""The student's weights as the trainer publishes them for rollout workers: one file, replaced as a whole.

The file is a header and safetensors bytes. The header has the step, a tag that is new at every rewind, and a checksum.
In shared memory the writer holds a lock on it: one whose lock is free has lost its trainer, and the next start sweeps
it. A trainer on a GPU keeps the weights themselves in device memory, which rollout workers open by CUDA IPC as the file
says: no byte passes the host. That memory is written in place. A reader compares the header before and after its copy,
and the trainer marks the header before it writes, so that a mixture of two versions is read again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from xtoken_core.atomic import atomic_path
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import InputError, OutputError, first_line
from xtoken_core.regular_files import access_of_others, open_below
from xtoken_core.transports.cuda_memory import CudaError, DeviceMemory, bindings_installed, device_of, device_uuid
from xtoken_core.transports.ring import SignalError
from xtoken_core.transports.shared_files import DIRECTORY, WEIGHTS_PREFIX, create_locked

log = logging.getLogger("xtoken.weights")
MAGIC = b"xtokenw1"
ON_DEVICE = b"xtokenw2"
"""Magic bytes of a file about weights in device memory."""
WRITING = -1
"""Step of a file whose weights in device memory are being written."""
READS = 100
"""Attempts to read weights in device memory between two versions."""
HEADER = struct.Struct("<8sqQI")
"""Magic bytes, step, tag, CRC-32 of the rest."""
FILE_NAME = "rollout-weights"
ALIGNMENT = 256
"""Bytes between whose multiples tensors begin."""
NO_MEMORY = "cudaErrorMemoryAllocation"


@dataclass(frozen=True)
class Version:
    """A version of the weights.

    Attributes:
        step: Optimiser steps behind it.
        tag: The trainer's since its last rewind.
    """

    step: int
    tag: int


def weights_file(run: ResolvedRun, teacher: int | None = None) -> Path:
    """Return the file that the trainer publishes to; every process of the run computes the same.

    Args:
        run: The run.
        teacher: The teacher that the weights are for; None: rollout workers.
    """
    spec = run.spec
    if teacher is None and spec.rollout is not None and spec.rollout.weights == "directory":
        return spec.output / FILE_NAME
    label = re.sub(r"[^A-Za-z0-9_.]+", "_", spec.name)[:40]
    # Of the output, which one run at a time may use: two runs of one name do not meet here.
    digest = hashlib.sha256(os.fsencode(spec.output.absolute())).hexdigest()[:16]
    return DIRECTORY / f"{WEIGHTS_PREFIX}{label}-{os.geteuid()}-{digest}{'' if teacher is None else f'-t{teacher}'}"


class WeightsWriter:
    """Writer of the published weights, in the trainer.

    Args:
        path: The file.
        on_device: Leave the weights of a model on a GPU there, if another process can open its memory.
    """

    def __init__(self, path: Path, *, on_device: bool = False) -> None:
        self.path, self.on_device = path, on_device
        self._lock = -1
        self._device_weights: DeviceWeights | None = None
        for abandoned in path.parent.glob(f".{path.name}.*.tmp"):  # by a trainer that was killed while it wrote
            abandoned.unlink(missing_ok=True)

    def write(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Replace the published weights.

        Args:
            weights: By the names of the student's parameters, tied ones once.
            version: Theirs.

        Raises:
            OutputError: There is no room for them.
        """
        shared = self._shared(weights)
        if shared is None:
            on_host = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
            self._replace(MAGIC, version, save(on_host))
            return
        description = shared.description()
        # The header says so before a byte changes: a reader in between reads again.
        self._replace(ON_DEVICE, Version(WRITING, version.tag), description)
        shared.write(weights)
        self._replace(ON_DEVICE, version, description)

    def _shared(self, weights: Mapping[str, Tensor]) -> DeviceWeights | None:
        """Return the device memory for the weights; None if they pass through the file."""
        if self._device_weights is None and self.on_device:
            reason = why_not_on_device(weights)
            try:
                self._device_weights = DeviceWeights(weights) if reason is None else None
            except CudaError as error:
                if error.code != NO_MEMORY:
                    raise
                reason = "the GPU has no room for a second copy of the student's weights"
            if reason is not None:
                log.info("%s: publishing the weights on the host", reason)
                self.on_device = False
        return self._device_weights

    def _replace(self, magic: bytes, version: Version, payload: bytes) -> None:
        """Replace the file.

        Raises:
            OutputError: There is no room for it.
        """
        head = HEADER.pack(magic, version.step, version.tag, zlib.crc32(payload))
        try:
            with atomic_path(self.path) as scratch:
                # Locked before it has its name: no sweep may take it for a dead trainer's file.
                descriptor = create_locked(scratch)
                with os.fdopen(os.dup(descriptor), "wb") as file:
                    file.write(head)
                    file.write(payload)
        except OSError as error:
            raise OutputError(
                f"cannot publish {len(payload)} bytes of weights in {self.path.parent}: {error.strerror}: enlarge it "
                '(in a container --shm-size) or set rollout.weights = "directory"'
            ) from error
        self._unlock()
        self._lock = descriptor

    def close(self) -> None:
        """Remove the file."""
        if self._lock >= 0:
            self.path.unlink(missing_ok=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def read_version(path: Path) -> Version:
    """Return the version in a file without reading its weights.

    Raises:
        InputError: There is no such file, or it is another user's or damaged.
    """
    descriptor = _open(path)
    try:
        return _version(os.read(descriptor, HEADER.size), path)[1]
    finally:
        os.close(descriptor)


def load_weights(model: nn.Module, path: Path) -> Version:
    """Copy published weights into a model.

    Args:
        model: The student, as the trainer loads it.
        path: The file.

    Returns:
        The version.

    Raises:
        InputError: As `read_version`, or the weights are not this model's.
    """
    for _ in range(READS):
        magic, version, payload = _read(path)
        if magic == MAGIC:
            _copy(_parsed(payload, path), model, path)
            return version
        read_device_weights(payload, model)
        # The same header before and after the copy: no write can have begun in between.
        if read_version(path) == version:
            return version
    raise InputError(f"the published weights {path} are replaced faster than they can be read")


def read_weights(path: Path) -> tuple[Version, bytes]:
    """Return the version of published weights and the bytes of a `.safetensors` file with them.

    Raises:
        InputError: As `load_weights`.
    """
    magic, version, payload = _read(path)
    if magic != MAGIC:
        raise InputError(f"the published weights {path} are in device memory, of which servers read nothing")
    return version, save(_parsed(payload, path), metadata={"format": "pt"})


def _read(path: Path) -> tuple[bytes, Version, bytes]:
    descriptor = _open(path)
    try:
        mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise InputError(f"the published weights {path} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)
    with mapping:
        magic, version, checksum = _version(mapping[: HEADER.size], path)
        payload = mapping[HEADER.size :]
    if zlib.crc32(payload) != checksum:
        raise InputError(f"the published weights {path} are damaged: their checksum differs")
    return magic, version, payload


def _parsed(payload: bytes, path: Path) -> dict[str, Tensor]:
    try:
        return load(payload)
    except (SafetensorError, ValueError) as error:
        raise InputError(f"the published weights {path} are damaged: {error}") from error


def _copy(tensors: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    weights = dict(model.named_parameters())
    if tensors.keys() != weights.keys() or any(tensors[name].shape != weights[name].shape for name in weights):
        raise InputError(f"the published weights {path} are not those of the run's student")
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(tensors[name])


def _version(head: bytes, path: Path) -> tuple[bytes, Version, int]:
    if len(head) != HEADER.size or not head.startswith((MAGIC, ON_DEVICE)):
        raise InputError(f"{path} holds no published weights")
    magic, step, tag, checksum = HEADER.unpack(head)
    if step == WRITING:
        raise InputError(f"the published weights {path} are being written")
    return magic, Version(step, tag), checksum


def _open(path: Path) -> int:
    """Open a file of weights for reading.

    Raises:
        InputError: There is none, or it could be another user's.
    """
    try:
        descriptor = open_below(path.parent, path.name)
    except OSError as error:
        raise InputError(f"the published weights {path} cannot be opened: {error.strerror}") from error
    if access_of_others(os.fstat(descriptor)):
        os.close(descriptor)
        raise InputError(f"the published weights {path} are not a private file of this user: remove it")
    return descriptor


class DeviceWeights:
    """The trainer's copy of its weights.

    Args:
        weights: The student's, on a GPU.

    Raises:
        CudaError: There is no room for it, or its memory cannot be shared.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.device = next(iter(weights.values())).device
        self._layout = dict(_layout(weights))
        self._memory = DeviceMemory.allocate(max(end for _, end in self._layout.values()), self.device)
        self._tensors = _tensors_in(self._memory, weights, self._layout)

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the weights; done when this returns."""
        with torch.no_grad():
            # One launch for hundreds of tensors.
            torch._foreach_copy_(list(self._tensors.values()), [weights[name].detach() for name in self._tensors])
        torch.cuda.synchronize(self.device)

    def description(self) -> bytes:
        """Return the IPC handle, GPU and layout of the weights as JSON."""
        tensors = {name: [str(x.dtype), list(x.shape), self._layout[name][0]] for name, x in self._tensors.items()}
        memory = {"handle": self._memory.handle.hex(), "uuid": device_uuid(self.device).hex()}
        return json.dumps({**memory, "bytes": self._memory.nbytes, "tensors": tensors}).encode()


def why_not_on_device(weights: Mapping[str, Tensor]) -> str | None:
    """Return why weights cannot be shared by CUDA IPC; None if they can."""
    if next(iter(weights.values())).device.type != "cuda":
        return "the student's weights are not on one GPU"
    return None if bindings_installed() else 'the package cuda-bindings (extra "gpu") is not installed'


def read_device_weights(description: bytes, model: nn.Module) -> None:
    """Copy weights in another process's device memory into a model; done when this returns.

    Args:
        description: As the trainer wrote it.
        model: The student, as the trainer loads it.

    Raises:
        InputError: The weights are not this model's, or their memory cannot be opened.
    """
    weights = dict(model.named_parameters())
    try:
        named: dict[str, Any] = json.loads(description)
        # Ends are computed from this process's own shapes: a message only says where tensors begin.
        layout = {name: (start, _end(start, weights[name])) for name, (_, _, start) in named["tensors"].items()}
        same = all(
            [str(weights[name].dtype), list(weights[name].shape)] == [dtype, shape]
            for name, (dtype, shape, _) in named["tensors"].items()
        )
        handle, uuid, size = bytes.fromhex(named["handle"]), bytes.fromhex(named["uuid"]), int(named["bytes"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the published weights are not those of the run's student: {first_line(error)}") from error
    if not same or layout.keys() != weights.keys() or max(end for _, end in layout.values()) > size:
        raise InputError("the published weights are not those of the run's student")
    home = device_of(uuid) if torch.cuda.is_available() else None
    if home is None:
        raise InputError(
            "the published weights lie on a GPU that this process does not see: give trainer and rollout workers the "
            'same CUDA_VISIBLE_DEVICES, or set rollout.weights = "shared_memory"'
        )
    try:
        memory = DeviceMemory.open(handle, size, home)
    except (CudaError, SignalError) as error:  # their trainer has ended
        raise InputError(f"the published weights cannot be opened: {error}") from error
    with torch.no_grad():
        torch._foreach_copy_(list(weights.values()), list(_tensors_in(memory, weights, layout).values()))
    torch.cuda.synchronize(home)


def _layout(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each tensor's name with its first byte and the byte behind its last."""
    start = 0
    for name, weight in weights.items():
        end = _end(start, weight)
        yield name, (start, end)
        start = -(-end // ALIGNMENT) * ALIGNMENT


def _end(start: int, weight: Tensor) -> int:
    return int(start) + weight.numel() * weight.element_size()


def _tensors_in(
    memory: DeviceMemory, weights: Mapping[str, Tensor], layout: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    """Return tensors over the memory, in the order of the weights; they keep it alive."""
    flat = memory.tensor()
    return {name: flat[slice(*layout[name])].view(weight.dtype).view(weight.shape) for name, weight in weights.items()}
