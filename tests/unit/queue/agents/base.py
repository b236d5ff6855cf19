"""What the workers of a run have in common.

The agents do what workers do between two requests, in one method per phase. A method is one request and what its sender
does with the answer. It returns False if the answer is "not yet". Its last argument is what the move has chosen; a
negative one says that the answer is lost.
"""

from tests.unit.queue.world import Config, Ids, Worker, World, ask
from xtoken_core.wire import messages as m


class Agents:
    """Workers of a run: what each of them may do."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def plan(self, rows: list[int], rank: int) -> tuple[Ids, ...]:
        """This rank's micro-batches of a window, of one route each; empty ones are left out: nobody asks for them."""
        size = self.config.micro_batch
        batches = []
        for route in sorted({self.config.route(row) for row in rows}):
            own = [row for row in rows if self.config.route(row) == route]
            batches += [tuple(own[i : i + size]) for i in range(0, len(own), size)]
        return tuple(batches[rank :: self.config.ranks])

    @staticmethod
    def _read_window(world: World, worker: Worker) -> m.WindowRows | m.AlreadyDone | None:
        return world.protocol.read_window(
            ask(m.Window, worker.session, step=worker.step, rewinds=worker.rewinds, fields=[])
        )

    def _refuse(self, world: World, worker: Worker, _: int) -> bool:
        world.nacks -= 1
        if worker.role in ("collator", "rollout"):
            world.protocol.nack(ask(m.Nack, worker.session, lease=worker.lease, ids=[], reason="bad"))
            worker.phase, worker.lease, worker.todo = "idle", -1, ()
        else:
            ids = list(worker.todo[0][:1])
            world.protocol.nack(ask(m.Nack, worker.session, lease=worker.lease, ids=ids, reason="bad"))
            worker.phase = "claim" if worker.role == "teacher" else "nacked"
        return True
