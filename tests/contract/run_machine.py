"""Random commands of a run's workers, for Hypothesis: two collators, a rollout worker, a teacher and a trainer."""

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.contract.driving import Driven
from tests.contract.oracle import Answer, Oracle
from tests.contract.oracle_run import RunPart

LIMIT = 1 << 16
RUN = {
    "positions": 18, "samples_per_step": 4, "block_size": 2, "span": 12, "teachers": 1, "ranks": 1, "slots": 2,
    "max_dead": 6, "prompts": 2, "last_prompts": 4, "after": 1, "max_staleness": 1, "document": b"{}",
}  # fmt: skip
"""Four steps and a half: text, then two steps of half prompts, then prompts alone."""
ROLES = {"c0": "collator", "c1": "collator", "r0": "rollout", "teacher": "teacher", "trainer": "trainer"}
workers = st.sampled_from(list(ROLES))
collators = st.sampled_from(["c0", "c1", "r0"])
lose = st.sampled_from([False, False, True])
rare = st.sampled_from([0] * 9 + [1])
batches = st.integers(0, 2)


class RunMachine(RuleBasedStateMachine):
    """Workers of one run. Subclasses say which queues are driven."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Oracle(LIMIT)
        self.driven = self.queues()
        self.session = dict.fromkeys(ROLES, "")
        self.incarnation = dict.fromkeys(ROLES, 0)
        self.number = 0
        self.latest: dict[str, tuple[str, str, str, Answer]] = {}
        self.leases: dict[str, list[Answer]] = {name: [] for name in ROLES}
        self.slots: list[Answer] = []

    def queues(self) -> Sequence[Driven]:
        """The queues."""
        raise NotImplementedError

    @property
    def part(self) -> RunPart:
        """The oracle's."""
        found = self.oracle.parts["run"]
        assert isinstance(found, RunPart)
        return found

    def ask(self, worker: str, kind: str, *, lose: bool = False, **f: Any) -> Answer:
        """One request of a worker to all queues."""
        self.number += 1
        request = (self.session[worker], f"{worker}.{self.number}", kind, f)
        return self._send(worker, request, lose=lose)

    def _send(self, worker: str, request: tuple[str, str, str, Answer], *, lose: bool = False) -> Answer:
        self.latest[worker] = request
        if lose:
            self.oracle.handle(*request)
        expected = self.oracle.handle(*request)
        for queue in self.driven:
            queue.agree("run", expected, queue.ask(worker, *request, lose=lose))
        if expected.get("type") in ("claimed", "block") and expected["lease"]:
            self.leases[worker].append(expected)
        if expected.get("type") == "welcome":
            self.session[worker] = expected["session"]
        return expected

    def in_run(self, worker: str, kind: str, *, lose: bool = False, **f: Any) -> Answer:
        """The same, about the run."""
        return self.ask(worker, kind, lose=lose, partition="run", **f)

    # Sessions

    @initialize()
    def begin(self) -> None:
        for worker in ROLES:
            self.hello(worker, False)
        self.in_run("c0", "open", tasks=[], volatile=[], max_attempts=2, run=RUN)
        self.in_run("trainer", "rewind", step=0, skipped={}, dead={})
        self.share_a_ring(False)

    def hello(self, worker: str, lose: bool) -> None:
        self.incarnation[worker] += 1
        self.ask(worker, "hello", lose=lose, name=worker, role=ROLES[worker], incarnation=self.incarnation[worker])

    @rule(worker=st.sampled_from([*ROLES, "c0", "c1"]), what=st.sampled_from(["crash", "bye", "reconnect"]), lose=lose)
    def session_event(self, worker: str, what: str, lose: bool) -> None:
        if what == "bye":
            self.ask(worker, "bye", lose=lose)
        else:
            for queue in self.driven:
                queue.leave(worker)
        if what != "reconnect":
            self.hello(worker, lose)

    @rule(worker=workers, lose=lose)
    def repeat(self, worker: str, lose: bool) -> None:
        self._send(worker, self.latest[worker], lose=lose)

    # Collators

    @rule(worker=collators, lose=lose)
    def lease_block(self, worker: str, lose: bool) -> None:
        self.in_run(worker, "lease_block", lose=lose)

    @rule(worker=collators, back=rare, skip=st.sampled_from([0, 0, 0, 1, 2]), foreign=rare, lose=lose)
    def put_block(self, worker: str, back: int, skip: int, foreign: int, lose: bool) -> None:
        if not self.leases[worker]:
            self.lease_block(worker, lose)
        blocks = [b for b in self.leases[worker] if b["lease"] in self.part.blocks] or self.leases[worker]
        for block in blocks[-1 - back :][:1]:
            ids = [p + foreign for p in range(block["first"], block["first"] + block["count"])]
            rows = [bytes([p]) * 8 * (1 + p % 3) for p in ids[skip:]]
            columns = {"input_ids": ("jagged", "int64", (), rows)}
            tombstones = dict.fromkeys(ids[:skip], "too long")
            self.in_run(worker, "put", lose=lose, ids=ids[skip:], columns=columns, lease=block["lease"],
                        tombstones=tombstones)  # fmt: skip

    # Everybody

    @rule(worker=workers, back=rare, only=st.integers(0, 2), lose=lose)
    def nack(self, worker: str, back: int, only: int, lose: bool) -> None:
        for lease in self.leases[worker][-1 - back :][:1]:
            ids = lease.get("ids", [])[:only]
            self.in_run(worker, "nack", lose=lose, lease=lease["lease"], ids=ids, reason="no")

    @rule(worker=workers, ahead=st.integers(-1, 1), stale=rare)
    def window(self, worker: str, ahead: int, stale: int) -> None:
        step, rewinds = max(0, self.part.cursor + ahead), max(0, self.part.rewinds - stale)
        self.in_run(worker, "window", step=step, rewinds=rewinds, fields=["input_ids"])

    def batch(self, pick: int) -> list[int]:
        """A micro-batch of the plan: two neighbours, without what has no row."""
        first = self.part.cursor * RUN["samples_per_step"] + 2 * pick  # type: ignore[operator]
        held = [p for p in (first, first + 1) if p in self.part.rows]
        return held or [first, first + 1]

    # Teacher and trainer

    @rule(lose=lose)
    def share_a_ring(self, lose: bool) -> None:
        found = self.in_run("teacher", "await_trainer", rank=0)
        trainer = found.get("trainer", self.session["trainer"])
        ring = self.in_run("teacher", "announce_ring", lose=lose, teacher=0, rank=0, trainer=trainer, handle=b"h")
        self.in_run("trainer", "opened_ring", lose=lose, teacher=0, ring=ring.get("ring", self.part.rings))

    @rule(pick=batches, stale=rare, lose=lose)
    def teach(self, pick: int, stale: int, lose: bool) -> None:
        self.in_run("teacher", "claim_slot", lose=lose, ring=self.part.rings, rewinds=max(0, self.part.rewinds - stale),
                    ids=self.batch(pick), fields=["input_ids"])  # fmt: skip

    @rule(back=rare, lose=lose)
    def publish(self, back: int, lose: bool) -> None:
        for lease in self.leases["teacher"][-1 - back :][:1]:
            self.in_run("teacher", "complete", lose=lose, lease=lease["lease"], columns={})

    @rule(pick=batches, fields=st.sampled_from([[], ["input_ids"]]), stale=rare, lose=lose)
    def train(self, pick: int, fields: list[str], stale: int, lose: bool) -> None:
        claimed = self.in_run("trainer", "claim_batch", lose=lose, rewinds=max(0, self.part.rewinds - stale),
                              ids=self.batch(pick), fields=fields)  # fmt: skip
        self.slots += claimed.get("slots", [])

    @rule(back=rare, lose=lose)
    def release(self, back: int, lose: bool) -> None:
        for slot in self.slots[-1 - back :][:1]:
            filling = {name: slot[name] for name in ("ring", "slot", "generation")}
            self.in_run("trainer", "release", lose=lose, **filling)

    @rule(ahead=rare, stale=rare, lose=lose)
    def publish_weights(self, ahead: int, stale: int, lose: bool) -> None:
        step, rewinds = self.part.cursor + ahead, max(0, self.part.rewinds - stale)
        self.in_run("trainer", "publish", lose=lose, step=step, rewinds=rewinds, tag=self.number)

    @rule(pick=batches, release=st.booleans(), lose=lose)
    def work_through(self, pick: int, release: bool, lose: bool) -> None:
        """A micro-batch all the way, or to where its slot is read."""
        self.teach(pick, 0, lose)
        self.publish(0, lose)
        self.train(pick, ["input_ids"], 0, lose)
        if release:
            self.release(0, lose)

    @rule(worker=st.sampled_from(["trainer", "trainer", "trainer", "teacher"]), ahead=rare, told=rare, lose=lose)
    def end_step(self, worker: str, ahead: int, told: int, lose: bool) -> None:
        step, part = self.part.cursor + ahead, self.part
        dead = [] if told else [p for p in part.window(step) if p in part.dead]
        self.in_run(worker, "check_step", step=step, rewinds=part.rewinds, dead=dead)
        if all(p in {*part.rows, *part.skipped, *part.dead} for p in part.window(step)):
            self.in_run(worker, "ack_window", lose=lose, step=step, rewinds=part.rewinds)

    @rule(back=st.sampled_from([0, 0, 1, 2]), told=st.booleans(), fresh=st.booleans(), lose=lose)
    def rewind(self, back: int, told: bool, fresh: bool, lose: bool) -> None:
        if fresh:
            self.hello("trainer", lose)
        step, part = max(0, self.part.cursor - back), self.part
        first = part.window(step).start
        known = [{p: r for p, r in found.items() if p < first and told} for found in (part.skipped, part.dead)]
        self.in_run("trainer", "rewind", lose=lose, step=step, skipped=known[0], dead=known[1])
        self.share_a_ring(False)

    @rule(worker=workers, kind=st.sampled_from(["seal", "await_trainer"]))
    def others(self, worker: str, kind: str) -> None:
        if kind == "await_trainer":
            self.in_run(worker, kind, rank=0)

    @invariant()
    def statistics_agree(self) -> None:
        expected = self.oracle.stats()
        for queue in self.driven:
            found = queue.stats()
            for document in (found, expected):
                for part in document["partitions"].values():
                    part["oldest_lease_s"] = 0.0
            assert found == expected, f"{found} where {expected} was due"
