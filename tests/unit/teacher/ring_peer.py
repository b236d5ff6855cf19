"""The other process of a ring: takes JSON commands by a pipe, and answers each."""

import atexit
import json
import re
from pathlib import Path

import torch

from xtoken_core.errors import XtokenError
from xtoken_core.transports import RingHandle, RingShape
from xtoken_core.transports.compat import rebuild_teacher_full_logits_from_ipc
from xtoken_core.transports.shared_memory import SharedMemoryRing, SharedMemoryRingReader
from xtoken_core.transports.signal import RINGS

made = {}


def mappings(name):
    """Address ranges at which this process has mapped a file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            found.append([int(end, 16) for end in re.match(r"([0-9a-f]+)-([0-9a-f]+)", line).groups()])
    return found


def open_(handle, shape, directory, ring=1):
    opened = SharedMemoryRingReader(
        RingHandle.from_bytes(bytes.fromhex(handle)), RingShape(**shape), directory=Path(directory)
    )
    RINGS.add(ring, opened)


def read(refs, width):
    data = {"teacher_full_logits_ipc": refs, "teacher_input_ids": torch.zeros(len(refs), width)}
    view = rebuild_teacher_full_logits_from_ipc(data)
    return {
        "values": view.to(torch.float64).tolist(),
        "dtype": str(view.dtype),
        "stride": view.stride(),
        "address": view.data_ptr(),
    }


def scribble(refs, width):
    data = {"teacher_full_logits_ipc": refs, "teacher_input_ids": torch.zeros(len(refs), width)}
    rebuild_teacher_full_logits_from_ipc(data).zero_()


def create(shape, directory):
    made["ring"] = SharedMemoryRing.create(RingShape(**shape), run="test", session="s1", directory=Path(directory))
    return {"handle": made["ring"].handle.to_bytes().hex()}


def fill(slot, generation, rows, width, value):
    made["ring"].slot_view(slot, rows, width).fill_(value)
    made["ring"].write_generation(slot, generation)


COMMANDS = {
    "open": open_,
    "read": read,
    "scribble": scribble,
    "create": create,
    "fill": fill,
    "check": lambda slot, generation, ring=1: RINGS.get(ring).check(slot, generation),
    "mappings": mappings,
    "forget": lambda ring=1: RINGS.close(ring),
}


def serve(pipe):
    """Answer until the other end is closed, then end as an interpreter does."""
    while True:
        try:
            command = json.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            answer = {"ok": COMMANDS[command.pop("do")](**command)}
        except XtokenError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        pipe.send_bytes(json.dumps(answer).encode())
    atexit._run_exitfuncs()  # a forked process leaves by `os._exit`
