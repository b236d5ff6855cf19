"""Who may ask: loopback only, under a loopback name, from no foreign web page, and with a body of sensible size."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.control.problems import problem
from xtoken_core.errors import ConfigError

MAX_BODY_BYTES = 1 << 20
LOCAL_NAME = "localhost"


def check_loopback(host: str) -> None:
    """Refuse an address that other machines could reach.

    Raises:
        ConfigError: It is no loopback address.
    """
    if not is_loopback(host):
        raise ConfigError(f"--host {host}: only loopback addresses are served, 127.0.0.1 for example")


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    if host == LOCAL_NAME:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LocalOnly:
    """Middleware that refuses requests under a foreign name, and those that a foreign page makes a browser send."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403 or 413, or let the request through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        reason = _refused(headers)
        if reason:
            await problem(403, reason)(scope, receive, send)
        elif (
            not headers.get(b"content-length", "0").isdigit()
            or int(headers.get(b"content-length", "0")) > MAX_BODY_BYTES
        ):
            await problem(413, f"a request has at most {MAX_BODY_BYTES} bytes")(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive), send)


def _refused(headers: dict[bytes, str]) -> str:
    host = headers.get(b"host", "")
    if not _names_loopback(f"//{host}"):
        return f"the Host header names {host!r}: this control plane is asked for as 127.0.0.1 or localhost"
    origin = headers.get(b"origin")
    if origin is not None and not _names_loopback(origin):
        return f"a page of {origin!r} may not use this control plane"
    return ""


def _names_loopback(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


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
