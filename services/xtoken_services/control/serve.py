"""HTTP server of the control plane, and the loop of `xtoken control`."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from xtoken_core.errors import ConfigError, XtokenError
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.files.private_files import control_token_file
from xtoken_services.common.processes.descriptors import raise_descriptor_limit
from xtoken_services.control.app import create_app
from xtoken_services.control.auth import Auth
from xtoken_services.control.http_limits import KEEP_ALIVE_S, WANTED_DESCRIPTORS, LimitedProtocol
from xtoken_services.control.runs import Runs
from xtoken_services.control.validation import SpecValidator
from xtoken_services.supervisor.interrupts import Interrupts

log = logging.getLogger("xtoken.control")

BACKLOG = 1024
SHUTDOWN_S = 2


class HttpServer:
    """HTTP server in a thread of its own.

    Args:
        runs: Runs to serve.
        host: Address to listen on.
        port: Port to listen on; 0 for any free port.
        auth: Authentication settings.
        listening: Socket that already listens on the address.
        proxies: Addresses whose X-Forwarded-For and X-Forwarded-Proto headers are believed.

    Raises:
        XtokenError: The port is in use.
    """

    def __init__(
        self,
        runs: Runs,
        host: str,
        port: int,
        auth: Auth,
        listening: socket.socket | None = None,
        proxies: Sequence[str] = (),
    ) -> None:
        self._socket = listening or _listen(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._app = create_app(runs, auth)
        config = uvicorn.Config(
            self._app,
            log_level="warning",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=SHUTDOWN_S,
            server_header=False,
            http=LimitedProtocol,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            proxy_headers=bool(proxies),
            forwarded_allow_ips=list(proxies),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """True while the server is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving, and cancel builds of tables."""
        self._app.state.table_builds.close()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def serve(
    host: str,
    port: int,
    runs_dir: Path,
    *,
    roots: Sequence[Path] = (),
    token_file: Path | None = None,
    names: Sequence[str] = (),
    proxies: Sequence[str] = (),
    stop_on_exit: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        host: Address to listen on; addresses other than loopback need a token file.
        port: Port to listen on; 0 for any free port.
        runs_dir: Directory of the database and of the runs' outputs.
        roots: Directories that runs may read, in addition to `runs_dir`.
        token_file: File with the bearer token; None: the user's own.
        names: Host names accepted in the Host header.
        proxies: Addresses or networks of proxies, which name their clients in X-Forwarded-For.
        stop_on_exit: True to stop all runs on exit, gracefully at the first signal and immediately at the second;
            otherwise they keep running until the next control plane recovers them.

    Raises:
        ConfigError: A token is missing or unusable, or a proxy is no address.
        XtokenError: The address cannot be served, or the runs' directory cannot be created.
    """
    auth = Auth.of(host, token_file, names)
    _check_proxies(proxies)
    Roots.of(roots, [])  # checked first: an invalid root must not create the directory or touch a run
    raise_descriptor_limit(WANTED_DESCRIPTORS)
    with Interrupts() as interrupts, _listen(host, port) as listening:
        runs_dir.mkdir(parents=True, exist_ok=True)
        runs = Runs(runs_dir, validator=SpecValidator(Roots.of(roots, [runs_dir]), runs_dir.resolve()))
        server = HttpServer(runs, host, port, auth, listening, proxies)
        log.info("serving at %s, runs in %s, token in %s", server.url, runs_dir, token_file or control_token_file())
        try:
            while server.alive and not interrupts.wait():
                pass
            if stop_on_exit:
                _stop(runs, interrupts)
        finally:
            server.close()
            _log_active(runs)
            runs.detach_all()
            runs.join()
            runs.close()


def _check_proxies(proxies: Sequence[str]) -> None:
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ConfigError(f"--trusted-proxy {proxy}: give an address or a network such as 10.0.0.0/8") from error


def _stop(runs: Runs, interrupts: Interrupts) -> None:
    runs.stop_all()
    while runs.active():
        if interrupts.wait() and interrupts.count > 1:
            runs.stop_all(now=True)


def _log_active(runs: Runs) -> None:
    if active := runs.active():
        log.info("still running, to be recovered by the next control plane: %s", ", ".join(run.id for run in active))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol must be TCP, or asyncio does not set TCP_NODELAY, and every response is delayed by 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise XtokenError(f"cannot serve at {host}:{port}: {error.strerror}: choose another --port") from error
    return listening
