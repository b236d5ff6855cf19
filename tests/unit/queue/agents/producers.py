"""Collators and rollout workers: they lease blocks of positions and put rows."""

from tests.unit.queue.agents.base import Agents
from tests.unit.queue.world import ViolationError, Weights, Worker, World, ask
from xtoken_core import schema
from xtoken_core.wire import messages as m

ROW = (schema.INPUT_IDS.name,)


class Producers(Agents):
    """Workers that put rows."""

    def _collator_idle(self, world: World, worker: Worker, _: int) -> bool:
        block = world.protocol.lease_block(ask(m.LeaseBlock, worker.session))
        if block is None:
            return False
        worker.phase, worker.lease = "holding", block.lease
        worker.todo = (tuple(range(block.first, block.first + block.count)),)
        return True

    def _collator_holding(self, world: World, worker: Worker, lost: int) -> bool:
        skipped = self.config.tombstones.intersection(worker.todo[0])
        ids = [p for p in worker.todo[0] if p not in skipped]
        tombstones = dict.fromkeys(skipped, "empty")
        put = ask(m.Put, worker.session, ids=ids, columns=[], lease=worker.lease, tombstones=tombstones)
        routes = {p: schema.bits_of(self.config.route(p)) for p in ids} if self.config.routes else {}
        stored = world.protocol.put_block(put, ROW, routes)
        if stored is None:
            return False
        if not lost:
            worker.phase, worker.lease, worker.todo = "idle", -1, ()
        return True

    def _rollout_idle(self, world: World, worker: Worker, _: int) -> bool:
        block = world.protocol.lease_block(ask(m.LeaseBlock, worker.session))
        if block is None:
            return False
        worker.phase, worker.lease, worker.weights = "reading", block.lease, Weights(block.tag, block.version)
        worker.todo = (tuple(range(block.first, block.first + block.count)),)
        return True

    def _rollout_reading(self, world: World, worker: Worker, _: int) -> bool:
        """Its weights are those of the file by now; of another tag: its lease is from before a rewind."""
        assert worker.weights is not None and world.file is not None
        if world.file.tag != worker.weights.tag:
            worker.phase, worker.lease, worker.todo, worker.weights = "idle", -1, (), None
            return True
        if world.file.step < worker.weights.step:
            raise ViolationError("stale", f"{worker.weights.step} is published, the file has {world.file.step}")
        worker.weights, worker.phase = world.file, "holding"
        return True

    def _rollout_holding(self, world: World, worker: Worker, lost: int) -> bool:
        weights, ids = worker.weights, worker.todo[0]
        self._collator_holding(world, worker, lost)
        world.generated |= dict.fromkeys(ids, weights)
        worker.weights = weights if lost else None
        return True
