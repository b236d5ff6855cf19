"""The process of one part of a divided teacher, other than the first: it runs every forward pass with the first one.

`shards` starts it; its job comes by standard input, whose end means that the first process is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import torch
from setproctitle import setproctitle

from xtoken_core.config.resolved import parse_resolved_run
from xtoken_core.errors import XtokenError
from xtoken_services.common.processes.logs import set_up
from xtoken_services.teacher.prepare import prepared_model
from xtoken_services.teacher.shards import ShardJob, receive_tokens

log = logging.getLogger("xtoken.teacher")


def main() -> int:
    """Serve until the first part's process ends."""
    set_up()
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process leaves gracefully, then closes standard input
        signal.signal(number, signal.SIG_IGN)
    job = ShardJob.model_validate_json(sys.stdin.readline())
    setproctitle(f"xtoken teacher-{job.teacher} part {job.shard}")
    threading.Thread(target=_exit_with_owner, daemon=True).start()
    run = parse_resolved_run(job.run.encode(), source="standard input")
    try:
        job.join()
        model = prepared_model(run, job.teacher, job.device)
    except XtokenError as error:
        log.error("%s", error)
        return error.exit_code
    with torch.inference_mode():
        while True:
            model.hidden(*receive_tokens())


def _exit_with_owner() -> None:
    """Exit once standard input ends; a collective that waits cannot be left otherwise."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
