"""A worker under test: it speaks the real protocol to a real queue, trains nothing, and misbehaves as told.

    worker_script.py KIND --queue ADDR --name NAME --incarnation N [--rank R] [--do DEED] [--state DIR]

Every position becomes a tombstone, so a run of any length needs no models; with --rows it becomes a row, of which the
teacher leases a step's and nobody trains any. The trainer keeps its cursor in a file of
its own, as a checkpoint would. Each DEED leaves a mark in DIR, and is done once, or every time where it says so.
"""

import argparse
import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

from xtoken_core.compat.task_client import TaskClient
from xtoken_core.data_plane.address import Address
from xtoken_core.data_plane.queue_client import AlreadyDone
from xtoken_core.data_plane.run_client import RunClient
from xtoken_core.data_plane.zmq_transport import ZmqTransport
from xtoken_core.errors import XtokenError
from xtoken_core.schema import INPUT_IDS
from xtoken_core.wire import Column, QueueError
from xtoken_core.wire.messages import Block

SPEED_S = 0.03
STATUS_FILE = "XTOKEN_STATUS_FILE"


class Script:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.state: Path = options.state
        self.client = TaskClient(ZmqTransport(Address.parse(options.queue, options.token_file), patience_s=3))
        self.run = RunClient(self.client)

    def main(self) -> None:
        options = self.options
        (self.state / f"{options.name}.{options.incarnation}.env").write_text(
            "\n".join(f"{k}={v}" for k, v in os.environ.items())
        )
        self.deed("start")
        self.client.hello(
            options.name, options.kind, incarnation=options.incarnation, rank=options.rank, silence_s=3,
            needs_run=True, wait_s=20,
        )  # fmt: skip
        (self.state / f"{options.name}.{options.incarnation}.ready").touch()
        self.run = RunClient(self.client)
        try:
            {"collator": self.collate, "teacher": self.wait_for_end, "trainer": self.train}[options.kind]()
        except QueueError as error:
            if error.code != "exhausted":
                raise
        self.client.bye()

    def collate(self) -> None:
        while True:
            block = self.run.lease_block(wait_s=0.5)
            if block is None:
                continue
            self.deed("work")
            try:
                self.put(block)
            except QueueError as error:
                if error.code != "lease_revoked":  # the trainer has rewound the run meanwhile
                    raise

    def put(self, block: Block) -> None:
        if self.options.rows:
            self.put_rows(block)
            return
        reasons = dict.fromkeys(range(block.first, block.first + block.count), "empty")
        self.run.put_block(block.lease, [], {}, reasons)

    def wait_for_end(self) -> None:
        if self.options.rows:
            self.lease_a_step()
        while True:
            self.deed("work")
            if self.partition()["run"]["ended"]:
                return
            time.sleep(SPEED_S)

    def put_rows(self, block: Block) -> None:
        """Rows of one number each, which a teacher can lease."""
        ids = range(block.first, block.first + block.count)
        numbers = memoryview(struct.pack(f"{len(ids)}q", *ids))
        offsets = memoryview(struct.pack(f"{len(ids) + 1}q", *range(len(ids) + 1))).cast("B").cast("q")
        column = Column("jagged", "int64", len(ids), (), numbers, offsets)
        self.run.put_block(block.lease, ids, {INPUT_IDS.name: column}, {})

    def lease_a_step(self) -> None:
        """Lease the first step's samples as a teacher, and do what is told while holding them."""
        trainer = self.run.await_trainer(0, wait_s=20)
        ring = self.run.announce_ring(0, 0, trainer.trainer, b"ring")
        assert self.run.await_opened(ring, wait_s=20)
        rows = self.run.window(0, [], rewinds=trainer.rewinds, wait_s=20)
        self.run.claim_slot(ring, rows.ids, [], rewinds=trainer.rewinds, wait_s=20)
        self.deed("hold")

    def open_rings(self) -> None:
        """Open, as a trainer, every ring that is offered."""
        opened = -1
        while True:
            ring = self.run.await_ring(0, wait_s=0.5)
            if ring is not None and ring.ring != opened:
                opened = ring.ring
                self.run.confirm_ring(0, opened)
            time.sleep(SPEED_S)

    def partition(self) -> dict:
        return self.client.stats()["partitions"][self.client.partition]

    def train(self) -> None:
        cursor = self.state / "cursor"
        step = int(cursor.read_text()) if cursor.exists() else 0
        rewinds = self.run.rewind(step, {}, {}) if self.options.rank == 0 else 0
        done = self.state / "steps"
        if self.options.rank == 0 and done.exists():  # one killed before its cursor moved has written a line too many
            done.write_text("".join(done.read_text().splitlines(keepends=True)[:step]))
        if self.options.rows:
            self.open_rings()
        while self.options.rank == 0:
            rows = self.run.window(step, [], rewinds=rewinds, wait_s=0.5)
            if rows is None:
                continue
            self.deed("work")
            self.deed(f"step{step}")
            with contextlib.suppress(AlreadyDone):
                self.run.ack_window(step, rewinds=rewinds)
            step += 1
            with done.open("a") as file:
                file.write(f"{step - 1}\n")
            scratch = cursor.with_suffix(f".{os.getpid()}")  # another rank may read it at any moment
            scratch.write_text(str(step))
            scratch.replace(cursor)
            time.sleep(SPEED_S)
        self.wait_for_end()

    def deed(self, when: str) -> None:
        """Do what `--do WHEN:DEED` says."""
        for told in self.options.do:
            moment, _, deed = told.partition(":")
            if moment != when:
                continue
            mark = self.state / f"{self.options.name}.{deed.replace(' ', '_').replace('/', '_')}"
            if deed.startswith("always "):
                deed = deed.removeprefix("always ")
            elif mark.exists():
                continue
            mark.write_text(str(os.getpid()))
            verb, _, argument = deed.partition(" ")
            {
                "exit": self.leave, "kill": self.kill_self, "freeze": self.freeze, "deaf": self.be_deaf,
                "child": self.have_child, "linger": self.linger, "give_up": self.run.give_up, "await": self.await_file,
                "stumble": self.stumble,
            }[verb](argument)  # fmt: skip

    def await_file(self, name: str) -> None:
        while not (self.state / name).exists():
            self.partition()
            time.sleep(SPEED_S)

    def leave(self, status: str) -> None:
        sys.stderr.write("error: told to leave\n")
        sys.stderr.flush()
        os._exit(int(status))

    def kill_self(self, _: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self, _: str) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def be_deaf(self, _: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def linger(self, seconds: str) -> None:
        """Take so long to leave when asked to, and note when that was."""

        def note(what: str) -> None:
            (self.state / f"{self.options.name}.{what}").write_text(str(time.monotonic()))

        def leave(_number: int, _frame: object) -> None:
            note("asked")
            time.sleep(float(seconds))
            note("left")
            os._exit(0)

        signal.signal(signal.SIGTERM, leave)

    def stumble(self, status: str) -> None:
        """Fail with this status when asked to leave."""
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.leave(status))

    def have_child(self, kind: str) -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=kind == "own"
        )
        (self.state / f"{self.options.name}.child.{kind}").write_text(str(child.pid))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--queue", required=True)
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--do", action="append", default=[])
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--state", type=Path, required=True)
    status = 0
    try:
        Script(parser.parse_args()).main()
    except XtokenError as error:
        sys.stderr.write(f"error: {error}\n")
        status = error.exit_code
    if STATUS_FILE in os.environ:
        Path(os.environ[STATUS_FILE]).write_text(str(status))
    os._exit(status)


if __name__ == "__main__":
    main()
