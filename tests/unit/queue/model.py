"""A run as an explicit-state model: the queue's own transition functions, driven by small agents.

Queue: `RunProtocol` and `Sessions`, the very code of the server. Agents: collators, rollout workers, one teacher
process per (teacher, rank), the ranks of one trainer group, and a supervisor that starts what is down. A move is one
request with its answer and what its sender does before the next one, so that every interleaving is explored.

What is assumed of the world:

* A dead process keeps its session until silence ends it or its next incarnation says hello.
* A ring's memory can be read until the queue has ended one of its two sessions; from then on it is `gone`.
* Writing and reading take time: a slot is torn between a teacher's claim and its publishing, and a reader compares what
  it finds with what it was promised at the beginning and at the end.
* An answer may be lost, then the request is sent again. A repeated `release` may come at any later time. `hello` and
  `lease_block` rely on the engine's memory of request ids and are not lost here.
"""

from collections.abc import Callable, Iterator

from tests.unit.queue.agents.producers import Producers
from tests.unit.queue.agents.teachers import Teachers
from tests.unit.queue.agents.trainers import Trainers
from tests.unit.queue.world import Move, ViolationError, Worker, World, ask, new_protocol
from xtoken_core.queue.run.slots import SlotState
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m

LOSING = ("holding", "announce", "claim", "writing", "start", "ack", "publishing")
"""Phases in which an answer may be lost."""


class Model(Producers, Teachers, Trainers):
    """All moves of all workers under one configuration."""

    def moves(self, world: World) -> Iterator[Move]:
        """What may happen in this state; a move that turns out to be waiting changes nothing."""
        for role, workers in world.by_role.items():
            for at, worker in enumerate(workers):
                yield from self._moves_of(world, role, at, worker)
        for at in range(len(world.late)):
            yield Move("a late release comes", "late", argument=at, fault=True)
        if world.queue_losses:
            yield Move("the queue is lost, and starts again with nothing", "lose_queue", fault=True)

    def _moves_of(self, world: World, role: str, at: int, worker: Worker) -> Iterator[Move]:
        name, phase = worker.name, worker.phase
        if phase in ("down", "exited"):
            yield from self._moves_of_supervisor(world, role, at, worker)
            return
        if phase == "finished":
            return
        yield Move(f"{name} {phase}", phase, role, at)
        if worker.under_way:
            yield Move(f"{name} publishes", "publish", role, at)
        if worker.reading:
            yield Move(f"{name} finishes a backward", "finish", role, at)
        if phase == "claim" and role == "teacher" and not self.config.in_plan_order:
            for later in range(1, len(worker.todo)):
                yield Move(f"{name} claims {worker.todo[later]}", phase, role, at, later)
        if phase == "ack" and worker.step + 1 in self.config.checkpoints:
            yield Move(f"{name} ack, checkpoint", phase, role, at, 1)
        if role == "trainer" and phase == "claim":
            for teacher in range(self.config.teachers):
                yield Move(f"{name} sees the ring of teacher {teacher}", "see", role, at, teacher)
        if world.losses and phase in LOSING:
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
        if not move.role:
            act_of_fate: Callable[[World, int], bool] = getattr(self, f"_{move.act}")
            return act_of_fate(world, move.argument)
        worker = world.by_role[move.role][move.worker]
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
            worker.phase = "idle" if worker.role in ("collator", "rollout") else self._again(worker)
        elif code == "rewound" and worker.role == "teacher":
            worker.step, worker.rewinds, worker.phase = (
                error.detail["step"],
                error.detail["rewinds"],
                self._again(worker),
            )
        elif code == "ring_closed" and worker.role == "teacher":
            worker.phase = "idle"
            worker.under_way.clear()
        elif code == "ring_closed" and worker.phase == "claim":
            return  # the teacher has died between announcing its ring and the trainer's opening it
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
        world.cursor = world.checkpoint
        for trainer in world.trainers:
            world.hello(trainer)
            trainer.phase, trainer.step = "start", world.cursor.step
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
            world.protocol.release(ask(m.Release, session, ring=ring, slot=slot, generation=generation))
        return True

    def _lose_queue(self, world: World, _: int) -> bool:
        world.queue_losses -= 1
        world.protocol = new_protocol(self.config)
        world.sweep()
        return True

    # What must hold in every state

    def check(self, world: World) -> None:
        """Raise ViolationError if memory or slots are not accounted for."""
        protocol = world.protocol
        floor = protocol.finished.first_gap()
        held = set(protocol.samples.samples)
        if len(held) > self.config.span:
            raise ViolationError("memory", f"{len(held)} rows are held")
        for lease in protocol.blocks.leases.values():
            held.update(range(*protocol.blocks.bounds(lease.block)))
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
        if world.finished and (protocol.samples.samples or protocol.slots.readings or protocol.samples.leases):
            raise ViolationError("leak", "rows, leases or readings outlive the run")
