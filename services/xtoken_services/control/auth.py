"""Auth middleware: Host and Origin check, bearer token, session cookie."""

from __future__ import annotations

import hmac
import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xtoken_core.data_plane.address import create_token, is_loopback
from xtoken_core.errors import ConfigError, InputError, os_errors_as
from xtoken_services.common.files.private_files import control_token_file
from xtoken_services.control.problems import problem
from xtoken_services.control.sessions import DELAY_S, Sessions, WrongTokens

COOKIE = "xtoken_session"
PROBES = ("/livez", "/readyz")
"""Paths that need no token, as they reveal nothing about runs."""
SHORTEST_TOKEN = 16
BEARER = "Bearer "
SINGLE_HEADERS = ("host", "origin", "authorization")
"""Headers that decide about access: with two of them, a proxy and this server could read different ones."""
NO_HOST = frozenset("@/\\?#")
"""Characters that a URL has around its host: `localhost@evil.example` could be read in two ways."""
TOKEN_REQUIRED = "bearer token required: Authorization: Bearer TOKEN"
WRONG_TOKEN = "bearer token required: the given one is wrong"
TOO_MANY_WRONG = "too many wrong tokens from this address: retry in a moment"
RETRY_AFTER = str(math.ceil(DELAY_S))


@dataclass(frozen=True)
class Auth:
    """Authentication and authorization of requests.

    Attributes:
        token: Token that requests must carry; None: they need none.
        names: Host names accepted in the Host header, in addition to addresses of this machine.
        remote: True if other machines can reach the control plane, in which case the Host header may be any address.
        open_paths: Paths that need no token in addition to the probes: the login page and static files.
        sessions: Sessions of browsers.
        wrong_tokens: Delay of answers to wrong tokens.
    """

    token: str | None = None
    names: frozenset[str] = frozenset()
    remote: bool = False
    open_paths: tuple[str, ...] = field(default=())
    sessions: Sessions = field(default_factory=Sessions, compare=False)
    wrong_tokens: WrongTokens = field(default_factory=WrongTokens, compare=False)

    @classmethod
    def of(cls, host: str, token_file: Path | None, names: Iterable[str] = ()) -> Auth:
        """Return the settings for a control plane that listens on `host`; without a token file, this user's own.

        Raises:
            ConfigError: Other machines can reach the host and there is no token file, or its token is too short.
            InputError: The token file is not private.
        """
        remote = not is_loopback(host)
        if remote and token_file is None:
            raise ConfigError(f"host {host} is reachable from other machines: a token is required (--token-file)")
        return cls(read_token(token_file or control_token_file()), frozenset(name.lower() for name in names), remote)

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason of a refusal, or None if the request is accepted."""
        request = HTTPConnection(scope)
        for single in SINGLE_HEADERS:
            # 400, as RFC 9112 (section 3.2) demands for Host.
            if len(request.headers.getlist(single)) > 1:
                return 400, f"more than one {single.title()} header"
        host = request.headers.get("host", "")
        # DNS rebinding: a foreign page's name that resolves to this machine must not reach the API.
        if set(host) & NO_HOST or not self._is_own(_host_of(f"//{host}")):
            return 403, f"the Host header {host!r} is not a name of this control plane"
        # Browsers send it with every cross-site write; programs need not, and are known by their token.
        origin = request.headers.get("origin")
        if origin is not None and not self._same_origin(origin, f"{scope['scheme']}://{host}"):
            return 403, f"cross-origin request from {origin!r}"
        # After Host and Origin, which hold for open paths too.
        if self.token is None or scope["path"] in PROBES or scope["path"] in self.open_paths:
            return None
        given = bearer_of(request.headers.get("authorization", ""))
        if given is None:
            cookie = request.cookies.get(COOKIE)
            return None if cookie is not None and self.sessions.is_open(cookie) else (401, TOKEN_REQUIRED)
        # Before the comparison: while an address is delayed, a right guess gets no other answer.
        if self.wrong_tokens.blocks(address_of(scope)):
            return 429, TOO_MANY_WRONG
        return None if self.accepts(given) else (401, WRONG_TOKEN)

    def accepts(self, token: str) -> bool:
        """Return True if `token` is the control plane's token."""
        # In constant time, which does not show how many characters are right.
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def _is_own(self, name: str) -> bool:
        return is_loopback(name) or name.lower() in self.names or (self.remote and _address(name) is not None)

    def _same_origin(self, origin: str, url: str) -> bool:
        remote, own = urlsplit_safely(origin), urlsplit_safely(url)
        if remote is None or own is None or remote[0] not in ("http", "https") or remote[2] != own[2]:
            return False
        # `localhost` and 127.0.0.1 are one machine, and users type either.
        return remote[1] == own[1] or (is_loopback(remote[1]) and is_loopback(own[1]))


class AuthMiddleware:
    """Middleware that applies `Auth` to every request."""

    def __init__(self, app: ASGIApp, auth: Auth) -> None:
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond with 400, 401, 403 or 429, or pass the request on. No answer's type is guessed by a browser."""

        async def send_typed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Content-Type-Options"] = "nosniff"
            await send(message)

        refusal = None if scope["type"] == "lifespan" else self._auth.refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_typed)
            return
        response = problem(*refusal)
        if refusal[0] == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal[0] == 429:
            response.headers["Retry-After"] = RETRY_AFTER
        if refusal[1] == WRONG_TOKEN:
            await self._auth.wrong_tokens.delay(address_of(scope))
        await response(scope, receive, send_typed)


def address_of(scope: Scope) -> str:
    """Return the address of a request's client."""
    return scope["client"][0] if scope.get("client") else ""


def bearer_of(authorization: str) -> str | None:
    """Return the token of an Authorization header; None if it has none."""
    if authorization[: len(BEARER)].lower() != BEARER.lower():
        return None
    return authorization[len(BEARER) :].strip()


def read_token(file: Path) -> str:
    """Return the token in a file; create the file with a random token if it does not exist.

    Raises:
        ConfigError: The token is too short.
        InputError: The file cannot be read or created, or other users can read it.
    """
    with os_errors_as(InputError, f"cannot create the token file {file}"):
        token = create_token(file)
    if len(token) < SHORTEST_TOKEN:
        raise ConfigError(f"the token in {file} is shorter than {SHORTEST_TOKEN} characters")
    return token


def urlsplit_safely(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port (the scheme's default if none is given) of a URL, or None if it is malformed."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme or "http"
        return scheme, parts.hostname or "", parts.port or (443 if scheme in ("https", "wss") else 80)
    except ValueError:
        return None


def _host_of(url: str) -> str:
    parts = urlsplit_safely(url)
    return parts[1] if parts else ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
