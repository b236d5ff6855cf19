"""The oracle's partition of a run with one teacher and one rank, as proto/README.md section 8 tells of it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tests.contract.oracle_partition import STATES, Answer, Refused, Waits, size

if TYPE_CHECKING:
    from tests.contract.oracle import Oracle

TEACH, TRAIN = "teacher_0", "train"
SLOT_STATES = ("free", "filling", "full", "reading")


class RunPart:
    """A run. A row is a dict: its `value`, how far `teach` is, whether `signal` is there, whether `train` has it."""

    def __init__(self, oracle: Oracle, f: Answer) -> None:
        self.oracle, self.definition = oracle, (f["tasks"], f["volatile"], f["max_attempts"])
        self.run, self.max_attempts = f["run"], f["max_attempts"]
        self.rows: dict[int, dict[str, Any]] = {}
        self.skipped: dict[int, str] = {}
        self.dead: dict[int, str] = {}
        self.done: set[int] = set()
        self.filled: set[int] = set()
        self.blocks: dict[int, tuple[str, int]] = {}
        self.refusals: dict[int, int] = {}
        self.leases: dict[int, dict[str, Any]] = {}
        self.readings: dict[int, dict[str, Any]] = {}
        self.ring: dict[str, Any] | None = None
        self.cursor = self.rewinds = self.rings = self.rows_put = self.given_back = 0
        self.trainers, self.failed = -1, False
        self.published: tuple[int, int] | None = None
        self._numbers = itertools.count(1)

    def window(self, step: int) -> range:
        """The positions of a step."""
        first = step * self.run["samples_per_step"]
        return range(first, min(first + self.run["samples_per_step"], self.run["positions"]))

    def block(self, number: int) -> range:
        """The positions of a block."""
        first = number * self.run["block_size"]
        return range(first, min(first + self.run["block_size"], self.run["positions"]))

    def is_prompt(self, position: int) -> bool:
        """Whether a rollout worker completes it."""
        run = self.run
        (step, index), block = divmod(position, run["samples_per_step"]), run["block_size"]
        if step < run["after"]:
            return False
        first, last = run["prompts"] // block, run["last_prompts"] // block
        steps = max((run["positions"] - 1) // run["samples_per_step"] - run["after"], 1)
        blocks = first + (2 * (last - first) * (step - run["after"]) + steps) // (2 * steps)
        return bool(index >= run["samples_per_step"] - blocks * block)

    @property
    def ended(self) -> bool:
        """Whether every window is done."""
        return not self.window(self.cursor)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers of which some row is held."""
        held = {id(row["buffer"]): row["buffer"]["bytes"] for row in self.rows.values()}
        return sum(held.values())

    def check(self, session: str, role: str = "", rewinds: int | None = None) -> None:
        """The run must go on, be at this count of rewinds, and the session have the role."""
        if self.failed:
            raise Refused("run_failed")
        if rewinds is not None and rewinds != self.rewinds:
            raise Refused("rewound")
        if role and self.oracle.sessions[session]["role"] != role:
            raise Refused("forbidden")

    def held(self, session: str, number: int) -> dict[str, Any]:
        """A lease of this session."""
        if self.leases.get(number, {}).get("session") != session:
            raise Refused("lease_revoked")
        return self.leases[number]

    def columns(self, ids: list[int], fields: list[str]) -> Answer:
        """The rows."""
        if fields and any(p not in self.rows for p in ids):
            raise Refused("unknown_sample")
        return {name: ("jagged", "int64", (), [self.rows[p]["value"] for p in ids]) for name in fields if ids}

    def give_back(self, number: int) -> None:
        """A lease ends."""
        lease = self.leases.pop(number, {"ids": []})
        self.given_back += len(lease["ids"])
        for position in set(lease["ids"]) - set(self.dead):
            self.rows[position].update({"teach": "ready"} if lease["task"] == TEACH else {"train": False})

    def let_go(self, positions: set[int]) -> None:
        """Rows go, and what was leased or read of them."""
        for position in positions:
            self.rows.pop(position, None)
        self.readings = {n: reading for n, reading in self.readings.items() if not positions & set(reading["ids"])}
        for number, lease in list(self.leases.items()):
            lease["ids"] = [p for p in lease["ids"] if p not in positions]
            if not lease["ids"]:
                del self.leases[number]

    def bury(self, positions: list[int], reason: str) -> None:
        """Positions die."""
        self.dead.update(dict.fromkeys(positions, reason))
        self.done.update(positions)
        for slot in self.ring["slots"] if self.ring else []:
            self.free_if_dead(slot)
        self.failed = self.failed or len(self.dead) > self.run["max_dead"]

    def free_if_dead(self, slot: dict[str, Any]) -> None:
        """Nobody will ask for a full slot of the dead."""
        if slot["state"] == "full" and set(slot["ids"]) <= set(self.dead):
            slot.update(state="free", lease=0)

    def close_ring(self) -> None:
        """What its slots hold cannot be trusted."""
        ring, self.ring = self.ring, None
        for index, slot in enumerate(ring["slots"] if ring else []):
            if slot["state"] == "filling":
                self.give_back(slot["lease"])
            elif slot["state"] == "full":
                for position in set(slot["ids"]) & set(self.rows) - set(self.dead):
                    self.rows[position].update(teach="ready", signal=False)
            elif slot["state"] == "reading":
                for reading in self.readings.values():
                    reading["withdrawn"] |= index in reading["pending"]

    def session_ended(self, session: str) -> None:
        """Its blocks and leases are free, and its ring is closed."""
        self.blocks = {number: held for number, held in self.blocks.items() if held[0] != session}
        if self.ring is not None and session in (self.ring["teacher"], self.ring["trainer"]):
            self.close_ring()
        self.readings = {n: reading for n, reading in self.readings.items() if reading["session"] != session}
        for number in [n for n, lease in self.leases.items() if lease["session"] == session]:
            self.give_back(number)

    # Requests of collators and rollout workers

    def lease_block(self, session: str, f: Answer) -> Answer:
        rolls = self.oracle.sessions[session]["role"] == "rollout"
        self.check(session, "" if rolls else "collator")
        if self.ended:
            raise Refused("exhausted")
        if rolls and self.published is None:
            raise Waits
        version, tag = self.published if rolls and self.published else (0, 0)
        last = self.window(version + self.run["max_staleness"]).stop if rolls else self.run["positions"]
        floor = next(p for p in itertools.count() if p not in self.done)
        taken = self.filled | {block for _, block in self.blocks.values()}
        at = itertools.count(floor // self.run["block_size"])
        free = (b for b in at if b not in taken and (not self.block(b) or self.is_prompt(self.block(b).start) == rolls))
        positions = self.block(block := next(free))
        if not positions or positions.stop > min(floor + self.run["span"], last):
            raise Waits
        number = next(self._numbers)
        self.blocks[number] = (session, block)
        return {"type": "block", "lease": number, "first": positions.start, "count": len(positions),
                "version": version, "tag": tag}  # fmt: skip

    def put(self, session: str, f: Answer) -> Answer:
        ids, columns, tombstones = f["ids"], f["columns"], f["tombstones"]
        nbytes, room = sum(size(column) for column in columns.values()), self.oracle.limit - self.oracle.bytes
        if self.failed:
            raise Refused("run_failed", "bad_request")
        if self.blocks.get(f["lease"], ("",))[0] != session:
            raise Refused("lease_revoked", "bad_request")
        block = self.blocks[f["lease"]][1]
        if sorted([*ids, *tombstones]) != list(self.block(block)) or any(
            len(c[3]) != len(ids) for c in columns.values()
        ):
            raise Refused("bad_request")
        buffer = {"bytes": nbytes}
        for position, value in zip(ids, columns["input_ids"][3], strict=True):
            if position not in self.dead:
                self.rows_put += 1
                self.rows[position] = {"value": value, "buffer": buffer, "teach": "ready", "signal": False,
                                       "train": False, "attempts": 0}  # fmt: skip
        self.skipped.update(tombstones)
        self.done.update(tombstones)
        self.filled.add(block)
        self.refusals.pop(block, None)
        del self.blocks[f["lease"]]
        return {"type": "stored", "room": max(0, room - nbytes)}

    def nack(self, session: str, f: Answer) -> Answer:
        if f["lease"] in self.blocks:
            holder, block = self.blocks[f["lease"]]
            if holder != session:
                raise Refused("lease_revoked")
            del self.blocks[f["lease"]]
            self.refusals[block] = self.refusals.get(block, 0) + 1
            if self.refusals[block] >= self.max_attempts:
                self.filled.add(block)
                del self.refusals[block]
                self.bury(list(self.block(block)), f["reason"])
            return {"type": "ok"}
        lease = self.held(session, f["lease"])
        for slot in self.ring["slots"] if self.ring else []:
            if slot["state"] == "filling" and slot["lease"] == f["lease"]:
                slot.update(state="free", lease=0)
        self.readings.get(f["lease"], {})["withdrawn"] = True
        self.give_back(f["lease"])
        died = []
        for position in set(lease["ids"]) & set(f["ids"]):
            self.rows[position]["attempts"] += 1
            died += [position] if self.rows[position]["attempts"] >= self.max_attempts else []
        self.bury(died, f["reason"])
        return {"type": "ok"}

    # Requests of teachers and trainers

    def window_rows(self, session: str, f: Answer) -> Answer:
        self.check(session, rewinds=f["rewinds"])
        window = self.window(f["step"])
        if not window and self.ended:
            raise Refused("exhausted")
        if f["step"] < self.cursor:
            return {"type": "already_done"}
        if not window or any(p not in {*self.rows, *self.skipped, *self.dead} for p in window):
            raise Waits
        ids = [p for p in window if p in self.rows]
        return {"type": "window_rows", "ids": ids, "skipped": [p for p in window if p not in self.rows],
                "dead": [p for p in window if p in self.dead], "columns": self.columns(ids, f["fields"])}  # fmt: skip

    def await_trainer(self, session: str, f: Answer) -> Answer:
        if self.ended:
            raise Refused("exhausted")
        self.check(session)
        for name, other in self.oracle.sessions.items():
            if other["role"] == "trainer" and other["incarnation"] == self.trainers:
                return {"type": "trainer", "trainer": name, "step": self.cursor, "rewinds": self.rewinds}
        raise Waits

    def announce_ring(self, session: str, f: Answer) -> Answer:
        self.check(session, "teacher")
        trainer = self.oracle.sessions.get(f["trainer"])
        if trainer is None or trainer["role"] != "trainer" or trainer["incarnation"] != self.trainers:
            raise Refused("ring_closed")
        self.close_ring()
        self.rings += 1
        slots = [{"state": "free", "generation": 0, "lease": 0, "ids": []} for _ in range(self.run["slots"])]
        self.ring = {"number": self.rings, "teacher": session, "trainer": f["trainer"], "opened": False, "slots": slots}
        return {"type": "ring", "ring": self.rings, "handle": b""}

    def _ring(self, number: int, side: str = "", session: str = "") -> dict[str, Any]:
        if self.ring is None or self.ring["number"] != number:
            raise Refused("ring_closed")
        if side and self.ring[side] != session:
            raise Refused("forbidden")
        return self.ring

    def opened_ring(self, session: str, f: Answer) -> Answer:
        self._ring(f["ring"], "trainer", session)["opened"] = True
        return {"type": "ok"}

    def claim_slot(self, session: str, f: Answer) -> Answer:
        self.check(session, rewinds=f["rewinds"])
        ring, ids = self._ring(f["ring"], "teacher", session), f["ids"]
        if all(p < self.window(self.cursor).start for p in ids) or (self.ended and ids):
            return {"type": "already_done"}
        alive = [p for p in ids if p not in self.dead]
        for index, slot in enumerate(ring["slots"]):
            if slot["state"] == "filling" and slot["ids"] == ids:
                return self._claimed(slot["lease"], f, slot=index, generation=slot["generation"])
        if all(p in self.rows and self.rows[p]["teach"] == "done" for p in alive):
            return {"type": "already_done"}
        free = [index for index, slot in enumerate(ring["slots"]) if slot["state"] == "free"]
        if not ring["opened"] or not free:
            raise Waits
        number, slot = self._lease(session, TEACH, alive, f), ring["slots"][free[0]]
        slot.update(state="filling", lease=number, ids=ids, generation=slot["generation"] + 1)
        return self._claimed(number, f, slot=free[0], generation=slot["generation"])

    def complete(self, session: str, f: Answer) -> Answer:
        self.check(session)
        lease = self.held(session, f["lease"])
        for slot in self.ring["slots"] if self.ring and self.ring["teacher"] == session else []:
            if slot["state"] == "filling" and slot["lease"] == f["lease"]:
                slot["state"] = "full"
                self.free_if_dead(slot)
                for position in lease["ids"]:
                    self.rows[position].update(teach="done", signal=True)
                del self.leases[f["lease"]]
                return {"type": "ok"}
        raise Refused("lease_revoked")

    def claim_batch(self, session: str, f: Answer) -> Answer:
        self.check(session, "trainer", f["rewinds"])
        ids = f["ids"]
        alive = [p for p in ids if p not in self.dead]
        slots, indices = [], set()
        for index, slot in enumerate(self.ring["slots"] if self.ring else []):
            if slot["state"] in ("full", "reading") and slot["ids"] == ids:
                indices.add(index)
                slots = [{"teacher": 0, "ring": self.rings, "slot": index, "generation": slot["generation"]}]
        number = self._lease(session, TRAIN, alive, f, lost=not slots and not self._withdrawn(session))
        if not alive:
            return self._claimed(number, f)
        reading = self.readings.setdefault(
            number, {"session": session, "ids": alive, "pending": set(), "withdrawn": False}
        )
        reading["pending"] |= indices
        for index in indices:
            self.ring["slots"][index]["state"] = "reading"  # type: ignore[index]
        answer = self._claimed(number, f)
        return {**answer, "slots": slots} if slots else answer

    def _withdrawn(self, session: str) -> bool:
        return any(r["withdrawn"] for r in self.readings.values() if r["session"] == session)

    def _lease(self, session: str, task: str, alive: list[int], f: Answer, *, lost: bool = False) -> int:
        for number, lease in self.leases.items():
            if alive and (lease["session"], lease["task"], lease["ids"]) == (session, task, alive):
                if lost:
                    raise Refused("conflict")
                return number
        if any(p not in self.rows for p in alive):
            raise Refused("unknown_sample")
        if any(self.state(self.rows[p], task) != "ready" for p in alive):
            raise Waits
        if lost and alive:
            raise Refused("conflict")
        self.columns(f["ids"], f["fields"])
        number = next(self._numbers)
        for position in alive:
            self.rows[position].update({"teach": "leased"} if task == TEACH else {"train": True})
        if alive:
            self.leases[number] = {"session": session, "task": task, "ids": alive}
        return number

    def _claimed(self, number: int, f: Answer, **slot: int) -> Answer:
        return {"type": "claimed", "lease": number, "ids": f["ids"], "dead": [p for p in f["ids"] if p in self.dead],
                "columns": self.columns(f["ids"], f["fields"]), **slot}  # fmt: skip

    def release(self, session: str, f: Answer) -> Answer:
        self.check(session)
        ring = self.ring
        if ring is not None and (ring["number"], ring["trainer"]) == (f["ring"], session):
            slot = ring["slots"][f["slot"]]
            if slot["state"] == "reading" and slot["generation"] == f["generation"]:
                slot.update(state="free", lease=0)
                for reading in self.readings.values():
                    reading["pending"].discard(f["slot"])
        return {"type": "ok"}

    def check_step(self, session: str, f: Answer) -> Answer:
        self.check(session, rewinds=f["rewinds"])
        died = {p for p in self.window(f["step"]) if p in self.dead} != set(f["dead"])
        return {"type": "verdict", "redo": died or self._withdrawn(session)}

    def ack_window(self, session: str, f: Answer) -> Answer:
        self.check(session, "trainer", f["rewinds"])
        if f["step"] >= self.cursor:
            window = self.window(f["step"])
            alive = [p for p in window if p in self.rows and p not in self.dead]
            if f["step"] > self.cursor or not all(self.rows[p]["train"] for p in alive):
                raise Refused("conflict")
            self.let_go(set(window))
            self.done.update(window)
            self.cursor += 1
        return {"type": "ok"}

    def publish(self, session: str, f: Answer) -> Answer:
        self.check(session, rewinds=f["rewinds"])
        self.check(session, "trainer")
        if f["step"] != self.cursor:
            raise Refused("conflict")
        self.published = f["step"], f["tag"]
        return {"type": "ok"}

    def rewind(self, session: str, f: Answer) -> Answer:
        self.check(session, "trainer")
        mine = self.oracle.sessions[session]
        self.trainers = mine["incarnation"]
        for name, other in list(self.oracle.sessions.items()):
            if other["role"] == "trainer" and other["incarnation"] < self.trainers:
                self.oracle.end(name)
        self.rewinds, self.cursor = self.rewinds + 1, f["step"]
        first = f["step"] * self.run["samples_per_step"]
        stop = first + self.run["span"]
        self.skipped = {**{p: r for p, r in self.skipped.items() if first <= p < stop}, **f["skipped"]}
        self.dead = {**{p: r for p, r in self.dead.items() if first <= p < stop}, **f["dead"]}
        for slot in self.ring["slots"] if self.ring else []:
            slot.update(state="free", lease=0)
        self.readings.clear()
        self.published = None
        anew = {p for p in self.rows if self.is_prompt(p) and p not in self.dead}
        self.let_go(anew | {p for p in self.rows if not first <= p < stop})
        self.skipped = {p: r for p, r in self.skipped.items() if p < first or not self.is_prompt(p)}
        for number in list(self.leases):
            self.give_back(number)
        for row in self.rows.values():
            row.update(teach="ready", signal=False, train=False)
        known = {*range(first), *self.rows, *self.skipped, *self.dead}
        self.filled = {b for b in range(self.run["positions"]) if self.block(b) and known.issuperset(self.block(b))}
        self.refusals = {b: n for b, n in self.refusals.items() if b not in self.filled}
        kept = {*range(first)}.union(*map(self.block, self.filled))
        self.skipped = {p: r for p, r in self.skipped.items() if p in kept}
        self.done = {*range(first), *self.skipped, *self.dead}
        self.blocks.clear()
        return {"type": "rewound", "rewinds": self.rewinds}

    def state(self, row: dict[str, Any], task: str) -> str:
        """How far a task is with a row."""
        if task == TEACH:
            return str(row["teach"])
        return "leased" if row["train"] else "ready" if row["signal"] else "waiting"

    def stats(self) -> Answer:
        """The partition's part of the statistics."""
        alive = [row for position, row in self.rows.items() if position not in self.dead]
        tasks = {
            task: {state: sum(self.state(row, task) == state for row in alive) for state in STATES}
            for task in (TEACH, TRAIN)
        }
        slots = [slot["state"] for slot in self.ring["slots"]] if self.ring else []
        run = {"step": self.cursor, "rewinds": self.rewinds, "skipped": len(self.skipped), "ended": self.ended,
               "blocks_leased": len(self.blocks),
               "slots": [{state: slots.count(state) for state in SLOT_STATES}] if self.ring else []}  # fmt: skip
        return {"samples": len(self.rows), "bytes": self.bytes, "leases": len(self.leases), "oldest_lease_s": 0.0,
                "rows_put": self.rows_put, "given_back": self.given_back, "dead": len(self.dead), "sealed": True,
                "tasks": tasks, "run": run}  # fmt: skip
