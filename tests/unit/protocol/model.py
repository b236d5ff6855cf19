"""A run as an explicit-state model: the queue's own transition functions, driven by small agents.

Queue: `RunProtocol` and `Sessions`, the very code of the server. Agents: collators, one teacher process per (teacher,
rank), the ranks of one trainer group, and a supervisor that starts what is down. A move is one request with its answer
and what its sender does before the next one, so that every interleaving of requests is explored.

What is assumed of the world:

* A dead process keeps its session until silence ends it or its next incarnation says hello.
* A ring's memory can be read until the queue has ended one of its two sessions; from then on it is `gone`.
* Writing and reading take time: a slot is torn between a teacher's claim and its publishing, and a reader compares what
  it finds with what it was promised at the beginning and at the end.
* An answer may be lost, then the request is sent again. A repeated `release` may come at any later time. `hello` and
  `lease_block` rely on the engine's memory of request ids and are not lost here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from xtoken_core import schema
from xtoken_core.protocol.rings import SlotState
from xtoken_core.protocol.run import RunProtocol, SlotClaim
from xtoken_core.protocol.sessions import Session, Sessions
from xtoken_core.wire import QueueError

Ids = tuple[int, ...]
ROW = (schema.INPUT_IDS.name,)
UP_AND_WORKING = ("window", "claim")


class ViolationError(AssertionError):
    """A property does not hold; `kind` says which."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@dataclass(frozen=True)
class Config:
    """One exploration: the size of the run, and how often what may go wrong."""

    positions: int = 4
    samples_per_step: int = 2
    block_size: int = 1
    micro_batch: int = 1
    span: int = 6
    teachers: int = 2
    ranks: int = 1
    slots: int = 1
    collators: int = 2
    tombstones: frozenset[int] = frozenset()
    max_attempts: int = 1
    crashes: int = 0
    crashing: frozenset[str] = frozenset({"collator", "teacher", "trainer"})
    lapses: int = 0
    nacks: int = 0
    nacking: frozenset[str] = frozenset({"collator", "teacher", "trainer"})
    losses: int = 0
    duplicates: int = 0
    checkpoints: frozenset[int] = frozenset()
    in_plan_order: bool = True
    supervised: bool = True
    bounded_positions: bool = True
    protocol: type[RunProtocol] = RunProtocol


@dataclass(slots=True)
class Worker:
    """A process: where it is, and what it remembers between two requests."""

    role: str
    index: int
    rank: int = 0
    phase: str = "down"
    incarnation: int = 0
    session: str = ""
    step: int = 0
    rewinds: int = -1
    todo: tuple[Ids, ...] = ()
    lease: int = -1
    ring: int = -1
    trainer: str = ""
    slot: int = -1
    generation: int = -1
    refs: list[tuple[int, int, int, int]] = field(default_factory=list)
    counted: Ids = ()
    told: Ids = ()
    trained: Ids = ()
    clean: bool = True

    @property
    def name(self) -> str:
        """What the supervisor calls it."""
        return f"{self.role}-{self.index}-{self.rank}"


@dataclass(slots=True)
class Checkpoint:
    """What survives a trainer: its cursor, and the steps behind it with the positions that each has trained."""

    step: int = 0
    chain: tuple[Ids, ...] = ()
    skipped: dict[int, str] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)


