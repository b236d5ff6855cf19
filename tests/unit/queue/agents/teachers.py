"""Teachers: they announce a ring, and write the signals of a window into its slots."""

from tests.unit.queue.agents.base import Agents
from tests.unit.queue.world import Worker, World, ask
from xtoken_core.wire import QueueError
from xtoken_core.wire import messages as m


class Teachers(Agents):
    """One process per teacher and rank."""

    def _teacher_idle(self, world: World, worker: Worker, _: int) -> bool:
        found = world.protocol.await_trainer(ask(m.AwaitTrainer, worker.session, rank=worker.rank))
        if found is None:
            return False
        worker.trainer, worker.step, worker.rewinds = found.trainer, found.step, found.rewinds
        worker.phase = "announce"
        return True

    def _teacher_announce(self, world: World, worker: Worker, lost: int) -> bool:
        ring = world.protocol.announce_ring(
            ask(
                m.AnnounceRing, worker.session, teacher=worker.index, rank=worker.rank, trainer=worker.trainer,
                handle=b"handle",
            )
        ).ring  # fmt: skip
        world.memory[ring] = [None] * self.config.slots
        if not lost:
            worker.ring, worker.phase = ring, "opened"
        return True

    def _teacher_opened(self, world: World, worker: Worker, _: int) -> bool:
        if world.protocol.await_opened(ask(m.AwaitOpened, worker.session, ring=worker.ring)) is None:
            return False
        worker.phase = "window"
        return True

    def _teacher_window(self, world: World, worker: Worker, _: int) -> bool:
        window = self._read_window(world, worker)
        if isinstance(window, m.AlreadyDone):
            self._next_window(worker)
            return True
        if window is None:
            return False
        planned = self.plan(window.ids, worker.rank)
        worker.todo = tuple(ids for ids in planned if worker.index in self.config.route(ids[0]))
        worker.phase = "claim"
        if not worker.todo:
            self._next_window(worker)
        return True

    def _teacher_claim(self, world: World, worker: Worker, which: int) -> bool:
        chosen = max(which, 0)
        ids = worker.todo[chosen]
        claim = world.protocol.claim_slot(
            ask(m.ClaimSlot, worker.session, ring=worker.ring, ids=list(ids), rewinds=worker.rewinds)
        )
        if claim is None:
            return False
        if which < 0:
            return True
        if isinstance(claim, m.AlreadyDone):
            self._next_batch(worker, chosen)
            return True
        if self.config.ahead:
            if worker.ring in world.memory:
                world.memory[worker.ring][claim.slot] = None
            worker.under_way.append((claim.lease, claim.slot, claim.generation, ids))
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
        world.protocol.complete(ask(m.Complete, worker.session, lease=worker.lease))
        if not lost:
            self._next_batch(worker, 0)
        return True

    def _teacher_publish(self, world: World, worker: Worker, _: int) -> bool:
        """Its publisher's thread: the oldest of its slots is written, whatever the main loop does meanwhile."""
        lease, slot, generation, ids = worker.under_way.pop(0)
        if worker.ring in world.memory and world.memory[worker.ring][slot] is None:
            world.memory[worker.ring][slot] = (generation, ids)
        try:
            world.protocol.complete(ask(m.Complete, worker.session, lease=lease))
        except QueueError as error:
            if error.code != "lease_revoked":
                raise
            worker.phase = self._again(worker)
        return True

    @staticmethod
    def _again(worker: Worker) -> str:
        return "settling" if worker.under_way else "window"

    def _teacher_settling(self, _: World, worker: Worker, __: int) -> bool:
        """After a refusal it goes through its step again once nothing is under way any more."""
        if worker.under_way:
            return False
        worker.phase = "window"
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
