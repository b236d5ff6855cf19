"""The process that sends weights to one server's workers by NCCL, as the trainer's end of vLLM 0.24.0 does.

A group that has lost a member leaves the others waiting in NCCL, which ends with their process alone: `NcclGroup`
starts this one and kills it. Its standard input is a socket, of which every line demands the file's tensors in order.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator

import torch
from safetensors import safe_open
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from xtoken_core.regular_files import proc_path
from xtoken_services.common.http_engine import nccl

PR_SET_PDEATHSIG = 1
KEY = "broadcast_from/0/0"
"""Of the first object that rank 0 of vLLM's `StatelessProcessGroup` has for the others."""
PICKLED = b"\x80\x04cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId.from_buffer_copy\nC\x80%b\x85R."
"""Call of a method of vLLM's class with the 128 bytes of an id, in the form that vLLM unpickles."""


def main(listener: int, file: int, address: str, port: int, size: int, gpu: str) -> None:
    """Send weights whenever they are demanded.

    Args:
        listener: Descriptor of a socket that listens at the address and port.
        address: Its address.
        port: Its port.
        file: Descriptor of a safetensors file.
        size: Ranks of the group; this is 0.
        gpu: Device that sends.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):  # a server would wait for the rest
        signal.signal(number, signal.SIG_IGN)
    torch.cuda.set_device(gpu)
    unique_id = nccl.unique_id()
    store = offer(listener, address, port, unique_id)
    os.write(0, b"\n")  # the server may begin; fails without the process that started this one
    group = nccl.Communicator(size, unique_id, 0)
    group.all_reduce(torch.zeros(1, device=gpu))  # vLLM begins with it
    del store
    for _ in sys.stdin:
        for _, tensor in tensors_of(file, gpu):
            group.broadcast(tensor)
        torch.cuda.synchronize()


def offer(listener: int, address: str, port: int, unique_id: bytes) -> TCPStore:
    """Return a store in which vLLM's workers find the id of a communicator.

    Args:
        listener: Descriptor of a socket that listens at the address and port.
        address: Its address.
        port: Its port.
        unique_id: The id, 128 bytes.
    """
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    store.set(KEY, PICKLED % unique_id)  # type: ignore[arg-type]  # takes bytes too
    return store


def tensors_of(file: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a safetensors file.

    Args:
        file: Its descriptor.
        device: Where the tensors are made.
    """
    with safe_open(proc_path(file), framework="pt", device=device) as opened:
        for name in opened.keys():  # noqa: SIM118
            yield name, opened.get_tensor(name)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
