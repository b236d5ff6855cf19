"""A process at one end of a ring on the GPU. `teacher` writes, `student` reads; two pipes are all that they share.

Full slots are announced on one pipe, released ones on the other, each once the device's own event says so; the kernels
of both ends are slow and run on side streams. Started as `gpu_peer.py ROLE IN OUT JSON`.
"""

import json
import os
import sys
import threading

import torch

from xtoken_core.transports import RingHandle, RingShape
from xtoken_core.transports.compat import rebuild_teacher_full_logits_from_ipc
from xtoken_core.transports.cuda_ipc import CudaIpcRing, CudaIpcRingReader
from xtoken_core.transports.signal import RINGS
from xtoken_services.common.processes.event_callbacks import EventCallbacks

DEVICE = torch.device("cuda", 0)
ROWS = 2


class Pipe:
    """Lines of JSON."""

    def __init__(self, fd_in, fd_out):
        self.lines, self.out = os.fdopen(fd_in), os.fdopen(fd_out, "w")
        self.lock = threading.Lock()

    def put(self, message):
        with self.lock:
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()

    def get(self):
        line = self.lines.readline()
        if not line:
            raise SystemExit("the other end is gone")
        return json.loads(line)


def pattern(generation, shape, width):
    """Values that no other generation has, whatever the GPU."""
    values = torch.arange(ROWS * width * shape.head_width, device=DEVICE, dtype=torch.int64)
    return ((values * 7 + generation * 13) % 256).to(getattr(torch, shape.dtype)).view(ROWS, width, -1)


def teach(pipe, shape, refills, wait, sleep, endless=False):
    width = shape.slot_tokens // ROWS
    ring = CudaIpcRing.create(shape, DEVICE, run="gpu-test", session="s")
    done = EventCallbacks(DEVICE, "completions", limit_s=60.0)
    stream = torch.cuda.Stream()
    pipe.put({"handle": ring.handle.to_bytes().hex()})
    assert pipe.get() == "opened"
    ring.unlink()
    free = list(range(shape.slots))
    generation = 0
    while endless or generation < refills:
        slot = free.pop(0) if free else pipe.get()["free"]
        generation += 1
        values = pattern(generation, shape, width)
        view = ring.slot_view(slot, ROWS, width)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(sleep)
            view[:1].copy_(values[:1])
            torch.cuda._sleep(sleep)
            view[1:].copy_(values[1:])
            values.record_stream(stream)

            def mark_full(slot=slot, generation=generation):
                ring.write_generation(slot, generation)
                pipe.put({"full": slot, "generation": generation})

            if wait:
                done.after(mark_full)
            else:
                mark_full()
    done.drain()
    done.close()
    pipe.put("end")
    while pipe.get() != "closed":
        continue
    ring.close()


def study(pipe, shape, refills, wait, sleep, endless=False):
    width = shape.slot_tokens // ROWS
    handle = RingHandle.from_bytes(bytes.fromhex(pipe.get()["handle"]))
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    RINGS.add(1, CudaIpcRingReader(handle, shape, device=DEVICE))
    open_bytes = torch.cuda.memory_allocated() - before
    done = EventCallbacks(DEVICE, "releaser", limit_s=60.0)
    stream = torch.cuda.Stream()
    pipe.put("opened")
    wrong = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    mask = torch.zeros(ROWS, width, dtype=torch.int64)
    view_bytes, stale, seen = 0, 0, 0
    while (message := pipe.get()) != "end":
        slot, generation = message["full"], message["generation"]
        refs = [{"ring": 1, "slot": slot, "row": row, "generation": generation} for row in range(ROWS)]
        data = {"teacher_full_logits_ipc": refs, "teacher_input_ids": mask}
        allocated = torch.cuda.memory_allocated()
        view = rebuild_teacher_full_logits_from_ipc(data)
        view_bytes += torch.cuda.memory_allocated() - allocated
        expected = pattern(generation, shape, width)[..., : shape.vocab]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            wrong[0] += (view != expected).any()
            torch.cuda._sleep(sleep)
            wrong[1] += (view != expected).any()
            expected.record_stream(stream)

            def release(slot=slot, generation=generation):
                nonlocal stale
                try:
                    RINGS.get(1).check(slot, generation)
                except Exception:
                    stale += 1
                pipe.put({"free": slot})

            if wait:
                done.after(release)
            else:
                release()
        seen += 1
    done.drain()
    done.close()
    report = {
        "seen": seen, "wrong_before": int(wrong[0]), "wrong_after": int(wrong[1]), "stale": stale,
        "view_bytes": view_bytes, "open_bytes": open_bytes,
    }  # fmt: skip
    del view
    RINGS.close(1)
    pipe.put("closed")
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    role, fd_in, fd_out, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    options["shape"] = RingShape(**options["shape"])
    {"teacher": teach, "student": study}[role](Pipe(fd_in, fd_out), **options)
