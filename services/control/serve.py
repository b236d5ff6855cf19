"""Serving the control plane: in a thread for a run in place, or as `xtoken control`."""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path

import uvicorn

from services.control.access import check_loopback
from services.control.app import create_app
from services.control.interrupts import Interrupts
from services.control.runs import Runs
from xtoken_core.errors import XtokenError

log = logging.getLogger("xtoken.control")

BACKLOG = 128


class HttpServer:
    """The control plane's server, in a thread of its own.

    Args:
        runs: What it serves.
        host: A loopback address.
        port: 0 takes any free one.

    Raises:
        ConfigError: The host is no loopback address.
        XtokenError: The port is in use.
    """

    def __init__(self, runs: Runs, host: str, port: int) -> None:
        check_loopback(host)
        self._socket = _listen(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            create_app(runs), log_level="warning", lifespan="off", access_log=False, log_config=None
        )
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


def serve(host: str, port: int, runs_dir: Path) -> None:
    """Serve until SIGTERM or SIGINT, then stop what runs, in order; a second one ends it at once.

    Raises:
        XtokenError: The address cannot be served, or the runs' directory cannot be made.
    """
    check_loopback(host)
    runs = Runs(runs_dir)
    server = HttpServer(runs, host, port)
    log.info("serving at %s, runs in %s", server.url, runs_dir)
    with Interrupts() as interrupts:
        try:
            while server.alive and not interrupts.wait():
                pass
            runs.stop_all()
            while runs.busy():
                if interrupts.wait() and interrupts.count > 1:
                    runs.stop_all(now=True)
        finally:
            runs.stop_all(now=True)
            runs.join()
            server.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise XtokenError(f"cannot serve at {host}:{port}: {error.strerror}: choose another --port") from error
    return listening
