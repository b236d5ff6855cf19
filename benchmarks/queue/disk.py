"""Write rate of the disk under a journal: batches written one after the other, flushed every 100 ms, as a journal is.

As many are written before as are timed, since a queue's journal has had as many when its second puts are timed.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from benchmarks.queue.workload import BATCH, BATCHES, batch, buffers_of

FSYNC_S = 0.1


def measure(directory: Path) -> dict[str, float]:
    """Measure samples and bytes per second of plain sequential writes of the workload."""
    buffers = buffers_of(batch())
    path = directory / "disk"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    stop = threading.Event()

    def flush() -> None:
        while not stop.wait(FSYNC_S):
            os.fdatasync(file)

    flusher = threading.Thread(target=flush)
    flusher.start()
    for _ in range(BATCHES):
        os.writev(file, buffers)
    start = time.perf_counter()
    written = 0
    for _ in range(BATCHES):
        written += os.writev(file, buffers)
    taken = time.perf_counter() - start
    stop.set()
    flusher.join()
    os.close(file)
    path.unlink()
    assert written == BATCHES * sum(buffer.nbytes for buffer in buffers)
    return {"put": BATCHES * BATCH / taken, "bytes_per_s": written / taken}
