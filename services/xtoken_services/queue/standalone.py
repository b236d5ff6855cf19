"""A queue that is started by hand: of a run or of other tasks, with a journal and metrics if they are asked for."""

from __future__ import annotations

import time
from pathlib import Path

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.address import Address
from xtoken_core.errors import ConfigError
from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_services.queue.main import become_queue, of_group, open_run, serve
from xtoken_services.queue.metrics import Metrics
from xtoken_services.queue.server import Server
from xtoken_services.queue.write_ahead_log import WriteAheadLog, check_policy

DEFAULT_MEMORY = 1 << 30


def serve_alone(
    bind: str,
    *,
    run: ResolvedRun | None,
    token_file: Path | None,
    memory_limit: int | None,
    keys: Path | None,
    journal: Path | None,
    fsync: str,
    metrics_port: int | None,
    group: int,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: The run has no such node group, or an option needs another one that is not given.
        XtokenError: The address cannot be served, the run cannot be opened, or the journal cannot be read.
    """
    become_queue()
    if run is None and group:
        raise ConfigError(f"--group {group} needs the run whose node group it is: name it by --run")
    if journal is None and check_policy(fsync) == "always":
        raise ConfigError(f"--fsync {fsync} needs a journal: name its directory by --journal")
    address = Address.parse(bind, token_file, keys)
    resolved = None if run is None else of_group(run, group)
    limit = memory_limit or (resolved.spec.queue.memory_limit if resolved else DEFAULT_MEMORY)
    engine = Engine(memory_limit=limit, clock=time.monotonic, opens=any_partition)
    log_of_changes = None if journal is None else WriteAheadLog(journal, engine, fsync=fsync)
    if resolved is not None:
        open_run(engine, resolved)
    metrics = None if metrics_port is None else Metrics(metrics_port)
    serve(Server(engine, address, journal=log_of_changes, metrics=metrics), bind)
