"""Breadth-first exploration of the model: canonical states, shortest counterexamples, what can still reach the end."""

import pickle
from collections import deque
from dataclasses import dataclass, field

from tests.unit.queue.model import Model
from tests.unit.queue.world import Config, ViolationError, Weights, Worker, World


@dataclass
class Outcome:
    """What an exploration saw."""

    states: int = 0
    moves: int = 0
    finals: int = 0
    violation: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.states} states, {self.moves} moves, {self.finals} ends; {self.violation or 'no violation'}"
        return "\n".join([head, *self.trace])


class Frozen:
    """Worlds as bytes; what never changes in them is kept once, beside them."""

    def __init__(self, world: World) -> None:
        protocol = world.protocol
        self.tasks, self.fields, self.run = protocol.samples.tasks, protocol.slots.fields, protocol.definition

    def dumps(self, world: World) -> bytes:
        """A world's bytes; the world itself is not usable any more."""
        protocol = world.protocol
        protocol.samples.tasks = protocol.slots.fields = protocol.definition = None  # type: ignore[assignment]
        protocol.sessions.on_end.clear()
        protocol.sessions.ended.clear()
        return pickle.dumps(world, pickle.HIGHEST_PROTOCOL)

    def loads(self, blob: bytes) -> World:
        """A world that may be changed."""
        world: World = pickle.loads(blob)
        protocol = world.protocol
        protocol.samples.tasks, protocol.slots.fields, protocol.definition = self.tasks, self.fields, self.run
        protocol.sessions.on_end.append(protocol.session_ended)
        return world


class Exploration:
    """All states that a configuration can reach."""

    def __init__(self, config: Config, limit: int = 2_000_000) -> None:
        self.model = Model(config)
        self.limit = limit
        self.index: dict[int, int] = {}
        self.origin: list[tuple[int, str]] = []
        self.before: list[list[int]] = []
        self.finals: list[int] = []
        self.moves = 0

    def run(self) -> Outcome:
        """Explore everything, or up to the first violation."""
        start = World(self.model.config)
        self.frozen = Frozen(start)
        frontier = deque([(self._number(key_of(start), -1, ""), self.frozen.dumps(start))])
        try:
            while frontier:
                at, blob = frontier.popleft()
                self._expand(at, blob, frontier)
                if len(self.index) > self.limit:
                    raise RuntimeError(f"more than {self.limit} states")
            self._check_every_state_can_end()
        except _FoundError as found:
            return self._outcome(found.kind, found.at, found.label)
        return self._outcome()

    def _expand(self, at: int, blob: bytes, frontier: deque[tuple[int, bytes]]) -> None:
        world: World | None = self.frozen.loads(blob)
        if world.finished:
            self.finals.append(at)
            return
        productive = False
        for move in list(self.model.moves(world)):
            world = world or self.frozen.loads(blob)
            try:
                if not self.model.perform(world, move):
                    continue
                self.moves += 1
                key = key_of(world)
                to = self.index.get(key)
                if to is None:
                    self.model.check(world)
                    to = self._number(key, at, move.label)
                    frontier.append((to, self.frozen.dumps(world)))
            except ViolationError as violation:
                raise _FoundError(str(violation), at, move.label) from violation
            if not move.fault:
                productive = productive or to != at
                self.before[to].append(at)
            world = None
        if not productive:
            raise _FoundError("stuck: nobody can do anything", at, "")

    def _number(self, key: int, origin: int, label: str) -> int:
        self.index[key] = number = len(self.origin)
        self.origin.append((origin, label))
        self.before.append([])
        return number

    def _check_every_state_can_end(self) -> None:
        reaches = bytearray(len(self.origin))
        todo = list(self.finals)
        for at in todo:
            reaches[at] = 1
        while todo:
            for earlier in self.before[todo.pop()]:
                if not reaches[earlier]:
                    reaches[earlier] = 1
                    todo.append(earlier)
        stuck = reaches.find(0)
        if stuck >= 0:
            raise _FoundError("stuck: no end can be reached any more", stuck, "")

    def _outcome(self, violation: str = "", at: int = -1, label: str = "") -> Outcome:
        trace = [label] if label else []
        while at > 0:
            at, made_by = self.origin[at]
            trace.append(made_by)
        return Outcome(len(self.origin), self.moves, len(self.finals), violation, trace[::-1])


class _FoundError(Exception):
    def __init__(self, kind: str, at: int, label: str) -> None:
        super().__init__(kind)
        self.kind, self.at, self.label = kind, at, label


def explore(config: Config) -> Outcome:
    """Explore a configuration."""
    return Exploration(config).run()


