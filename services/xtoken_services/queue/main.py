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
from xtoken_services.queue.write_ahead_log import WriteAheadLog, check_policy

log = logging.getLogger("xtoken.queue")

DEFAULT_MEMORY = 1 << 30


def serve(
    bind: str,
    *,
    run: ResolvedRun | None,
    token_file: Path | None,
    memory_limit: int | None,
    keys: Path | None = None,
    journal: Path | None = None,
    fsync: str = "interval",
    metrics_port: int | None = None,
    group: int = 0,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: The run has no such node group, or an option needs another one that is not given.
        XtokenError: The address cannot be served, the run cannot be opened, or the journal cannot be read.
    """
    setproctitle("xtoken queue")
    one_heap()
    if run is None and group:
        raise ConfigError(f"--group {group} needs the run whose node group it is: name it by --run")
    if journal is None and check_policy(fsync) == "always":
        raise ConfigError(f"--fsync {fsync} needs a journal: name its directory by --journal")
    address = Address.parse(bind, token_file, keys)
    resolved = None if run is None else of_group(run, group)
    limit = memory_limit or (resolved.spec.queue.memory_limit if resolved else DEFAULT_MEMORY)
    engine = Engine(memory_limit=limit, clock=time.monotonic)
    log_of_changes = None if journal is None else WriteAheadLog(journal, engine, fsync=fsync)
    if resolved is not None:
        open_run(engine, resolved)
    server = Server(engine, address, journal=log_of_changes, metrics_port=metrics_port)

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    log.info("serving at %s, up to %d bytes", bind, limit)
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