class World:
    """One state: queue, workers, memory of the rings, messages that are late, and how much may still go wrong."""

    def __init__(self, config: Config) -> None:
        self.protocol = config.protocol(
            Sessions(),
            positions=config.positions,
            samples_per_step=config.samples_per_step,
            block_size=config.block_size,
            span=config.span,
            teachers=config.teachers,
            ranks=config.ranks,
            slots=config.slots,
            max_attempts=config.max_attempts,
            max_dead=config.positions,
        )
        self.collators = [Worker("collator", i) for i in range(config.collators)]
        self.teachers = [Worker("teacher", i, r) for i in range(config.teachers) for r in range(config.ranks)]
        self.trainers = [Worker("trainer", 0, r) for r in range(config.ranks)]
        self.memory: dict[int, list[tuple[int, Ids] | None]] = {}
        self.late: list[tuple[int, str, int, int, int]] = []
        self.chain: tuple[Ids, ...] = ()
        self.checkpoint = Checkpoint()
        self.crashes, self.lapses, self.nacks = config.crashes, config.lapses, config.nacks
        self.losses, self.duplicates = config.losses, config.duplicates

    @property
    def workers(self) -> list[Worker]:
        """All of them."""
        return [*self.collators, *self.teachers, *self.trainers]

    @property
    def finished(self) -> bool:
        """Whether the trainer has written its last checkpoint and left."""
        return all(t.phase == "finished" for t in self.trainers)

    def alive(self, worker: Worker) -> bool:
        """Whether the queue still knows the worker's session."""
        return worker.session in self.protocol.sessions.live

    def hello(self, worker: Worker) -> None:
        """The supervisor starts it (again)."""
        worker.incarnation += 1
        worker.session = f"{worker.name}/{worker.incarnation}"
        stay = Session(worker.session, worker.name, worker.role, worker.incarnation, worker.rank, 1.0, 0.0)
        self.protocol.sessions.open(stay)

    def die(self, worker: Worker, phase: str = "down") -> None:
        """The process is gone, and with it all that it knew; its session is not."""
        fresh = Worker(worker.role, worker.index, worker.rank, phase, worker.incarnation, worker.session)
        for name in Worker.__slots__:
            setattr(worker, name, getattr(fresh, name))

    def sweep(self) -> None:
        """Memory of rings of which a session has ended can be read no more."""
        live = self.protocol.sessions.live
        shared = {r.id for r in self.protocol.rings.by_pair.values() if {r.teacher_session, r.trainer_session} <= set(live)}
        for ring in [ring for ring in self.memory if ring not in shared]:
            del self.memory[ring]


@dataclass(frozen=True, slots=True)
class Move:
    """Something that may happen next. A `fault` may happen, but nothing may depend on its happening."""

    label: str
    act: str
    role: str = ""
    worker: int = -1
    argument: int = 0
    fault: bool = False


