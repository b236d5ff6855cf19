"""`xtoken queue`: serve a queue, and open a run's partition if one is given."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from types import FrameType

from setproctitle import setproctitle

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import ConfigError
from xtoken_core.queue.engine import Engine
from xtoken_core.wire import messages as m
from xtoken_services.queue.memory import one_heap
from xtoken_services.queue.server import Server

log = logging.getLogger("xtoken.queue")


def serve_run(
    bind: str, run: ResolvedRun, *, token_file: Path | None, memory_limit: int | None, keys: Path | None, group: int
) -> None:
    """Serve the queue of a run's node group until SIGTERM or SIGINT.

    Raises:
        ConfigError: The run has no such node group.
        XtokenError: The address cannot be served, or the run cannot be opened.
    """
    become_queue()
    resolved = of_group(run, group)
    engine = Engine(memory_limit=memory_limit or resolved.spec.queue.memory_limit, clock=time.monotonic)
    open_run(engine, resolved)
    serve(Server(engine, Address.parse(bind, token_file, keys)), bind)


def become_queue() -> None:
    """Name the process, and keep all that it allocates from here on in one heap."""
    setproctitle("xtoken queue")
    one_heap()


def serve(server: Server, bind: str) -> None:
    """Serve until SIGTERM or SIGINT."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    log.info("serving at %s, up to %d bytes", bind, server.engine.memory_limit)
    server.serve()


def of_group(resolved: ResolvedRun, group: int) -> ResolvedRun:
    """Return the run as the queue of one node group serves it.

    Raises:
        ConfigError: There is no such group.
    """
    nodes = resolved.spec.workers.nodes
    if group >= nodes:
        raise ConfigError(f"--group {group}: the run {resolved.spec.name!r} has {nodes} node groups (workers.nodes)")
    return resolved.model_copy(update={"group": group})


def open_run(engine: Engine, resolved: ResolvedRun) -> None:
    """Open the run's partition in an engine of this process."""
    spec, prompts = resolved.spec, resolved.prompts
    hello = m.Hello(id="open", versions=[m.VERSION], name="queue", role="opener", incarnation=0)
    welcome = engine.handle(hello, ())
    assert welcome is not None
    assert isinstance(welcome.reply, m.Welcome)
    session = welcome.reply.session
    run = m.RunDef(
        positions=resolved.positions,
        samples_per_step=spec.train.samples_per_step,
        block_size=spec.block_size,
        span=resolved.span,
        teachers=len(spec.teacher),
        ranks=spec.workers.ranks,
        slots=spec.ring_slots,
        max_dead=spec.queue.max_dead,
        group=resolved.group,
        groups=spec.workers.nodes,
        prompts=prompts.first,
        last_prompts=prompts.last if prompts.last != prompts.first else None,
        after=prompts.after,
        max_staleness=spec.rollout.max_staleness if spec.rollout else 0,
        document=resolved.model_dump_json().encode(),
    )
    engine.handle(m.OpenPartition(id="run", session=session, partition=spec.name, tasks=[], run=run), ())
    engine.handle(m.Bye(id="bye", session=session), ())
