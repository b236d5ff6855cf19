"""Who may ask: by a name of our own, from no foreign page, with the token if there is one, in a bounded body."""

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
"""What may be asked without the token, and tells nothing about runs."""
SHORTEST_TOKEN = 16
POLICY_VIOLATION = 1008
BEARER = "Bearer "


@dataclass(frozen=True)
class Auth:
    """Who may ask.

    Attributes:
        token: What a request must carry; None where only this machine can reach the control plane.
        names: Host names, beyond this machine's addresses, under which it may be asked for.
        remote: Whether it is served to other machines, and so may be asked for by any address.
        open_paths: Paths that need no token, beyond the probes: a page's own log-in.
    """

    token: str | None = None
    names: frozenset[str] = frozenset()
    remote: bool = False
    open_paths: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, host: str, token_file: Path | None, names: Iterable[str] = ()) -> Auth:
        """The access to a control plane served at `host`.

        Raises:
            ConfigError: Other machines could reach it and it has no token, or the token's file is not private.
        """
        remote = not is_loopback(host)
        if remote and token_file is None:
            raise ConfigError(f"--host {host}: other machines can reach it: give a --token-file")
        token = read_token(token_file) if token_file is not None else None
        return cls(token, frozenset(name.lower() for name in names), remote)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason why a request is refused; None if it is not."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if not self._is_own(_host_of(f"//{host}")):
            return 403, f"the Host header names {host!r}: this control plane is not asked for under that name"
        origin = headers.get(b"origin")
        if origin is not None and not self._same_origin(origin, host):
            return 403, f"a page of {origin!r} may not use this control plane"
        if self.token is not None and not self._has_token(scope["path"], headers):
            return 401, "a bearer token is needed: Authorization: Bearer TOKEN"
        return None

    @property
    def cookie(self) -> str:
        """The value of the cookie that stands for the token, for pages that a browser asks for."""
        return hmac.new((self.token or "").encode(), COOKIE.encode(), hashlib.sha256).hexdigest()

    def accepts(self, token: str) -> bool:
        """Whether this is the token."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def _is_own(self, name: str) -> bool:
        return is_loopback(name) or name.lower() in self.names or (self.remote and _is_address(name))

    def _same_origin(self, origin: str, host: str) -> bool:
        theirs, ours = urlsplit_safely(origin), urlsplit_safely(f"//{host}")
        if theirs is None or ours is None or theirs[0] not in ("http", "https") or theirs[2] != ours[2]:
            return False
        return theirs[1] == ours[1] or (is_loopback(theirs[1]) and is_loopback(ours[1]))

    def _has_token(self, path: str, headers: dict[bytes, str]) -> bool:
        if path in PROBES or path in self.open_paths:
            return True
        given = headers.get(b"authorization", "")
        if given[: len(BEARER)].lower() == BEARER.lower():
            return self.accepts(given[len(BEARER) :].strip())
        try:
            found = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.cookie.encode())


class AuthMiddleware:
    """Middleware that refuses what `Auth` refuses, and bodies that are too long."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, 403 or 413, or let the request through."""
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
            answer = problem(*refusal)
            if refusal[0] == 401:
                answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)
        elif _length(scope) > MAX_BODY_BYTES:
            await problem(413, f"a request has at most {MAX_BODY_BYTES} bytes")(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive), send)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    if host.lower() == LOCAL_NAME:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_token(file: Path) -> str:
    """The token in a file; a missing file is made, with a token that nobody could guess.

    Raises:
        ConfigError: It cannot be read or made, others may read it, or it is too short.
    """
    try:
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(handle, "w", encoding="ascii") as new:
                new.write(secrets.token_urlsafe(32) + "\n")
        with file.open("rb") as found:
            status = os.fstat(found.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
                raise ConfigError(f"the token file {file} must be yours alone: chmod 600 {file}")
            token = found.read(4096).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {file} holds no text") from error
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token in {file} is shorter than {SHORTEST_TOKEN} characters")
    return token


def urlsplit_safely(url: str) -> tuple[str, str, int] | None:
    """A URL's scheme, host and port, the port being the scheme's own if there is none; None if it is no URL."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme or "http"
        return scheme, parts.hostname or "", parts.port or (443 if scheme == "https" else 80)
    except ValueError:
        return None


def _host_of(url: str) -> str:
    found = urlsplit_safely(url)
    return found[1] if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _length(scope: Scope) -> float:
    given = dict(scope["headers"]).get(b"content-length", b"0")
    return int(given) if given.isdigit() and len(given) < 20 else float("inf")


def _bounded(receive: Receive) -> Receive:
    """The request's body, cut off where it becomes too long without having said so."""
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            return {"type": "http.disconnect"}
        return message

    return bounded
