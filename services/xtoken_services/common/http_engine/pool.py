"""Requests to servers that run the same model: spread over them, limited in number, and repeated until a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from xtoken_core.config.served import ServedSpec
from xtoken_services.common.http_engine.errors import EngineError, EngineRefusalError
from xtoken_services.common.http_engine.keys import read_key

log = logging.getLogger("xtoken.engine")
logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every request

CONNECT_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
MAX_RESPONSE = 1 << 29
"""Bytes of the longest response that is read."""
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a request is repeated, on another server if there is one."""
SHOWN = 200
"""Characters of a server's own message in an error."""


class _TryAgainError(Exception):
    """A request has failed in a way that may pass.

    Attributes:
        pause_s: Seconds that the server wants to be left alone; None if it does not say.
    """

    def __init__(self, reason: str, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


@dataclass
class Replica:
    """One server.

    Attributes:
        url: Its address.
        client: Its connections.
        in_flight: Requests that it has not answered yet.
        failures: Failures since its last answer.
        free_at: Time on the monotonic clock before which it gets no request.
    """

    url: str
    client: httpx.Client = field(repr=False)
    in_flight: int = 0
    failures: int = 0
    free_at: float = 0.0


class EnginePool:
    """Servers that run the same model. Any thread may call it.

    A request goes to the server with the fewest unanswered ones. One that fails gets none for a pause, which doubles
    with every failure, or as long as it asks for.

    Args:
        served: The settings.
        field: Their name in the run file, for errors.

    Attributes:
        requests: Requests that were answered.
        retries: Requests that were repeated.
        received: Bytes of all answers.
    """

    def __init__(self, served: ServedSpec, field: str) -> None:
        self.field, self.timeout_s, self.limit = field, served.url_timeout_s, served.url_connections
        self._key = read_key(served.url_key_file, f"{field}.url_key_file")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=self.limit, max_keepalive_connections=self.limit)
        # trust_env=False: a proxy from the environment must not see the key. Nor must another host: no redirects.
        self.replicas = [
            Replica(url, httpx.Client(base_url=url, headers=headers, limits=limits, trust_env=False))
            for url in served.url
        ]
        self.requests = self.retries = self.received = 0
        self._changed = threading.Condition()
        self._closed = False

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        replica: Replica | None = None,
        decode: Callable[[bytearray], Any] = msgspec.json.decode,
    ) -> Any:
        """Send a request, and repeat it until it is answered.

        Args:
            method: `GET` or `POST`.
            path: Path below a server's address.
            body: Its body, sent as JSON.
            replica: The server; None: any.
            decode: Reads the answer.

        Returns:
            The answer.

        Raises:
            EngineError: None has answered in time.
            EngineRefusalError: A server refuses the request.
        """
        deadline = time.monotonic() + self.timeout_s
        content = None if body is None else msgspec.json.encode(body)
        reason = f"each has {self.limit} requests that it has not answered"
        while True:
            chosen = self._acquire(replica, deadline, reason)
            try:
                data = self._attempt(chosen, method, path, content, deadline)
            except _TryAgainError as error:
                reason = f"{chosen.url}: {error}"
                self._release(chosen, failed=True, pause_s=error.pause_s)
                if not self._closed:
                    log.warning("%s %s: %s: trying again", method, path, reason)
                continue
            except BaseException:
                self._release(chosen)
                raise
            self._release(chosen)
            try:
                return decode(data)
            except (msgspec.DecodeError, RecursionError) as error:
                raise EngineRefusalError(
                    f"{self.field}.url: {chosen.url}{path} answers with something else than JSON: check the address "
                    "and url_engine"
                ) from error

    def close(self) -> None:
        """Close all connections; requests that wait fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for replica in self.replicas:
            replica.client.close()

    def _acquire(self, wanted: Replica | None, deadline: float, reason: str) -> Replica:
        """Wait for a server that may get a request."""
        candidates = self.replicas if wanted is None else [wanted]
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                free = [one for one in candidates if one.in_flight < self.limit and one.free_at <= now]
                if free and now < deadline:
                    chosen = min(free, key=lambda one: (one.in_flight, one.failures))
                    chosen.in_flight += 1
                    return chosen
                if now >= deadline:
                    break
                paused = [one.free_at for one in candidates if one.free_at > now]
                self._changed.wait(min([deadline, *paused]) - now)
        if self._closed:
            raise EngineError(f"{self.field}.url: the connections were closed")
        raise EngineError(
            f"{self.field}.url: no server has answered in time; {reason}: check that it runs, or raise "
            f"{self.field}.url_timeout_s"
        )

    def _release(self, replica: Replica, *, failed: bool = False, pause_s: float | None = None) -> None:
        with self._changed:
            replica.in_flight -= 1
            if failed:
                self.retries += 1
                doubled = min(FIRST_PAUSE_S * 2.0**replica.failures, LONGEST_PAUSE_S)
                replica.failures = min(replica.failures + 1, 16)
                replica.free_at = time.monotonic() + (doubled if pause_s is None else pause_s)
            else:
                replica.failures = 0
            self._changed.notify_all()

    def _attempt(self, replica: Replica, method: str, path: str, content: bytes | None, deadline: float) -> bytearray:
        """Send a request once, and return the answer."""
        left = max(deadline - time.monotonic(), 0.01)
        if len(self.replicas) > 1:
            left = max(left / 2, 0.01)  # a server that accepts and never answers leaves time for another
        until = time.monotonic() + left
        timeout = httpx.Timeout(left, connect=min(CONNECT_S, left))
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            with replica.client.stream(method, path, content=content, headers=headers, timeout=timeout) as response:
                status, pause = response.status_code, _seconds(response.headers.get("Retry-After"))
                data = bytearray()
                for part in response.iter_bytes():
                    data += part
                    if len(data) > MAX_RESPONSE:
                        raise EngineRefusalError(
                            f"{self.field}.url: {replica.url}{path} answers with more than {MAX_RESPONSE} bytes: lower "
                            "topk or context_length"
                        )
                    if time.monotonic() > until:
                        raise _TryAgainError("its answer takes too long")
        except httpx.TimeoutException as error:
            raise _TryAgainError("no answer") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _TryAgainError(str(error)[:SHOWN] or type(error).__name__) from error
        if status in TRY_AGAIN:
            raise _TryAgainError(f"status {status}: {self._message(data)}", pause)
        if status != 200:
            hint = ": it takes another key (url_key_file, or the variable XTOKEN_ENGINE_KEY)" if status == 401 else ""
            raise EngineRefusalError(
                f"{self.field}.url: {replica.url}{path} refuses the request with status {status}: "
                f"{self._message(data)}{hint}"
            )
        with self._changed:
            self.requests += 1
            self.received += len(data)
        return data

    def _message(self, data: bytearray) -> str:
        """Return a server's own message on one line, shortened, without the key that it may repeat."""
        text = bytes(data[: 16 * SHOWN]).decode("utf-8", errors="replace")
        try:
            document = msgspec.json.decode(data)
            error = document.get("error", document) if isinstance(document, dict) else text
            text = str(error.get("message", error.get("detail", error)) if isinstance(error, dict) else error)
        except (msgspec.DecodeError, RecursionError):
            pass
        text = text.replace(self._key, "[key]") if self._key else text
        printable = "".join(character if character.isprintable() else " " for character in text)
        return " ".join(printable.split())[:SHOWN] or "without a message"


def _seconds(header: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None without one, or if it is a date."""
    try:
        return min(max(float(header), 0.0), LONGEST_PAUSE_S) if header else None
    except ValueError:
        return None
