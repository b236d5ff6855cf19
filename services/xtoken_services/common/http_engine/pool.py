"""Requests to servers that run the same model: spread over them, limited in number, and repeated until a deadline."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from xtoken_core.config.served import ServedSpec
from xtoken_services.common.http_engine.errors import BadRequestError, EngineError, EngineRefusalError
from xtoken_services.common.http_engine.keys import read_key
from xtoken_services.common.processes.waits import Wait

log = logging.getLogger("xtoken.engine")
for _name in ("httpx", "httpcore"):  # they would log every request, and headers in which a server repeats the key
    logging.getLogger(_name).setLevel(logging.WARNING)

Answer = TypeVar("Answer")
Request = tuple[str, str, bytes | None]
"""Method, path below a server's address, and body."""
CONNECT_S, CLOSE_S = 10.0, 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
MAX_RESPONSE, SHORT_RESPONSE = 1 << 29, 1 << 20
"""Bytes of the longest response that is read; of one without lists, and of the rest of any other."""
ENTRY = 256
"""Bytes that a token may take in a response, with its name and its log-probability: 100 are usual."""
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which a request is repeated, on another server if there is one."""
BAD_REQUEST = (400, 413, 422)
"""Statuses of a refusal for what the request says."""
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
        held: It gets only requests that name it.
    """

    url: str
    client: httpx.AsyncClient = field(repr=False)
    in_flight: int = 0
    failures: int = 0
    free_at: float = 0.0
    held: bool = False


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
        # A few KB of compressed bytes may be gigabytes of text.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        limits = httpx.Limits(max_connections=self.limit, max_keepalive_connections=self.limit)
        # trust_env=False: a proxy from the environment must not see the key. Nor must another host: no redirects.
        self.replicas = [
            Replica(url, httpx.AsyncClient(base_url=url, headers=headers, limits=limits, trust_env=False))
            for url in served.url
        ]
        self.requests = self.retries = self.received = 0
        self._changed = threading.Condition()
        self._closed = False
        # Only an event loop ends a whole exchange at a deadline: a blocking read starts its timeout with every byte.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="requests", daemon=True).start()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        decode: Callable[[bytearray], Answer],
        entries: int = 0,
        replica: Replica | None = None,
        usable: Callable[[Answer, Replica], bool] | None = None,
        repeats: bool = True,
    ) -> Answer:
        """Return the answer to a request, which is repeated until there is one.

        Args:
            method: `GET` or `POST`.
            path: Path below a server's address.
            body: Its body, sent as JSON.
            decode: Reads the answer.
            entries: Tokens that the answer may list, which bound its length.
            replica: The server; None: any.
            usable: Called with an answer and its server: False repeats the request. Its own time is not the request's.
            repeats: False: send it once.

        Raises:
            EngineError: None has answered in time.
            BadRequestError: A server refuses the request for what it says.
            EngineRefusalError: It refuses it for another reason, or answers in another form.
        """
        deadline = time.monotonic() + self.timeout_s
        request = method, path, None if body is None else msgspec.json.encode(body)
        most = min(SHORT_RESPONSE + ENTRY * entries, MAX_RESPONSE)
        reason = f"each has {self.limit} requests that it has not answered"
        with Wait() as wait:
            while True:
                chosen = self._acquire(replica, deadline, reason)
                wait.whom = wait.whom if wait.whom.startswith(chosen.url) else chosen.url
                try:
                    data = self._attempt(chosen, request, most, deadline, named=replica is not None)
                except _TryAgainError as error:
                    reason = wait.whom = f"{chosen.url}: {error}"
                    self._release(chosen, failed=True, pause_s=error.pause_s)
                    if not repeats:
                        raise EngineError(f"{self.field}.url: {chosen.url}{path}: {error}") from error
                    if not self._closed:
                        log.warning("%s %s: %s: trying again", method, path, reason)
                    continue
                except BaseException:
                    self._release(chosen)
                    raise
                self._release(chosen)
                answer = self._decoded(data, decode, chosen.url + path)
                began = time.monotonic()
                if usable is None or usable(answer, chosen):
                    return answer
                deadline += time.monotonic() - began
                reason = f"{chosen.url}: its answers cannot be used"
                with self._changed:
                    self.retries += 1

    def _decoded(self, data: bytearray, decode: Callable[[bytearray], Answer], where: str) -> Answer:
        try:
            return decode(data)
        except msgspec.ValidationError as error:
            raise EngineRefusalError(
                f"{self.field}.url: {where} gives an answer of another form: {error}: check url_engine"
            ) from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineRefusalError(
                f"{self.field}.url: {where} answers with something else than JSON: check the address and url_engine"
            ) from error

    @contextmanager
    def holding(self, replica: Replica) -> Iterator[None]:
        """Give a server only requests that name it: others would take all its connections while it is paused."""
        replica.held = True
        try:
            yield
        finally:
            with self._changed:
                replica.held = False
                self._changed.notify_all()

    def clean(self, text: str) -> str:
        """Return a server's own words on one line, shortened, without the key that they may repeat."""
        text = text.replace(self._key, "[key]") if self._key else text
        printable = "".join(character if character.isprintable() else " " for character in text)
        return " ".join(printable.split())[:SHOWN]

    def close(self) -> None:
        """Close all connections; requests that wait fail."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _close(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        for replica in self.replicas:
            await replica.client.aclose()

    def _acquire(self, wanted: Replica | None, deadline: float, reason: str) -> Replica:
        """Wait for a server that may get a request."""
        candidates = self.replicas if wanted is None else [wanted]
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                possible = [one for one in candidates if one is wanted or not one.held]
                free = [one for one in possible if one.in_flight < self.limit and one.free_at <= now]
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

    def _attempt(self, replica: Replica, request: Request, most: int, deadline: float, *, named: bool) -> bytearray:
        """Send a request once, and return the answer; one that names no server may be tried on another."""
        left = max(deadline - time.monotonic(), 0.01)
        if len(self.replicas) > 1 and not named:
            left = max(left / 2, 0.01)  # a server that accepts and never answers leaves time for another
        where = f"{self.field}.url: {replica.url}{request[1]}"
        with self._changed:
            if self._closed:
                raise EngineError(f"{self.field}.url: the connections were closed")
            future = asyncio.run_coroutine_threadsafe(self._exchange(replica, request, most, left), self._loop)
        try:
            status, headers, data = future.result()
        except CancelledError as error:
            raise EngineError(f"{self.field}.url: the connections were closed") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _TryAgainError("no answer") from error
        except httpx.ProtocolError as error:  # its text repeats what the server sent, which may hold the key
            raise _TryAgainError("it closes the connection, or answers with something else than HTTP") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _TryAgainError(self.clean(str(error)) or type(error).__name__) from error
        if (coding := headers.get("Content-Encoding", "identity")) != "identity":
            raise EngineRefusalError(f"{where} encodes its answer ({self.clean(coding)}), which was not requested")
        if len(data) > most:
            raise EngineRefusalError(
                f"{where} answers with more than {most} bytes: lower topk or context_length, or check url_engine"
            )
        if status in TRY_AGAIN:
            raise _TryAgainError(f"status {status}: {self._message(data)}", _seconds(headers.get("Retry-After")))
        if status != 200:
            hint = ": it takes another key (url_key_file, or the variable XTOKEN_ENGINE_KEY)" if status == 401 else ""
            kind = BadRequestError if status in BAD_REQUEST else EngineRefusalError
            raise kind(f"{where} refuses the request with status {status}: {self._message(data)}{hint}")
        with self._changed:
            self.requests += 1
            self.received += len(data)
        return data

    async def _exchange(
        self, replica: Replica, request: Request, most: int, limit_s: float
    ) -> tuple[int, httpx.Headers, bytearray]:
        """Return status, headers and content of an answer, read until it is longer than `most`.

        Raises:
            TimeoutError: It is not complete after `limit_s` seconds.
        """
        method, path, content = request
        sent = {"Content-Type": "application/json"} if content is not None else {}
        timeout = httpx.Timeout(None, connect=min(CONNECT_S, limit_s))
        data = bytearray()
        async with asyncio.timeout(limit_s):
            async with replica.client.stream(method, path, content=content, headers=sent, timeout=timeout) as response:
                async for part in response.aiter_raw():
                    data += part
                    if len(data) > most:
                        break
                return response.status_code, response.headers, data

    def _message(self, data: bytearray) -> str:
        """Return the message in an answer, as `clean` does."""
        text = data.decode("utf-8", errors="replace")
        with suppress(msgspec.DecodeError, RecursionError):
            document = msgspec.json.decode(data)
            error = document.get("error", document) if isinstance(document, dict) else text
            text = str(error.get("message", error.get("detail", error)) if isinstance(error, dict) else error)
        return self.clean(text) or "without a message"


def _seconds(header: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header; None without one, or if it is a date."""
    with suppress(ValueError):
        return min(max(0.0, float(header)), LONGEST_PAUSE_S) if header else None  # not a number: 0
    return None