class Model:
    """All moves of all workers under one configuration."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def moves(self, world: World) -> Iterator[Move]:
        """What may happen in this state; a move that turns out to be waiting changes nothing."""
        for role, workers in (("collator", world.collators), ("teacher", world.teachers), ("trainer", world.trainers)):
            for at, worker in enumerate(workers):
                yield from self._moves_of(world, role, at, worker)
        for at in range(len(world.late)):
            yield Move("a late release comes", "late", argument=at, fault=True)

    def _moves_of(self, world: World, role: str, at: int, worker: Worker) -> Iterator[Move]:
        name, phase = worker.name, worker.phase
        if phase in ("down", "exited"):
            yield from self._moves_of_supervisor(world, role, at, worker)
            return
        if phase == "finished":
            return
        yield Move(f"{name} {phase}", phase, role, at)
        if phase == "claim" and role == "teacher" and not self.config.in_plan_order:
            for later in range(1, len(worker.todo)):
                yield Move(f"{name} claims {worker.todo[later]}", phase, role, at, later)
        if phase == "ack" and worker.step + 1 in self.config.checkpoints:
            yield Move(f"{name} ack, checkpoint", phase, role, at, 1)
        if role == "trainer" and phase in UP_AND_WORKING:
            for teacher in range(self.config.teachers):
                yield Move(f"{name} opens ring of teacher {teacher}", "open", role, at, teacher)
        if world.losses and phase in ("holding", "announce", "claim", "writing", "start", "ack"):
            yield Move(f"{name} {phase}, answer lost", phase, role, at, -1, fault=True)
        if world.duplicates and phase == "releasing":
            yield Move(f"{name} {phase}, and a repetition under way", phase, role, at, 1, fault=True)
        if world.nacks and role in self.config.nacking and phase in ("holding", "writing", "reading"):
            yield Move(f"{name} refuses", "refuse", role, at, fault=True)
        if world.crashes and role in self.config.crashing:
            yield Move(f"{name} crashes", "crash", role, at, fault=True)
        if world.lapses and role in self.config.crashing and world.alive(worker):
            yield Move(f"the session of {name} ends by silence", "lapse", role, at, fault=True)

    def _moves_of_supervisor(self, world: World, role: str, at: int, worker: Worker) -> Iterator[Move]:
        if worker.phase == "down" and world.alive(worker):
            yield Move(f"silence of {worker.name}", "silence", role, at)
        if worker.phase == "exited" and (world.protocol.ended or not self.config.supervised):
            return
        if role != "trainer":
            yield Move(f"{worker.name} starts", "restart", role, at)
        elif all(t.phase == "down" for t in world.trainers):
            if at == 0:
                yield Move("the trainer group starts", "restart_group", role, at)
        else:
            for rank, other in enumerate(world.trainers):
                if other.phase not in ("down", "finished"):
                    yield Move(f"{other.name} is killed with its group", "kill", role, rank)

    def perform(self, world: World, move: Move) -> bool:
        """Let it happen; False if the queue answers "not yet" (then nothing has changed)."""
        if move.act == "late":
            return self._late(world, move.argument)
        workers = {"collator": world.collators, "teacher": world.teachers, "trainer": world.trainers}[move.role]
        worker = workers[move.worker]
        act: Callable[[World, Worker, int], bool] = getattr(self, f"_{move.act}", None) or getattr(
            self, f"_{move.role}_{move.act}"
        )
        try:
            if move.act not in ("restart", "restart_group", "silence", "kill", "crash", "lapse"):
                world.protocol.sessions.get(worker.session)
            happened = act(world, worker, move.argument)
        except QueueError as error:
            self._answer_error(world, worker, error)
            happened = True
        if happened:
            if move.argument < 0:
                world.losses -= 1
            world.sweep()
        return happened

    def _answer_error(self, world: World, worker: Worker, error: QueueError) -> None:
        code = error.code
        if code == "stale_session":
            world.die(worker)
        elif code == "exhausted" and worker.role != "trainer":
            world.die(worker, "exited")
            world.protocol.sessions.end(worker.session, "bye")
        elif code == "lease_revoked" and worker.role != "trainer":
            worker.phase = "idle" if worker.role == "collator" else "claim"
        elif code == "rewound" and worker.role == "teacher":
            worker.step, worker.rewinds, worker.phase = error.detail["step"], error.detail["rewinds"], "window"
        elif code == "ring_closed" and worker.role == "teacher":
            worker.phase = "idle"
        elif code == "conflict" and not all(world.alive(t) for t in world.trainers):
            world.die(worker)
        else:
            raise ViolationError("error", f"{worker.name} in {worker.phase!r} got {code}: {error}")

    # What the supervisor and fate do

    def _restart(self, world: World, worker: Worker, _: int) -> bool:
        world.hello(worker)
        worker.phase = "idle"
        return True

    def _restart_group(self, world: World, _: Worker, __: int) -> bool:
        world.chain = world.checkpoint.chain
        for trainer in world.trainers:
            world.hello(trainer)
            trainer.phase, trainer.step = "start", world.checkpoint.step
        return True

    def _silence(self, world: World, worker: Worker, _: int) -> bool:
        world.protocol.sessions.end(worker.session, "silence")
        return True

    def _kill(self, world: World, worker: Worker, _: int) -> bool:
        world.die(worker)
        return True

    def _crash(self, world: World, worker: Worker, _: int) -> bool:
        world.crashes -= 1
        world.die(worker)
        return True

    def _lapse(self, world: World, worker: Worker, _: int) -> bool:
        world.lapses -= 1
        world.protocol.sessions.end(worker.session, "silence")
        return True

    def _late(self, world: World, at: int) -> bool:
        _, session, ring, slot, generation = world.late.pop(at)
        if session in world.protocol.sessions.live:
            world.protocol.release(session, ring, slot, generation)
        return True

    # Collators

    def _collator_idle(self, world: World, worker: Worker, _: int) -> bool:
        lease = world.protocol.lease_block(worker.session)
        if lease is None:
            return False
        worker.phase, worker.lease = "holding", lease.id
        worker.todo = (tuple(range(*world.protocol.source.bounds(lease.block))),)
        return True

    def _collator_holding(self, world: World, worker: Worker, lost: int) -> bool:
        skipped = self.config.tombstones.intersection(worker.todo[0])
        ids = [p for p in worker.todo[0] if p not in skipped]
        stored = world.protocol.put_block(worker.session, worker.lease, ids, dict.fromkeys(skipped, "empty"), ROW)
        if stored is None:
            return False
        if not lost:
            worker.phase, worker.lease, worker.todo = "idle", -1, ()
        return True

    # Everybody who may refuse

    def _refuse(self, world: World, worker: Worker, _: int) -> bool:
        world.nacks -= 1
        if worker.role == "collator":
            world.protocol.refuse_block(worker.session, worker.lease, "bad")
            worker.phase, worker.lease, worker.todo = "idle", -1, ()
        else:
            world.protocol.refuse(worker.session, worker.lease, worker.todo[0][:1], "bad")
            worker.phase = "claim" if worker.role == "teacher" else "nacked"
        return True

    # Teachers

    def _teacher_idle(self, world: World, worker: Worker, _: int) -> bool:
        protocol = world.protocol
        if protocol.ended:
            raise QueueError("exhausted", "every position of the run is done")
        trainer = protocol.trainer_of(worker.rank)
        if trainer is None:
            return False
        worker.trainer, worker.step, worker.rewinds = trainer.id, protocol.cursor, protocol.rewinds
        worker.phase = "announce"
        return True

    def _teacher_announce(self, world: World, worker: Worker, lost: int) -> bool:
        ring = world.protocol.announce_ring(worker.session, worker.index, worker.rank, worker.trainer, b"handle")
        world.memory[ring.id] = [None] * self.config.slots
        if not lost:
            worker.ring, worker.phase = ring.id, "opened"
        return True

    def _teacher_opened(self, world: World, worker: Worker, _: int) -> bool:
        if not world.protocol.rings.get(worker.ring).opened:
            return False
        worker.phase = "window"
        return True

    def _teacher_window(self, world: World, worker: Worker, _: int) -> bool:
        rows = world.protocol.window_ready(worker.step, worker.rewinds)
        if worker.step < world.protocol.cursor:
            self._next_window(worker)
            return True
        if rows is None:
            return False
        worker.todo = self.plan(rows, worker.rank)
        worker.phase = "claim"
        if not worker.todo:
            self._next_window(worker)
        return True

    def _teacher_claim(self, world: World, worker: Worker, which: int) -> bool:
        chosen = max(which, 0)
        ids = worker.todo[chosen]
        claim = world.protocol.claim_slot(worker.session, worker.ring, ids, worker.rewinds)
        if claim is None:
            return False
        if which < 0:
            return True
        if not isinstance(claim, SlotClaim):
            self._next_batch(worker, chosen)
            return True
        worker.todo = (ids, *worker.todo[:chosen], *worker.todo[chosen + 1 :])
        worker.lease, worker.slot, worker.generation = claim.lease, claim.slot, claim.generation
        worker.phase = "writing"
        if worker.ring in world.memory:
            world.memory[worker.ring][claim.slot] = None
        return True

    def _teacher_writing(self, world: World, worker: Worker, lost: int) -> bool:
        if worker.ring in world.memory:
            world.memory[worker.ring][worker.slot] = (worker.generation, worker.todo[0])
        world.protocol.publish(worker.session, worker.lease)
        if not lost:
            self._next_batch(worker, 0)
        return True

    def _next_batch(self, worker: Worker, done: int) -> None:
        worker.lease, worker.slot, worker.generation = -1, -1, -1
        worker.todo = (*worker.todo[:done], *worker.todo[done + 1 :])
        worker.phase = "claim"
        if not worker.todo:
            self._next_window(worker)

    def _next_window(self, worker: Worker) -> None:
        worker.step += 1
        worker.phase = "window"

    # Trainers

    def _trainer_start(self, world: World, worker: Worker, lost: int) -> bool:
        if worker.rank or any(t.phase != "start" for t in world.trainers):
            return False
        saved = world.checkpoint
        world.protocol.rewind(worker.session, worker.step, saved.skipped, saved.dead)
        if not lost:
            for trainer in world.trainers:
                trainer.rewinds, trainer.phase = world.protocol.rewinds, "window"
        return True

    def _trainer_open(self, world: World, worker: Worker, teacher: int) -> bool:
        ring = world.protocol.rings.by_pair.get((teacher, worker.rank))
        if ring is None or ring.opened or ring.trainer_session != worker.session:
            return False
        world.protocol.opened(worker.session, ring.id)
        return True

    def _trainer_window(self, world: World, worker: Worker, _: int) -> bool:
        rows = world.protocol.window_ready(worker.step, worker.rewinds)
        if rows is None:
            return False
        dead = world.protocol.samples.dead
        worker.told = tuple(p for p in world.protocol.window(worker.step) if p in dead)
        worker.counted = tuple(p for p in rows if p not in dead)
        worker.trained, worker.clean = (), True
        worker.todo = self.plan(rows, worker.rank)
        worker.phase = "claim" if worker.todo else "check"
        return True

    def _trainer_claim(self, world: World, worker: Worker, lost: int) -> bool:
        protocol, ids = world.protocol, worker.todo[0]
        found = protocol.claim_batch(worker.session, ids, worker.rewinds)
        if found is None:
            return False
        lease, refs = found
        if lost:
            return True
        worker.lease, worker.phase = lease.id, "reading"
        worker.refs = [(protocol.rings.get(r.ring).teacher, r.ring, r.slot, r.generation) for r in refs]
        worker.trained = (*worker.trained, *lease.ids)
        if lease.ids and sorted(r[0] for r in worker.refs) != list(range(self.config.teachers)):
            worker.clean = False
        self._look(world, worker)
        return True

    def _trainer_reading(self, world: World, worker: Worker, _: int) -> bool:
        self._look(world, worker)
        worker.phase = "releasing"
        return self._done_with(worker) or True

    def _trainer_nacked(self, world: World, worker: Worker, _: int) -> bool:
        worker.trained = tuple(p for p in worker.trained if p not in worker.todo[0])
        worker.phase = "releasing"
        return self._done_with(worker) or True

    def _trainer_releasing(self, world: World, worker: Worker, repeat: int) -> bool:
        teacher, ring, slot, generation = worker.refs.pop(0)
        world.protocol.release(worker.session, ring, slot, generation)
        if repeat:
            world.duplicates -= 1
            world.late.append((teacher, worker.session, ring, slot, generation))
        return self._done_with(worker) or True

    def _done_with(self, worker: Worker) -> None:
        if not worker.refs:
            worker.todo, worker.lease = worker.todo[1:], -1
            worker.phase = "claim" if worker.todo else "check"

    def _look(self, world: World, worker: Worker) -> None:
        for _, ring, slot, generation in worker.refs:
            held = world.memory.get(ring)
            if held is None or held[slot] != (generation, worker.todo[0]):
                worker.clean = False

    def _trainer_check(self, world: World, worker: Worker, _: int) -> bool:
        redo = world.protocol.check_step(worker.session, worker.step, worker.rewinds, worker.told)
        worker.phase = "redo" if redo else "go"
        verdicts = {t.phase for t in world.trainers}
        if verdicts <= {"redo", "go"}:
            if "redo" not in verdicts:
                self._optimize(world)
            for trainer in world.trainers:
                trainer.phase = "start" if "redo" in verdicts else "ack"
        return True

    def _trainer_go(self, *_: object) -> bool:
        return False

    _trainer_redo = _trainer_go

    def _optimize(self, world: World) -> None:
        trained = sorted(p for t in world.trainers for p in t.trained)
        step = world.trainers[0].step
        if not all(t.clean for t in world.trainers):
            raise ViolationError("foreign signal", f"step {step} holds a gradient of a signal that was torn, foreign or gone")
        if any(list(t.counted) != trained for t in world.trainers):
            counted = [t.counted for t in world.trainers]
            raise ViolationError("denominator", f"step {step} has trained {trained} and counted {counted}")
        world.chain = (*world.chain, tuple(trained))

    def _trainer_ack(self, world: World, worker: Worker, keep: int) -> bool:
        if worker.rank or any(t.phase != "ack" for t in world.trainers):
            return False
        protocol = world.protocol
        protocol.ack_window(worker.session, worker.step, worker.rewinds)
        if keep < 0:
            return True
        step = worker.step + 1
        end = step * self.config.samples_per_step >= self.config.positions
        if keep or end:
            done = range(min(step * self.config.samples_per_step, self.config.positions))
            skipped = {p: r for p, r in protocol.skipped.items() if p in done}
            dead = {p: r for p, r in protocol.samples.dead.items() if p in done}
            self._check_chain(world, done, skipped, dead)
            world.checkpoint = Checkpoint(step, world.chain, skipped, dead)
        for trainer in world.trainers:
            trainer.step = step
            trainer.phase = "finished" if end else "window"
            if end:
                protocol.sessions.end(trainer.session, "bye")
        return True

    def _check_chain(self, world: World, done: range, skipped: dict[int, str], dead: dict[int, str]) -> None:
        trained = [p for step in world.chain for p in step]
        if sorted([*trained, *skipped, *dead]) != list(done):
            what = f"of {done} trained {trained}, skipped {sorted(skipped)}, dead {sorted(dead)}"
            raise ViolationError("count", what)

    def plan(self, rows: list[int], rank: int) -> tuple[Ids, ...]:
        """This rank's micro-batches of a window; empty ones are left out, since nobody asks for them."""
        size = self.config.micro_batch
        batches = [tuple(rows[i : i + size]) for i in range(0, len(rows), size)]
        return tuple(batches[rank :: self.config.ranks])

    # What must hold in every state

    def check(self, world: World) -> None:
        """Raise ViolationError if memory or slots are not accounted for."""
        protocol = world.protocol
        floor = protocol.finished.first_gap()
        held = set(protocol.samples.samples)
        if len(held) > self.config.span:
            raise ViolationError("memory", f"{len(held)} rows are held")
        for lease in protocol.source.leases.values():
            held.update(range(*protocol.source.bounds(lease.block)))
        if self.config.bounded_positions and held and max(held) >= floor + self.config.span:
            raise ViolationError("span", f"position {max(held)} is at work while {floor} is not done")
        for ring in protocol.rings.by_pair.values():
            for index, slot in enumerate(ring.slots):
                if slot.state == SlotState.FREE:
                    continue
                if world.finished:
                    raise ViolationError("leak", f"slot {index} is {slot.state.name} at the end")
                if slot.state == SlotState.FILLING and slot.lease not in protocol.samples.leases:
                    raise ViolationError("leak", f"slot {index} is filled for a lease that is gone")
        if world.finished and (protocol.samples.samples or protocol.readings or protocol.samples.leases):
            raise ViolationError("leak", "rows, leases or readings outlive the run")
