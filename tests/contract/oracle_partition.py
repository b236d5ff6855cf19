"""The oracle's partition: samples, tasks, leases and volatile fields, as proto/README.md section 6 tells of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from tests.contract.oracle import Oracle

Column = tuple[str, str, tuple[int, ...], list[Any]]
Answer = dict[str, Any]
STATES = ("waiting", "ready", "leased", "done")


class Refused(Exception):  # noqa: N818 - an answer, not a failure
    """The request is refused by one of `codes`."""

    def __init__(self, *codes: str, **detail: int) -> None:
        self.codes, self.detail = set(codes), detail


class Waits(Exception):  # noqa: N818 - likewise
    """There is no answer yet."""


class Part:
    """A partition. A sample is a dict: its place `at`, `fields` with (row, buffer), `done` and `leased` task names."""

    def __init__(self, oracle: Oracle, tasks: list[dict[str, Any]], volatile: list[str], max_attempts: int) -> None:
        self.oracle, self.definition = oracle, (tasks, volatile, max_attempts)
        self.tasks = {task["name"]: task for task in tasks}
        self.volatile, self.max_attempts = set(volatile), max_attempts
        self.samples: dict[int, dict[str, Any]] = {}
        self.leases: dict[int, dict[str, Any]] = {}
        self.finished: set[int] = set()
        self.kinds: dict[str, Any] = {}
        self.sealed, self.rows_put, self.given_back = False, 0, 0
        self.summary: list[tuple[int, str, Answer]] = []
        self._numbers = itertools.count(1)

    @property
    def bytes(self) -> int:
        """Bytes of the buffers of which some row is held."""
        held = {id(buffer): buffer for s in self.samples.values() for _, buffer in s["fields"].values()}
        return sum(buffer["bytes"] for buffer in held.values())

    def state(self, sample: dict[str, Any], task: str) -> str:
        """One of STATES; of a dead sample, done."""
        if task in sample["done"] or sample["dead"] is not None:
            return "done"
        if task in sample["leased"]:
            return "leased"
        return "ready" if set(self.tasks[task]["requires"]) <= set(sample["fields"]) else "waiting"

    def settle(self, sample_id: int) -> None:
        """Note when a sample became ready."""
        sample = self.samples[sample_id]
        for task in self.tasks:
            if self.state(sample, task) != "ready":
                sample["ready_at"].pop(task, None)
            elif task not in sample["ready_at"]:
                sample["ready_at"][task] = next(self._numbers)

    def check_task(self, task: str) -> None:
        """It must be there."""
        if task not in self.tasks:
            raise Refused("unknown_task")

    def faults(self, columns: dict[str, Column], rows: int) -> set[str]:
        """What is wrong with columns."""
        found = set()
        for name, (kind, dtype, shape, values) in columns.items():
            if len(values) != rows:
                found.add("bad_request")
            if self.kinds.get(name, (kind, dtype, shape)) != (kind, dtype, shape):
                found.add("conflict")
        return found

    def add(self, session: str, ids: list[int], columns: dict[str, Column], task: str = "") -> None:
        """Store what is new; a sample keeps the fields that it has."""
        new = set()
        for sample_id in ids:
            if sample_id not in self.samples and sample_id not in self.finished:
                self.samples[sample_id] = {"at": next(self._numbers), "fields": {}, "owners": {}, "done": set(),
                                           "leased": set(), "ready_at": {}, "attempts": 0, "dead": None}  # fmt: skip
                new.add(sample_id)
        for name, (kind, dtype, shape, rows) in columns.items():
            self.kinds[name] = (kind, dtype, shape)
            buffer = {"bytes": size(columns[name])}
            for sample_id, row in zip(ids, rows, strict=True):
                sample = self.samples.get(sample_id)
                if sample is not None and sample["dead"] is None and name not in sample["fields"]:
                    sample["fields"][name] = (row, buffer)
                    new.add(sample_id)
                    if name in self.volatile:
                        sample["owners"][name] = (session, [], next(self._numbers))
                if sample is not None and name in sample["owners"] and task not in sample["owners"][name][1]:
                    sample["owners"][name][1].append(task)
        self.rows_put += len(new)
        for sample_id in ids:
            if sample_id in self.samples:
                self.settle(sample_id)

    def read(self, ids: list[int], fields: list[str]) -> dict[str, Column]:
        """Columns of samples."""
        if any(i not in self.samples or not set(fields) <= set(self.samples[i]["fields"]) for i in ids):
            raise Refused("unknown_sample")
        return {name: (*self.kinds[name], [self.samples[i]["fields"][name][0] for i in ids]) for name in fields if ids}

    def finish(self, task: str, ids: list[int]) -> None:
        """A task has done leased samples; what all have done is let go."""
        for sample_id in ids:
            sample = self.samples[sample_id]
            sample["done"].add(task)
            sample["leased"].discard(task)
            sample["ready_at"].pop(task, None)
            if sample["done"] >= set(self.tasks) and sample["dead"] is None:
                del self.samples[sample_id]
                self.finished.add(sample_id)
        self.unlease(ids, task)

    def unlease(self, ids: list[int], task: str | None = None) -> None:
        """Take ids out of leases."""
        for lease_id, lease in list(self.leases.items()):
            if task in (None, lease["task"]):
                lease["ids"] = [i for i in lease["ids"] if i not in ids]
                if not lease["ids"]:
                    del self.leases[lease_id]

    def give_back(self, lease_id: int) -> list[int]:
        """A lease ends; its samples are ready again, or wait."""
        lease = self.leases.pop(lease_id)
        self.given_back += len(lease["ids"])
        for sample_id in lease["ids"]:
            self.samples[sample_id]["leased"].discard(lease["task"])
            self.settle(sample_id)
        ids: list[int] = lease["ids"]
        return ids

    def session_ended(self, session: str) -> None:
        """Its leases are free, its volatile fields gone, and what it completed by these is to be done again."""
        for lease_id in [i for i, lease in self.leases.items() if lease["session"] == session]:
            self.give_back(lease_id)
        mine = [
            (number, sample_id, name, tasks)
            for sample_id, sample in self.samples.items()
            for name, (owner, tasks, number) in sample["owners"].items()
            if owner == session
        ]
        for _, sample_id, name, tasks in sorted(mine):
            sample = self.samples[sample_id]
            del sample["owners"][name], sample["fields"][name]
            sample["done"].difference_update(tasks)
            self.settle(sample_id)

    def restart(self) -> None:
        """Sessions are over: counts begin anew, and what the journal began with lies as it was summed up there."""
        for sample_id, name, buffer in self.summary:
            if name in self.samples.get(sample_id, {"fields": {}})["fields"]:
                self.samples[sample_id]["fields"][name] = (self.samples[sample_id]["fields"][name][0], buffer)
        self.rows_put, self.given_back = 0, 0
        in_order = sorted(self.samples.items(), key=lambda item: item[1]["at"])
        for _, sample in in_order:
            sample["ready_at"].clear()
        for sample_id, _ in in_order:
            self.settle(sample_id)
        self.kinds = {n: kind for n, kind in self.kinds.items() if any(n in s["fields"] for _, s in in_order)}
        self.summary = []
        for names, group in itertools.groupby(in_order, key=lambda item: frozenset(item[1]["fields"])):
            together = list(group)
            for name in names:
                rows = [sample["fields"][name][0] for _, sample in together]
                buffer = {"bytes": size((*self.kinds[name], rows))}
                self.summary += [(sample_id, name, buffer) for sample_id, _ in together]

    # Requests

    def seal(self, _: str, f: Answer) -> Answer:
        self.sealed = True
        return {"type": "ok"}

    def clear(self, _: str, f: Answer) -> Answer:
        ids = list(self.samples) if f["everything"] else [i for i in dict.fromkeys(f["ids"]) if i in self.samples]
        for sample_id in ids:
            del self.samples[sample_id]
        self.unlease(ids)
        self.finished.update(ids)
        if f["everything"]:
            self.finished.clear()
            self.kinds.clear()
            self.sealed = False
        return {"type": "ok"}

    def put(self, session: str, f: Answer) -> Answer:
        ids, columns = f["ids"], f["columns"]
        room = self.oracle.limit - self.oracle.bytes
        nbytes = sum(size(column) for column in columns.values())
        codes = self.faults(columns, len(ids))
        codes |= {"bad_request"} if len(set(ids)) < len(ids) else set()
        codes |= {"conflict"} if self.sealed else set()
        codes |= {"no_room"} if nbytes > room else set()
        if codes:
            raise Refused(*codes, room=max(room, 0))
        self.add(session, ids, columns)
        return {"type": "stored", "room": room - nbytes}

    def room(self, _: str, f: Answer) -> Answer:
        if f["bytes"] > self.oracle.limit:
            raise Refused("too_large")
        if f["bytes"] > self.oracle.limit - self.oracle.bytes:
            raise Waits
        return {"type": "stored", "room": self.oracle.limit - self.oracle.bytes}

    def get(self, _: str, f: Answer) -> Answer:
        try:
            return {"type": "rows", "ids": f["ids"], "columns": self.read(f["ids"], f["fields"])}
        except Refused:
            if f.get("wait_s") and not self.sealed and not self.finished.intersection(f["ids"]):
                raise Waits from None
            raise

    def claim(self, session: str, f: Answer) -> Answer:
        task, ids = f["task"], f.get("ids", [])
        self.check_task(task)
        by_id = self.tasks[task].get("order") == "by_id"
        if bool(ids) == bool(f.get("count")) or len(set(ids)) < len(ids) or (by_id and not ids):
            raise Refused("bad_request")
        dead = [i for i in ids if i in self.samples and self.samples[i]["dead"] is not None]
        if ids and len(dead) == len(ids):
            return {"type": "claimed", "lease": 0, "ids": [], "dead": dead, "columns": {}}
        taken = [i for i in ids if i not in dead] if ids else self.next(task, f["count"])
        for number, lease in self.leases.items():
            if ids and (lease["session"], lease["task"], lease["ids"]) == (session, task, taken):
                return self.claimed(number, taken, dead, f)
        if any(i not in self.samples for i in taken):
            raise Refused("unknown_sample")
        if not taken or any(self.state(self.samples[i], task) != "ready" for i in taken):
            if self.sealed and all(self.state(s, task) == "done" for s in self.samples.values()):
                raise Refused("exhausted")
            raise Waits
        self.read(taken, f.get("fields", []))
        number = next(self._numbers)
        self.leases[number] = {"session": session, "task": task, "ids": taken, "since": self.oracle.now}
        for sample_id in taken:
            self.samples[sample_id]["leased"].add(task)
            self.samples[sample_id]["ready_at"].pop(task, None)
        return self.claimed(number, taken, dead, f)

    def claimed(self, lease: int, ids: list[int], dead: list[int], f: Answer) -> Answer:
        columns = self.read(ids, f.get("fields", []))
        return {"type": "claimed", "lease": lease, "ids": list(ids), "dead": dead, "columns": columns}

    def next(self, task: str, count: int) -> list[int]:
        """What the task's order hands out."""
        if self.tasks[task].get("order") == "arrival":
            ready = [(s["ready_at"][task], i) for i, s in self.samples.items() if task in s["ready_at"]]
            return [i for _, i in sorted(ready)[:count]]
        out = []
        for sample_id, sample in sorted(self.samples.items(), key=lambda item: item[1]["at"]):
            state = self.state(sample, task)
            if state == "waiting" or len(out) == count:
                break
            out += [sample_id] if state == "ready" else []
        return out

    def held(self, session: str, lease_id: int) -> Answer:
        """A lease that this session holds."""
        if self.leases.get(lease_id, {}).get("session") != session:
            raise Refused("lease_revoked")
        return self.leases[lease_id]

    def complete(self, session: str, f: Answer) -> Answer:
        lease, columns = self.held(session, f["lease"]), f["columns"]
        codes = self.faults(columns, len(lease["ids"]))
        room = 2 * self.oracle.limit - self.oracle.bytes
        if sum(size(column) for column in columns.values()) > room:
            codes.add("no_room")
        if codes:
            raise Refused(*codes, room=max(room, 0))
        if columns:
            self.add(session, lease["ids"], columns, lease["task"])
        self.finish(lease["task"], lease["ids"])
        return {"type": "ok"}

    def ack(self, session: str, f: Answer) -> Answer:
        self.check_task(f["task"])
        leases = [lease for lease in self.leases.values() if (lease["session"], lease["task"]) == (session, f["task"])]
        mine = {i for lease in leases for i in lease["ids"]}
        done = {i for i, s in self.samples.items() if self.state(s, f["task"]) == "done"} | self.finished
        if not set(f["ids"]) <= mine | done:
            raise Refused("lease_revoked")
        self.finish(f["task"], [i for i in dict.fromkeys(f["ids"]) if i in mine])
        return {"type": "ok"}

    def nack(self, session: str, f: Answer) -> Answer:
        self.held(session, f["lease"])
        for sample_id in self.give_back(f["lease"]):
            sample = self.samples[sample_id]
            if sample_id in f["ids"]:
                sample["attempts"] += 1
                if sample["attempts"] >= self.max_attempts:
                    sample["dead"] = f["reason"]
            self.settle(sample_id)
        return {"type": "ok"}

    def list(self, _: str, f: Answer) -> Answer:
        state = f["state"]
        reasons = {i: s["dead"] for i, s in self.samples.items() if s["dead"] is not None}
        if state == "dead":
            found = set(reasons)
        elif state == "skipped":
            found = set()
        else:
            self.check_task(f["task"])
            if state not in STATES:
                raise Refused("bad_request")
            found = {i for i, s in self.samples.items() if self.state(s, f["task"]) == state} - set(reasons)
        ids = sorted(i for i in found if i > f["after"])[: f["limit"]]
        return {"type": "listed", "ids": ids, "reasons": {i: reasons[i] for i in ids if state == "dead"}}

    def peek(self, _: str, f: Answer) -> Answer:
        sample = self.samples.get(f["sample"])
        if sample is None:
            raise Refused("unknown_sample")
        fields = {
            name: len(pack(self.kinds[name][0], row)) for name, (row, _) in sample["fields"].items()
        }  # fmt: skip
        status = {task: self.state(sample, task) for task in self.tasks}
        return {"type": "peeked", "fields": fields, "status": status, "attempts": sample["attempts"],
                "reason": sample["dead"] or ""}  # fmt: skip

    def stats(self) -> Answer:
        """The partition's part of the statistics."""
        alive = [s for s in self.samples.values() if s["dead"] is None]
        tasks = {
            task: {state: sum(self.state(s, task) == state for s in alive) for state in STATES} for task in self.tasks
        }
        oldest = max((self.oracle.now - lease["since"] for lease in self.leases.values()), default=0.0)
        return {"samples": len(self.samples), "bytes": self.bytes, "leases": len(self.leases), "oldest_lease_s": oldest,
                "rows_put": self.rows_put, "given_back": self.given_back, "dead": len(self.samples) - len(alive),
                "sealed": self.sealed, "tasks": tasks}  # fmt: skip


def pack(kind: str, row: Any) -> bytes:
    """The bytes of a row."""
    packed: bytes = msgpack.packb(row, use_bin_type=True) if kind == "object" else row
    return packed


def size(column: Column) -> int:
    """Bytes of a column's buffers."""
    kind, _, _, rows = column
    return sum(len(pack(kind, row)) for row in rows) + (0 if kind == "dense" else 8 * (len(rows) + 1))
