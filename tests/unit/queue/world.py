"""A state of the model: the queue, its workers, the memory of the rings, and how much may still go wrong."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from xtoken_core.queue.run.protocol import RunProtocol
from xtoken_core.queue.sessions import Session, Sessions
from xtoken_core.wire import messages as m

Ids = tuple[int, ...]
R = TypeVar("R", bound=m.PartitionRequest)


def ask(kind: type[R], session: str, **fields: Any) -> R:
    """A request of a session."""
    return kind(id="request", session=session, partition="run", **fields)


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
    routes: tuple[Ids, ...] = ()
    ranks: int = 1
    group: int = 0
    groups: int = 1
    slots: int = 1
    collators: int = 2
    rollouts: int = 0
    prompts: int = 0
    last_prompts: int | None = None
    after: int = 0
    max_staleness: int = 0
    publish_every: int = 1
    tombstones: frozenset[int] = frozenset()
    max_attempts: int = 1
    crashes: int = 0
    crashing: frozenset[str] = frozenset({"collator", "rollout", "teacher", "trainer"})
    lapses: int = 0
    queue_losses: int = 0
    nacks: int = 0
    nacking: frozenset[str] = frozenset({"collator", "rollout", "teacher", "trainer"})
    losses: int = 0
    duplicates: int = 0
    checkpoints: frozenset[int] = frozenset()
    in_plan_order: bool = True
    ahead: bool = False
    supervised: bool = True
    bounded_positions: bool = True
    protocol: type[RunProtocol] = RunProtocol

    def route(self, position: int) -> Ids:
        """The teachers that compare a position, in turns of `routes`; all without any."""
        return self.routes[position % len(self.routes)] if self.routes else tuple(range(self.teachers))


class Weights(NamedTuple):
    """Published weights: their tag, their step and the positions that the steps behind them have trained.

    What a rollout worker needs to know of its lease has no chain.
    """

    tag: int
    step: int
    chain: tuple[Ids, ...] = ()


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
    under_way: list[tuple[int, int, int, Ids]] = field(default_factory=list)
    reading: list[tuple[list[tuple[int, int, int, int]], Ids]] = field(default_factory=list)
    counted: Ids = ()
    dead: Ids = ()
    absent: Ids = ()
    trained: Ids = ()
    clean: bool = True
    weights: Weights | None = None

    @property
    def name(self) -> str:
        """What the supervisor calls it."""
        return f"{self.role}-{self.index}-{self.rank}"


class Checkpoint(NamedTuple):
    """A trainer's cursor: the positions that each step behind it has trained, and those it has left out."""

    step: int = 0
    chain: tuple[Ids, ...] = ()
    skipped: Ids = ()
    dead: Ids = ()


def new_protocol(config: Config) -> RunProtocol:
    """An empty queue."""
    sizes = {name: getattr(config, name) for name in m.RunDef.__struct_fields__ if hasattr(config, name)}
    run = m.RunDef(**sizes, max_dead=config.positions, document=b"")
    return config.protocol(Sessions(), run, max_attempts=config.max_attempts)


def owned(config: Config, step: int) -> list[int]:
    """The positions below a step that are this queue's own, by counting."""
    share = config.samples_per_step // config.groups
    below = range(min(step * config.samples_per_step, config.positions))
    return [p for p in below if p % config.samples_per_step // share == config.group]


class World:
    """One state: queue, workers, memory of the rings, messages that are late, and how much may still go wrong."""

    def __init__(self, config: Config) -> None:
        self.protocol = new_protocol(config)
        self.collators = [Worker("collator", i) for i in range(config.collators)]
        self.rollouts = [Worker("rollout", i) for i in range(config.rollouts)]
        self.teachers = [Worker("teacher", i, r) for i in range(config.teachers) for r in range(config.ranks)]
        self.trainers = [Worker("trainer", 0, r) for r in range(config.ranks)]
        self.memory: dict[int, list[tuple[int, Ids] | None]] = {}
        self.late: list[tuple[int, str, int, int, int]] = []
        self.file: Weights | None = None
        self.tags = 0
        self.generated: dict[int, Weights | None] = {}
        self.cursor = Checkpoint()
        self.checkpoint = Checkpoint()
        self.crashes, self.lapses, self.nacks = config.crashes, config.lapses, config.nacks
        self.losses, self.duplicates, self.queue_losses = config.losses, config.duplicates, config.queue_losses
        for worker in self.workers:
            self.hello(worker)
            worker.phase = "start" if worker.role == "trainer" else "idle"

    @property
    def workers(self) -> list[Worker]:
        """All of them."""
        return [*self.collators, *self.rollouts, *self.teachers, *self.trainers]

    @property
    def by_role(self) -> dict[str, list[Worker]]:
        """All of them by role."""
        roles = {"collator": self.collators, "rollout": self.rollouts}
        return {**roles, "teacher": self.teachers, "trainer": self.trainers}

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
        shared = {
            r.id for r in self.protocol.rings.by_pair.values() if {r.teacher_session, r.trainer_session} <= set(live)
        }
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
