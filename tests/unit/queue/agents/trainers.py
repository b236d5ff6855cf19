"""Trainers: ranks that read the signals, decide on a step together, and keep the cursor."""

import math
from fractions import Fraction

from tests.unit.queue.agents.base import Agents
from tests.unit.queue.world import Checkpoint, Ids, ViolationError, Weights, Worker, World, ask, owned
from xtoken_core.wire import messages as m


class Trainers(Agents):
    """The ranks of one group."""

    def _trainer_start(self, world: World, worker: Worker, lost: int) -> bool:
        if worker.rank or any(t.phase != "start" for t in world.trainers):
            return False
        known = world.cursor
        skipped, dead = dict.fromkeys(known.skipped, "empty"), dict.fromkeys(known.dead, "bad")
        world.protocol.rewind(ask(m.Rewind, worker.session, step=known.step, skipped=skipped, dead=dead))
        if not lost:
            for trainer in world.trainers:
                trainer.rewinds, trainer.phase = world.protocol.rewinds, "window"
            if self.config.prompts:
                world.tags += 1
                worker.weights = Weights(world.tags, known.step, known.chain)
                worker.phase = "saving_weights" if self._publishes(known.step) else "window"
        return True

    def _publishes(self, step: int) -> bool:
        """Weights of the steps that no completion may come from are not published."""
        return step >= self.config.after - self.config.max_staleness

    def _trainer_saving_weights(self, world: World, worker: Worker, _: int) -> bool:
        world.file, worker.phase = worker.weights, "publishing"
        return True

    def _trainer_publishing(self, world: World, worker: Worker, lost: int) -> bool:
        tag, step, _ = worker.weights
        world.protocol.publish(ask(m.Publish, worker.session, step=step, rewinds=worker.rewinds, tag=tag))
        if not lost:
            worker.phase = "window"
        return True

    def _trainer_see(self, world: World, worker: Worker, teacher: int) -> bool:
        ring = world.protocol.rings.by_pair.get((teacher, worker.rank))
        if ring is None or ring.opened or ring.trainer_session != worker.session:
            return False
        worker.ring, worker.phase = ring.id, "opening"
        return True

    def _trainer_opening(self, world: World, worker: Worker, _: int) -> bool:
        ring, worker.ring, worker.phase = worker.ring, -1, "claim"
        world.protocol.confirm_ring(ask(m.OpenedRing, worker.session, teacher=0, ring=ring))
        return True

    def _trainer_window(self, world: World, worker: Worker, _: int) -> bool:
        window = self._read_window(world, worker)
        if window is None:
            return False
        assert isinstance(window, m.WindowRows)
        rows, dead = window.ids, window.dead
        worker.dead = tuple(dead)
        worker.absent = tuple(p for p in window.skipped if p not in dead)
        worker.counted = tuple(p for p in rows if p not in dead)
        worker.trained, worker.clean = (), True
        worker.todo = self.plan(rows, worker.rank)
        worker.phase = "claim" if worker.todo else "check"
        return True

    def _trainer_claim(self, world: World, worker: Worker, lost: int) -> bool:
        protocol, ids = world.protocol, worker.todo[0]
        claim = protocol.claim_batch(ask(m.ClaimBatch, worker.session, ids=list(ids), rewinds=worker.rewinds))
        if claim is None:
            return False
        if lost:
            return True
        worker.lease, worker.phase = claim.lease, "reading"
        worker.refs = [(ref.teacher, ref.ring, ref.slot, ref.generation) for ref in claim.slots]
        alive = [i for i in claim.ids if i not in claim.dead]
        worker.trained = (*worker.trained, *alive)
        if alive and tuple(sorted(r[0] for r in worker.refs)) != self.config.route(ids[0]):
            worker.clean = False
        self._look(world, worker, worker.refs, worker.todo[0])
        if self.config.ahead:
            worker.reading.append((worker.refs, worker.todo[0]))
            worker.refs = []
            self._done_with(worker)
        return True

    def _trainer_finish(self, world: World, worker: Worker, _: int) -> bool:
        """Its releaser's thread: the oldest backward has completed, whatever the main loop does meanwhile."""
        refs, ids = worker.reading[0]
        self._look(world, worker, refs, ids)
        if refs:
            _, ring, slot, generation = refs.pop(0)
            world.protocol.release(ask(m.Release, worker.session, ring=ring, slot=slot, generation=generation))
        if not refs:
            worker.reading.pop(0)
        return True

    def _trainer_reading(self, world: World, worker: Worker, _: int) -> bool:
        self._look(world, worker, worker.refs, worker.todo[0])
        worker.phase = "releasing"
        return self._done_with(worker) or True

    def _trainer_nacked(self, world: World, worker: Worker, _: int) -> bool:
        worker.trained = tuple(p for p in worker.trained if p not in worker.todo[0])
        worker.phase = "releasing"
        return self._done_with(worker) or True

    def _trainer_releasing(self, world: World, worker: Worker, repeat: int) -> bool:
        teacher, ring, slot, generation = worker.refs.pop(0)
        world.protocol.release(ask(m.Release, worker.session, ring=ring, slot=slot, generation=generation))
        if repeat:
            world.duplicates -= 1
            world.late.append((teacher, worker.session, ring, slot, generation))
        return self._done_with(worker) or True

    def _done_with(self, worker: Worker) -> None:
        if not worker.refs:
            worker.todo, worker.lease = worker.todo[1:], -1
            worker.phase = "claim" if worker.todo else "check"

    def _look(self, world: World, worker: Worker, refs: list[tuple[int, int, int, int]], ids: Ids) -> None:
        for _, ring, slot, generation in refs:
            held = world.memory.get(ring)
            if held is None or held[slot] != (generation, ids):
                worker.clean = False

    def _trainer_check(self, world: World, worker: Worker, _: int) -> bool:
        if worker.reading:
            return False
        redo = world.protocol.check_step(
            ask(m.CheckStep, worker.session, step=worker.step, rewinds=worker.rewinds, dead=list(worker.dead))
        ).redo
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
            raise ViolationError(
                "foreign signal", f"step {step} holds a gradient of a signal that was torn, foreign or gone"
            )
        if any(list(t.counted) != trained for t in world.trainers):
            counted = [t.counted for t in world.trainers]
            raise ViolationError("denominator", f"step {step} has trained {trained} and counted {counted}")
        known, leader = world.cursor, world.trainers[0]
        prompts = self._prompts_of(step)
        if prompts.intersection(trained) != {p for p in trained if world.generated.get(p)}:
            raise ViolationError("prompts", f"step {step} has prompts {prompts}, generated {sorted(world.generated)}")
        for position in prompts.intersection(trained):
            weights = world.generated[position]
            of_this_life = weights.tag == leader.weights.tag and weights.chain == known.chain[: weights.step]
            if step - weights.step > self.config.max_staleness or not of_this_life:
                raise ViolationError("stale", f"step {step} trains position {position} of weights {weights}")
        world.cursor = Checkpoint(
            step + 1, (*known.chain, tuple(trained)), (*known.skipped, *leader.absent), (*known.dead, *leader.dead)
        )

    def _prompts_of(self, step: int) -> set[int]:
        """The prompts of a step, by the definition: none before the switch, then in a straight line, in blocks."""
        size, block = self.config.samples_per_step, self.config.block_size
        first = self.config.prompts
        last = first if self.config.last_prompts is None else self.config.last_prompts
        length = max(math.ceil(self.config.positions / size) - 1 - self.config.after, 1)
        line = first + (last - first) * Fraction(step - self.config.after, length)
        count = math.floor(line / block + Fraction(1, 2)) * block if step >= self.config.after else 0
        return set(range((step + 1) * size - count, (step + 1) * size))

    def _trainer_ack(self, world: World, worker: Worker, keep: int) -> bool:
        if worker.rank or any(t.phase != "ack" for t in world.trainers):
            return False
        protocol = world.protocol
        protocol.ack_window(ask(m.AckWindow, worker.session, step=worker.step, rewinds=worker.rewinds))
        if keep < 0:
            return True
        self._check_cursor(world)
        step = worker.step + 1
        end = step * self.config.samples_per_step >= self.config.positions
        if keep and not end:
            world.checkpoint = world.cursor
        for trainer in world.trainers:
            trainer.step = step
            trainer.phase = "saving" if end else "window"
        due = step % self.config.publish_every == 0 and self._publishes(step)
        if self.config.prompts and not end and due:
            worker.weights = Weights(worker.weights.tag, step, world.cursor.chain)
            worker.phase = "saving_weights"
        return True

    def _trainer_saving(self, world: World, worker: Worker, _: int) -> bool:
        if worker.rank or any(t.phase != "saving" for t in world.trainers):
            return False
        world.checkpoint = world.cursor
        for trainer in world.trainers:
            trainer.phase = "finished"
            world.protocol.sessions.end(trainer.session, "bye")
        return True

    def _check_cursor(self, world: World) -> None:
        """Below the cursor each position was trained once, or skipped, or is dead, and the queue agrees."""
        known, protocol = world.cursor, world.protocol
        done = owned(self.config, known.step)
        trained = [p for step in known.chain for p in step]
        what = f"of {done} trained {trained}, skipped {known.skipped}, dead {known.dead}"
        if sorted([*trained, *known.skipped, *known.dead]) != done:
            raise ViolationError("count", what)
        theirs = [[p for p in reasons if p in done] for reasons in (protocol.skipped, protocol.samples.dead)]
        if [sorted(positions) for positions in theirs] != [sorted(known.skipped), sorted(known.dead)]:
            raise ViolationError("count", f"{what}, but the queue has skipped and dead {theirs}")
