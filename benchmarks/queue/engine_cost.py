"""Processor time of the queue's engine per request, without sockets: a process that measures a block per input line.

Run by path with a source tree as working directory, it measures the engine of that tree, so that two commits can be
measured in turn (see `benchmarks.queue.compare`). A line names the workload, the answer is one line of JSON with
microseconds per request: decoding, handling, and encoding the reply.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))
m = importlib.import_module("xtoken_core.wire.messages")
wire = importlib.import_module("xtoken_core.wire")
workload = importlib.import_module("benchmarks.queue.workload")
latency = importlib.import_module("benchmarks.queue.latency")
OLDER = Path("xtoken_core/protocol/engine.py")
engine = importlib.import_module("xtoken_core.protocol.engine" if OLDER.exists() else "xtoken_core.queue.engine")

REQUESTS = {"batch": 25, "sample": 100, "small": 100}
COLUMNS = {"batch": workload.batch, "sample": lambda: workload.batch(1), "small": latency.small_sample}
CALLS = ("put", "get", "claim", "ack")
MEMORY_LIMIT = 1 << 33


class Load:
    """An engine and the requests of one workload.

    Args:
        name: A key of `REQUESTS`.
    """

    def __init__(self, name: str) -> None:
        columns = COLUMNS[name]()
        heads, buffers = wire.pack_columns(columns)
        self.requests, self.heads, self.fields = REQUESTS[name], heads, list(columns)
        self.buffers = [bytes(buffer) for buffer in buffers]
        self.rows = workload.BATCH if name == "batch" else 1
        self.engine = engine.Engine(memory_limit=MEMORY_LIMIT, clock=time.monotonic)
        hello = m.Hello(id="h", versions=[1], name="n", role="bench", incarnation=1)
        session = self.engine.handle(hello, ()).reply.session
        self.at = {"session": session, "partition": "p"}
        tasks = [m.TaskDef(name="a", requires=["input_ids"])]
        self.engine.handle(m.OpenPartition(id="o", **self.at, tasks=tasks), ())
        self.number = 0

    def block(self) -> dict[str, float]:
        """Return microseconds per request of each call, over one block."""
        taken = dict.fromkeys(CALLS, 0.0)
        for _ in range(self.requests):
            for call, header in self._headers().items():
                start = time.thread_time()
                response = self.engine.handle(m.decode_request(header), self.buffers if call == "put" else ())
                response.frames()
                m.encode(response.reply)
                taken[call] += time.thread_time() - start
        return {call: 1e6 * seconds / self.requests for call, seconds in taken.items()}

    def _headers(self) -> dict[str, bytes]:
        ids = list(range(self.number * self.rows, (self.number + 1) * self.rows))
        self.number += 1
        put = m.Put(id=f"a.{self.number}1", **self.at, ids=ids, columns=self.heads)
        get = m.Get(id=f"a.{self.number}2", **self.at, ids=ids, fields=self.fields)
        claim = m.Claim(id=f"a.{self.number}3", **self.at, task="a", count=self.rows, fields=["input_ids"])
        ack = m.Ack(id=f"a.{self.number}4", **self.at, task="a", ids=ids)
        return {name: m.encode(request) for name, request in zip(CALLS, (put, get, claim, ack), strict=True)}


def main() -> None:
    """Measure a block for each line of standard input."""
    assert str(m.__file__).startswith(str(Path.cwd()))
    loads = {name: Load(name) for name in REQUESTS}
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in sys.stdin:
        answer: dict[str, Any] = loads[line.strip()].block()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
