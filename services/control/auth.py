"""Auth middleware: Host and Origin check, bearer token, limit of the body size."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.control.problems import problem
from xtoken_core.errors import ConfigError

MAX_BODY_BYTES = 1 << 20
LOCAL_NAME = "localhost"
COOKIE = "xtoken_session"
PROBES = ("/livez", "/readyz")
"""Paths that need no token, as they reveal nothing about runs."""
SHORTEST_TOKEN = 16
POLICY_VIOLATION = 1008
BEARER = "Bearer "


@dataclass(frozen=True)
class Auth:
    """Authentication and authorization of requests.

    Attributes:
        token: Token that requests must carry; None for a control plane that listens on a loopback address only.
        names: Host names accepted in the Host header, in addition to addresses of this machine.
        remote: True if other machines can reach the control plane, in which case the Host header may be any address.
        open_paths: Paths that need no token in addition to the probes: the login page and static files.
    """

    token: str | None = None
    names: frozenset[str] = frozenset()
    remote: bool = False
    open_paths: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, host: str, token_file: Path | None, names: Iterable[str] = ()) -> Auth:
        """Return the settings for a control plane that listens on `host`.

        Raises:
            ConfigError: Other machines can reach the host and there is no token, or the token file is not private.
        """
        remote = not is_loopback(host)
        if remote and token_file is None:
            raise ConfigError(f"host {host} is reachable from other machines: a token is required (--token-file)")
        token = read_token(token_file) if token_file is not None else None
        return cls(token, frozenset(name.lower() for name in names), remote)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason of a refusal, or None if the request is accepted."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if not self._is_own(_host_of(f"//{host}")):
            return 403, f"the Host header {host!r} is not a name of this control plane"
        origin = headers.get(b"origin")
        if origin is not None and not self._same_origin(origin, host):
            return 403, f"cross-origin request from {origin!r}"
        if self.token is not None and not self._has_token(scope["path"], headers):
            return 401, "bearer token required: Authorization: Bearer TOKEN"
        return None

    @property
    def cookie(self) -> str:
        """Session cookie: an HMAC of the token, so that the browser does not store the token itself."""
        return hmac.new((self.token or "").encode(), COOKIE.encode(), hashlib.sha256).hexdigest()

    def accepts(self, token: str) -> bool:
        """Return True if `token` is the control plane's token."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def _is_own(self, name: str) -> bool:
        return is_loopback(name) or name.lower() in self.names or (self.remote and _is_address(name))

    def _same_origin(self, origin: str, host: str) -> bool:
        remote, own = urlsplit_safely(origin), urlsplit_safely(f"//{host}")
        if remote is None or own is None or remote[0] not in ("http", "https") or remote[2] != own[2]:
            return False
        return remote[1] == own[1] or (is_loopback(remote[1]) and is_loopback(own[1]))

    def _has_token(self, path: str, headers: dict[bytes, str]) -> bool:
        if path in PROBES or path in self.open_paths:
            return True
        given = headers.get(b"authorization", "")
        if given[: len(BEARER)].lower() == BEARER.lower():
            return self.accepts(given[len(BEARER) :].strip())
        try:
            cookie = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self.cookie.encode())


class AuthMiddleware:
    """Middleware that applies `Auth` to every request and limits the size of its body."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 401, 403 or 413, or pass the request on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._auth.refusal(scope)
        if scope["type"] == "websocket":
            if refusal is not None:
                await receive()
                await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": refusal[1][:120]})
            else:
                await self._app(scope, receive, send)
            return
        if refusal is not None:
            response = problem(*refusal)
            if refusal[0] == 401:
                response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
        elif _length(scope) > MAX_BODY_BYTES:
            await problem(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive), send)


def is_loopback(host: str) -> bool:
    """Return True if a host name or address is a loopback one."""
    if host.lower() == LOCAL_NAME:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(file: Path) -> str:
    """Return the token in a file; create the file with a random token if it does not exist.

    Raises:
        ConfigError: The file cannot be read or created, other users can read it, or the token is too short.
    """
    try:
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(handle, "w", encoding="ascii") as new:
                new.write(secrets.token_urlsafe(32) + "\n")
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
                raise ConfigError(f"the token file {file} must be readable by you only: chmod 600 {file}")
            token = opened.read(4096).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {file} is not a text file") from error
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token in {file} is shorter than {SHORTEST_TOKEN} characters")
    return token


def urlsplit_safely(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port (the scheme's default if none is given) of a URL, or None if it is malformed."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme or "http"
        return scheme, parts.hostname or "", parts.port or (443 if scheme == "https" else 80)
    except ValueError:
        return None


def _host_of(url: str) -> str:
    parts = urlsplit_safely(url)
    return parts[1] if parts else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _length(scope: Scope) -> float:
    length = dict(scope["headers"]).get(b"content-length", b"0")
    return int(length) if length.isdigit() and len(length) < 20 else float("inf")


def _bounded(receive: Receive) -> Receive:
    """Return a `receive` that disconnects once a body without a Content-Length becomes too large."""
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            return {"type": "http.disconnect"}
        return message

    return bounded
