"""Random commands of random workers, for Hypothesis: the oracle and every driven queue must answer alike."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.contract.driving import Driven, Waiter
from tests.contract.oracle import Answer, Oracle

LIMIT = 500
PARTITIONS: dict[str, Answer] = {
    "orders": {
        "tasks": [
            {"name": "strict", "requires": ["x"]},
            {"name": "arrival", "requires": ["x", "y"], "order": "arrival"},
        ],
        "volatile": [],
        "max_attempts": 2,
    },
    "signals": {
        "tasks": [
            {"name": "teach", "requires": ["x"], "order": "arrival"},
            {"name": "train", "requires": ["x", "v"], "order": "by_id"},
            {"name": "watch", "requires": ["v"]},
        ],
        "volatile": ["v", "o"],
        "max_attempts": 3,
    },
    "shelf": {"tasks": [], "volatile": ["v"], "max_attempts": 1},
}
WORKERS = ("w0", "w1", "w2")
TASKS = ("strict", "arrival", "teach", "train", "watch", "nobody")
FIELDS = ("x", "y", "v", "o")
CLAIMS = (("orders", "strict"), ("orders", "arrival"), ("signals", "teach"), ("signals", "watch"))

partitions = st.sampled_from([*["orders", "signals"] * 3, "shelf", "nowhere"])
workers = st.sampled_from(WORKERS)
ids = st.lists(st.integers(0, 7), min_size=1, max_size=4)
unique_ids = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
fields = st.lists(st.sampled_from(FIELDS), max_size=2, unique=True)
narrow = st.sampled_from([[], [], ["x"], ["y"], ["v", "x"]])
picks = st.integers(0, 5)
names = st.lists(st.sampled_from(FIELDS), unique=True)
usual = st.sampled_from([["x"], ["x"], ["x", "y"], ["y"], ["v"]])


def column(name: str, rows: int, salt: int) -> Any:
    """A column of a field: jagged, dense or of objects, as its name says."""
    if name == "x":
        return ("jagged", "int64", (), [bytes([salt]) * 8 * ((salt + row) % 4) for row in range(rows)])
    if name == "o":
        return ("object", "", (), [{"row": row, "salt": [salt, None, "é"]} for row in range(rows)])
    shape = (2,) if name == "y" else (3,)
    return ("dense", "uint8", shape, [bytes([salt, *([row] * (shape[0] - 1))]) for row in range(rows)])


class QueueMachine(RuleBasedStateMachine):
    """Three workers. Subclasses say which queues are driven."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(LIMIT)
        self.driven = self.queues()
        self.session = dict.fromkeys(WORKERS, "")
        self.incarnation = dict.fromkeys(WORKERS, 0)
        self.numbers = dict.fromkeys(WORKERS, 0)
        self.latest: dict[str, tuple[str, str, str, Answer]] = {}
        self.sent: list[tuple[str, tuple[str, str, str, Answer]]] = []
        self.leases: list[tuple[str, Answer]] = []
        self.waiting: tuple[str, str, str, Answer, list[Waiter]] | None = None

    def queues(self) -> Sequence[Driven]:
        """The queues."""
        raise NotImplementedError

    def ask(self, worker: str, kind: str, *, lose: bool = False, **f: Any) -> Answer:
        """One request of a worker to all queues."""
        self.numbers[worker] += 1
        request = f"{worker}{'' if self.numbers[worker] % 3 else 'b'}.{self.numbers[worker]}"
        return self._send(worker, (self.session[worker], request, kind, f), lose=lose)

    def _send(self, worker: str, request: tuple[str, str, str, Answer], *, lose: bool = False) -> Answer:
        self.latest[worker] = request
        if request[2] != "hello":
            self.sent.append((worker, request))
        partition = request[3].get("partition", "")
        if lose:
            self.oracle.handle(*request)
            self._settle_oracle_first()
        expected = self.oracle.handle(*request)
        for queue in self.driven:
            queue.agree(partition, expected, queue.ask(worker, *request, lose=lose))
        if expected.get("type") == "claimed" and expected["lease"]:
            self.leases.append((partition, {**expected, "task": request[3]["task"]}))
        if expected.get("type") == "welcome":
            self.session[worker] = expected["session"]
        self._settle()
        return expected

    def _settle_oracle_first(self) -> None:
        """Whoever waits may be answered between a request and its repetition."""
        if self.waiting is not None:
            *request, waiters = self.waiting
            expected = self.oracle.retry(*request)
            if expected != {"type": "empty"}:
                self.waiting = None
                self._due.append((request[3]["partition"], expected, waiters))

    _due: list[tuple[str, Answer, list[Waiter]]]

    def _settle(self) -> None:
        """Whoever waits is answered if the oracle says so, and only then."""
        self._settle_oracle_first()
        for partition, expected, waiters in self._due:
            for queue, waiter in zip(self.driven, waiters, strict=True):
                queue.agree(partition, expected, waiter.answer())
        self._due.clear()
        if self.waiting is not None:
            assert not any(waiter.answered for waiter in self.waiting[-1]), "answered what had to wait"

    # Sessions

    @initialize()
    def begin(self) -> None:
        self._due = []
        for worker in WORKERS:
            self.hello(worker, 0, 300.0, False)
        for partition in PARTITIONS:
            self.open(WORKERS[0], partition, partition, False)

    def hello(self, worker: str, newer: int, silence_s: float, lose: bool) -> None:
        self.incarnation[worker] = max(0, self.incarnation[worker] + newer)
        self.ask(
            worker, "hello", lose=lose, name=worker, role="worker", incarnation=self.incarnation[worker],
            silence_s=silence_s,
        )  # fmt: skip

    @rule(
        worker=workers, what=st.sampled_from(["hello", "crash", "crash", "reconnect", "bye", "heartbeat"]),
        newer=st.integers(-1, 1), silence_s=st.sampled_from([3.0, 30.0, 300.0]), lose=st.booleans(),
    )  # fmt: skip
    def session_event(self, worker: str, what: str, newer: int, silence_s: float, lose: bool) -> None:
        """After a crash the worker comes back as a newer incarnation, on a new connection."""
        if what in ("crash", "reconnect"):
            for queue in self.driven:
                queue.leave(worker)
        if what in ("hello", "crash"):
            self.hello(worker, 1 if what == "crash" else newer, silence_s, lose)
        elif what == "bye":
            self.ask(worker, "bye", lose=lose)
            self.hello(worker, newer, silence_s, lose)
        elif what == "heartbeat":
            self.ask(worker, "heartbeat", phase="run", progress=1)

    @rule(seconds=st.sampled_from([1.0, 4.0, 40.0]), back=st.booleans())
    def time_passes(self, seconds: float, back: bool) -> None:
        self.oracle.advance(seconds)
        for queue in self.driven:
            queue.advance(seconds)
        self._settle()
        for worker in WORKERS:
            if back and self.session[worker] not in self.oracle.sessions:
                self.hello(worker, 1, 30.0, False)

    @rule(worker=workers, lose=st.booleans())
    def repeat(self, worker: str, lose: bool) -> None:
        """The same request once more, as after a lost reply."""
        if worker in self.latest:
            self._send(worker, self.latest[worker], lose=lose)

    @rule(back=st.integers(1, 12))
    def late_copy(self, back: int) -> None:
        """A request that was sent before the latest ones comes once more, as from a connection that broke."""
        if back <= len(self.sent):
            worker, request = self.sent[-back]
            self._send(worker, request)

    # Partitions

    def open(self, worker: str, partition: str, like: str, lose: bool) -> None:
        self.ask(worker, "open", lose=lose, partition=partition, **PARTITIONS[like])

    @rule(
        worker=workers, what=st.sampled_from(["open", "seal", "clear", "clear", "clear everything"]),
        partition=partitions, like=st.sampled_from(list(PARTITIONS)), ids=ids, lose=st.booleans(),
    )  # fmt: skip
    def partition_event(self, worker: str, what: str, partition: str, like: str, ids: list[int], lose: bool) -> None:
        if what == "seal":
            self.ask(worker, "seal", lose=lose, partition=partition)
        elif what != "open":
            everything = what == "clear everything"
            self.ask(worker, "clear", lose=lose, partition=partition, ids=ids, everything=everything)
        elif partition in PARTITIONS:
            self.open(worker, partition, like, lose)

    # Samples

    @rule(
        worker=workers, partition=partitions, ids=ids, names=st.lists(st.sampled_from(FIELDS), min_size=1, unique=True),
        salt=st.integers(0, 9), off=st.sampled_from([0] * 9 + [1]), lose=st.booleans(),
    )  # fmt: skip
    def put(
        self, worker: str, partition: str, ids: list[int], names: list[str], salt: int, off: int, lose: bool
    ) -> None:
        columns = {name: column(name, len(ids) + off, salt) for name in names}
        if salt == 9:  # another kind than the field has
            columns["y"] = column("x", len(ids), 1)
        self.ask(worker, "put", lose=lose, partition=partition, ids=ids, columns=columns)

    @rule(worker=workers, partition=partitions, ids=unique_ids, salt=st.integers(0, 7), names=usual)
    def put_plain(self, worker: str, partition: str, ids: list[int], salt: int, names: list[str]) -> None:
        columns = {name: column(name, len(ids), salt) for name in names}
        self.ask(worker, "put", partition=partition, ids=ids, columns=columns)

    @rule(worker=workers, pick=picks, count=st.integers(1, 3), fields=narrow, lose=st.booleans())
    def claim(self, worker: str, pick: int, count: int, fields: list[str], lose: bool) -> None:
        partition, task = CLAIMS[pick % len(CLAIMS)]
        self.ask(worker, "claim", lose=lose, partition=partition, task=task, count=count, fields=fields)

    @rule(worker=workers, pick=picks, ids=unique_ids, lose=st.booleans())
    def claim_plain_ids(self, worker: str, pick: int, ids: list[int], lose: bool) -> None:
        partition, task = [*CLAIMS, ("signals", "train")][pick % 5]
        held = self.oracle.parts[partition].samples
        ids = [i for i in ids if i in held] or ids
        self.ask(worker, "claim", lose=lose, partition=partition, task=task, ids=ids)

    @rule(worker=workers, partition=partitions, task=st.sampled_from(TASKS), ids=ids, fields=fields, lose=st.booleans())
    def claim_ids(self, worker: str, partition: str, task: str, ids: list[int], fields: list[str], lose: bool) -> None:
        self.ask(worker, "claim", lose=lose, partition=partition, task=task, ids=ids, fields=fields)

    def _lease(self, pick: int) -> tuple[str, Answer] | None:
        return self.leases[-1 - pick % len(self.leases)] if self.leases else None

    def _holder(self, worker: str, pick: int, lease: Answer) -> str:
        """Mostly the worker whose lease it is."""
        partition = self.oracle.parts[self.leases[-1 - pick % len(self.leases)][0]]
        session = partition.leases.get(lease["lease"], {}).get("session")
        return next((w for w in WORKERS if self.session[w] == session), worker) if pick < 5 else worker

    @rule(worker=workers, pick=picks, keep=st.integers(0, 3), lose=st.booleans())
    def ack(self, worker: str, pick: int, keep: int, lose: bool) -> None:
        found = self._lease(pick)
        if found is not None:
            partition, lease = found
            worker = self._holder(worker, pick, lease)
            self.ask(worker, "ack", lose=lose, partition=partition, task=lease["task"], ids=lease["ids"][keep % 3 :])

    @rule(worker=workers, pick=picks, only=st.integers(0, 4), reason=st.sampled_from(["no", ""]), lose=st.booleans())
    def nack(self, worker: str, pick: int, only: int, reason: str, lose: bool) -> None:
        found = self._lease(pick)
        if found is not None:
            partition, lease = found
            worker = self._holder(worker, pick, lease)
            self.ask(worker, "nack", lose=lose, partition=partition, lease=lease["lease"], ids=lease["ids"][:only],
                     reason=reason)  # fmt: skip

    @rule(worker=workers, pick=picks, names=names, off=st.sampled_from([0, 0, 1]), lose=st.booleans())
    def complete(self, worker: str, pick: int, names: list[str], off: int, lose: bool) -> None:
        found = self._lease(pick)
        if found is not None:
            partition, lease = found
            worker = self._holder(worker, pick, lease)
            held = self.oracle.parts[partition].leases.get(lease["lease"], lease)["ids"]
            columns = {name: column(name, len(held) + off, 7) for name in names}
            self.ask(worker, "complete", lose=lose, partition=partition, lease=lease["lease"], columns=columns)

    # Looking

    @rule(
        worker=workers, kind=st.sampled_from(["get", "list", "list", "peek", "room"]), partition=partitions, ids=ids,
        fields=fields, task=st.sampled_from(TASKS), after=st.integers(-1, 6), limit=st.sampled_from([1, 2, 1024]),
        state=st.sampled_from(["waiting", "ready", "leased", "done", "dead", "skipped", "merry"]),
        nbytes=st.sampled_from([0, LIMIT // 2, LIMIT, LIMIT + 1]),
    )  # fmt: skip
    def look(
        self, worker: str, kind: str, partition: str, ids: list[int], fields: list[str], task: str, after: int,
        limit: int, state: str, nbytes: int,
    ) -> None:  # fmt: skip
        asked: dict[str, Answer] = {
            "get": {"ids": ids, "fields": fields},
            "list": {"task": task, "state": state, "after": after, "limit": limit},
            "peek": {"sample": ids[0]},
            "room": {"bytes": nbytes},
        }
        self.ask(worker, kind, partition=partition, **asked[kind])

    # Waiting

    def _wait(self, worker: str, kind: str, **f: Any) -> None:
        if self.waiting is not None or not self.session[worker]:
            return
        self.numbers[worker] += 1
        request = (self.session[worker], f"waits-{worker}.{self.numbers[worker]}", kind, {**f, "wait_s": 50.0})
        expected = self.oracle.handle(*request)
        waiters = [queue.wait(*request) for queue in self.driven]
        if expected == {"type": "empty"}:
            self.waiting = (*request, waiters)
        else:
            if expected.get("type") == "claimed" and expected["lease"]:
                self.leases.append((f["partition"], {**expected, "task": f["task"]}))
            self._due.append((f["partition"], expected, waiters))
        self._settle()

    @rule(
        worker=workers, kind=st.sampled_from(["claim", "claim ids", "get", "room"]), pick=picks, ids=unique_ids,
        fields=fields, nbytes=st.sampled_from([LIMIT // 2, LIMIT]),
    )  # fmt: skip
    def wait(self, worker: str, kind: str, pick: int, ids: list[int], fields: list[str], nbytes: int) -> None:
        partition, task = CLAIMS[pick % len(CLAIMS)]
        if kind == "claim":
            self._wait(worker, "claim", partition=partition, task=task, count=len(ids))
        elif kind == "claim ids":
            self._wait(worker, "claim", partition="signals", task="train", ids=ids[:2])
        elif kind == "get":
            self._wait(worker, "get", partition=partition, ids=ids[:2], fields=fields)
        else:
            self._wait(worker, "room", partition="shelf", bytes=nbytes)

    # At the end of each step

    @invariant()
    def statistics_agree(self) -> None:
        expected = self.oracle.stats()
        for queue in self.driven:
            assert queue.stats() == expected

    def teardown(self) -> None:
        if self.waiting is not None:
            session = self.waiting[0]
            worker = next((w for w in WORKERS if self.session[w] == session), WORKERS[0])
            self.session[worker] = session
            self.ask(worker, "bye")