def key_of(world: World) -> int:
    """A 64-bit hash of the state without its arbitrary numbers.

    Leases, rings, generations, sessions and rewinds count by what they refer to. Collators are interchangeable, and so
    are teachers: their parts are sorted.
    """
    protocol = world.protocol
    samples, blocks = protocol.samples, protocol.blocks
    count = len(world.trainers)
    teachers = [
        tuple(_pair_key(world, world.teachers[i * count + r], world.trainers[r]) for r in range(count))
        + _task_key(world, i)
        for i in range(len(world.teachers) // count)
    ]
    state = (
        tuple(sorted(map(hash, teachers))),
        tuple(sorted(hash(_collator_key(world, c)) for c in world.collators)),
        tuple(sorted(hash(_rollout_key(world, r)) for r in world.rollouts)),
        tuple(_trainer_key(world, t) for t in world.trainers),
        _weights_key(world),
        tuple((p, int(s.status["train"]), s.attempts) for p, s in sorted(samples.samples.items())),
        tuple(sorted(samples.dead)),
        tuple(sorted(protocol.skipped)),
        tuple(protocol.finished.intervals()),
        tuple(blocks.done.intervals()),
        tuple(sorted((lease.block, lease.session in protocol.sessions.live) for lease in blocks.leases.values())),
        tuple(sorted(blocks.refused.items())),
        protocol.cursor,
        protocol.failed,
        world.cursor,
        world.checkpoint,
        (world.crashes, world.lapses, world.nacks, world.losses, world.duplicates, world.queue_losses),
    )
    return hash(state)


def _collator_key(world: World, worker: Worker) -> tuple[object, ...]:
    held = [lease.block for lease in world.protocol.blocks.leases.values() if lease.session == worker.session]
    return worker.phase, world.alive(worker), worker.todo, tuple(held), worker.lease in world.protocol.blocks.leases


def _rollout_key(world: World, worker: Worker) -> tuple[object, ...]:
    return *_collator_key(world, worker), _relative(world, worker.weights)


def _weights_key(world: World) -> tuple[object, ...]:
    held = world.protocol.samples.samples
    generated = tuple((p, _relative(world, weights)) for p, weights in sorted(world.generated.items()) if p in held)
    protocol = world.protocol
    published = protocol.published, world.file is not None and protocol.weights_tag == world.file.tag
    return generated, published, world.file and world.file[1:]


def _relative(world: World, weights: Weights | None) -> tuple[object, ...]:
    """Weights with what counts of their tag: whether it is the file's, which is the newest one that was written."""
    if weights is None:
        return ()
    return weights[1:], world.file is not None and weights.tag == world.file.tag


def _trainer_key(world: World, worker: Worker) -> tuple[object, ...]:
    protocol = world.protocol
    readings = [
        (protocol.samples.leases[lease].claimed if lease in protocol.samples.leases else None, reading.withdrawn)
        for lease, reading in protocol.slots.readings.items()
    ]
    return (
        worker.phase,
        world.alive(worker),
        worker.incarnation == protocol.trainer_incarnation,
        any(ring.id == worker.ring for ring in protocol.rings.by_pair.values()),
        worker.rewinds == protocol.rewinds,
        worker.step,
        worker.todo,
        (worker.counted, worker.dead, worker.absent, worker.trained, worker.clean),
        worker.lease in protocol.samples.leases,
        tuple((len(refs), ids) for refs, ids in worker.reading),
        tuple(sorted(map(hash, readings))),
        tuple(sorted(lease.ids for lease in protocol.samples.of_session(worker.session))),
        _relative(world, worker.weights),
    )


def _task_key(world: World, teacher: int) -> tuple[object, ...]:
    task, signal = f"teacher_{teacher}", world.protocol.slots.fields[teacher]
    held = sorted(world.protocol.samples.samples.items())
    leases = sorted(lease.ids for lease in world.protocol.samples.leases.values() if lease.task == task)
    return tuple((int(s.status[task]), signal in s.fields) for _, s in held), tuple(leases)


def _pair_key(world: World, worker: Worker, trainer: Worker) -> tuple[object, ...]:
    protocol = world.protocol
    ring = protocol.rings.by_pair.get((worker.index, worker.rank))
    live = protocol.sessions.live

    def filling(ring_id: int, slot: int, generation: int) -> tuple[object, ...]:
        if ring is None or ring.id != ring_id:
            return (slot,)
        return slot, generation == ring.slots[slot].generation

    mine = (
        worker.phase,
        world.alive(worker),
        worker.rewinds == protocol.rewinds,
        worker.step,
        worker.todo,
        ring is not None and ring.id == worker.ring,
        worker.trainer == trainer.session,
        worker.lease in protocol.samples.leases,
        filling(worker.ring, worker.slot, worker.generation),
        ring is not None and ring.id == trainer.ring,
    )
    under_way = tuple(
        (lease in protocol.samples.leases, filling(worker.ring, slot, generation), ids)
        for lease, slot, generation, ids in worker.under_way
    )
    refs = [(ref, ()) for ref in trainer.refs] + [(ref, ids) for refs, ids in trainer.reading for ref in refs]
    reading = under_way, tuple((filling(*ref[1:]), ids) for ref, ids in refs if ref[0] == worker.index)
    late = sorted(
        (session in live, *filling(*where))
        for teacher, session, *where in world.late
        if teacher == worker.index and session == trainer.session
    )
    if ring is None:
        return mine, reading, tuple(late)
    memory = world.memory.get(ring.id)
    slots = []
    for index, slot in enumerate(ring.slots):
        content = memory[index] if memory else None
        found = content and (content[0] == slot.generation, content[1])
        readers = [lease for lease, reads in protocol.slots.readings.items() if (ring.id, index) in reads.pending]
        claimed = sorted(
            protocol.samples.leases[lease].claimed for lease in readers if lease in protocol.samples.leases
        )
        slots.append((int(slot.state), slot.ids, slot.lease in protocol.samples.leases, found, tuple(claimed)))
    known = (
        ring.teacher_session in live,
        ring.teacher_session == worker.session,
        ring.trainer_session == trainer.session,
    )
    return mine, reading, tuple(late), known, ring.trainer_session in live, ring.opened, memory is None, tuple(slots)
