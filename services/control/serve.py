"""Serving the control plane: in a thread for a run in place, or as `xtoken control`."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from services.common.allowed_paths import Roots
from services.control.app import create_app
from services.control.auth import Auth
from services.control.runs import Runs
from services.control.validation import SpecValidator
from services.supervisor.interrupts import Interrupts
from xtoken_core.errors import XtokenError

log = logging.getLogger("xtoken.control")

BACKLOG = 1024
GOODBYE_S = 2


class HttpServer:
    """The control plane's server, in a thread of its own.

    Args:
        runs: What it serves.
        host: Where to listen.
        port: 0 takes any free one.
        auth: Who may ask.
        listening: A socket that listens there already.

    Raises:
        XtokenError: The port is in use.
    """

    def __init__(
        self, runs: Runs, host: str, port: int, auth: Auth, listening: socket.socket | None = None
    ) -> None:  # fmt: skip
        self._socket = listening or _listen(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            create_app(runs, auth), log_level="warning", lifespan="off", access_log=False, log_config=None,
            timeout_graceful_shutdown=GOODBYE_S, server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def serve(
    host: str, port: int, runs_dir: Path, *, roots: Sequence[Path] = (), token_file: Path | None = None,
    names: Sequence[str] = (), stop_on_exit: bool = False,
) -> None:  # fmt: skip
    """Serve until SIGTERM or SIGINT.

    Args:
        host: Where to listen; any address but a loopback one needs a token file.
        port: 0 takes any free one.
        runs_dir: Where runs are remembered and written.
        roots: Where runs may read, beside the runs' directory.
        token_file: The file with the token that requests must carry.
        names: Host names under which it may be asked for.
        stop_on_exit: Whether it then stops its runs in order, at a second signal at once; otherwise they go on alone
            until the next control plane finds them.

    Raises:
        XtokenError: The address cannot be served, or the runs' directory cannot be made.
    """
    auth = Auth.of(host, token_file, names)
    Roots.of(roots, [])  # what is refused leaves no directory behind, and touches no run
    with Interrupts() as interrupts, _listen(host, port) as listening:
        runs_dir.mkdir(parents=True, exist_ok=True)
        runs = Runs(runs_dir, validator=SpecValidator(Roots.of(roots, [runs_dir]), runs_dir.resolve()))
        server = HttpServer(runs, host, port, auth, listening)
        log.info("serving at %s, runs in %s", server.url, runs_dir)
        try:
            while server.alive and not interrupts.wait():
                pass
            if stop_on_exit:
                _stop(runs, interrupts)
        finally:
            server.close()
            _say_what_goes_on(runs)
            runs.leave_all()
            runs.join()
            runs.close()


def _stop(runs: Runs, interrupts: Interrupts) -> None:
    runs.stop_all()
    while runs.busy():
        if interrupts.wait() and interrupts.count > 1:
            runs.stop_all(now=True)


def _say_what_goes_on(runs: Runs) -> None:
    going = [run.id for run in runs.here() if not run.over.is_set()]
    if going:
        log.info("left to go on alone, until a control plane is started for the same directory: %s", ", ".join(going))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or asyncio leaves Nagle's algorithm on, which holds every answer back for 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise XtokenError(f"cannot serve at {host}:{port}: {error.strerror}: choose another --port") from error
    return listening
