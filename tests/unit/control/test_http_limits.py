"""Limits of the HTTP server against peers without a token: half-sent requests, many connections, unread responses."""

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.control.stored_runs import make_runs
from xtoken_core.errors import ConfigError
from xtoken_services.control import http_limits
from xtoken_services.control.auth import Auth
from xtoken_services.control.runs import Runs
from xtoken_services.control.serve import HttpServer, serve
from xtoken_services.control.sessions import MAX_DELAYED

TOKEN = "a-token-of-some-length"
HEAD = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
Connect = Callable[..., socket.socket]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(http_limits, "HEADER_S", 1.0)
    monkeypatch.setattr(http_limits, "BODY_S", 1.0)
    monkeypatch.setattr(http_limits, "MAX_PER_ADDRESS", 20)
    runs: Runs = make_runs(tmp_path)
    server = HttpServer(runs, "127.0.0.1", 0, Auth(TOKEN))
    yield server
    server.close()
    runs.close()


@pytest.fixture
def connect(server: HttpServer) -> Iterator[Connect]:
    opened: list[socket.socket] = []

    def connect(sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        opened.append(connection)
        connection.sendall(sent)
        return connection

    yield connect
    for connection in opened:
        connection.close()


def response(connection: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def live(server: HttpServer) -> bool:
    with urllib.request.urlopen(f"{server.url}/livez", timeout=30) as answer:
        return json.load(answer) == {"live": True}


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, HEAD + b"X-A: 1\r\n"])
def test_deadline_of_headers(connect: Connect, sent: bytes) -> None:
    assert response(connect(sent)).startswith(b"HTTP/1.1 408 ")


def test_deadline_holds_for_peers_that_send_a_byte_at_a_time(connect: Connect) -> None:
    connection, began = connect(HEAD + b"X-A: "), time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - began < 20:
            connection.sendall(b"a")
            time.sleep(0.1)


def test_deadline_of_further_requests(connect: Connect) -> None:
    connection = connect(HEAD + b"\r\n" + HEAD)
    answer = response(connection)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in answer


@pytest.mark.parametrize("path", [b"/login", b"/v1/runs"])
def test_deadline_of_bodies(connect: Connect, path: bytes) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\nContent-Length: 100\r\n\r\n{"
    assert response(connect(head % (path, TOKEN.encode()))).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [
    HEAD + b"X-A: " + b"a" * http_limits.MAX_HEADER_BYTES, HEAD + b"X-A: 1\r\n" * 200,
    b"GET /" + b"a" * http_limits.MAX_HEADER_BYTES + b" HTTP/1.1\r\n",
])  # fmt: skip
def test_size_of_headers(connect: Connect, sent: bytes) -> None:
    assert response(connect(sent + b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


def test_half_sent_requests_give_way(server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEADER_S", 60.0)
    first = connect(HEAD)
    for _ in range(100):
        connect(HEAD)
    assert response(first).startswith(b"HTTP/1.1 503 ")
    assert live(server)


def test_requests_in_progress_do_not_give_way(
    server: HttpServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(http_limits, "BODY_S", 60.0)
    head = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nExpect: 100-continue\r\nContent-Length: 7\r\n\r\n"
    busy = [connect(head) for _ in range(20)]
    for connection in busy:
        assert connection.recv(100).startswith(b"HTTP/1.1 100 "), "its request is in progress"
    assert response(connect()).startswith(b"HTTP/1.1 503 ")
    for connection in busy:
        connection.sendall(b"token=x")
    assert busy[0].recv(12).startswith(b"HTTP/1.1 ")


def test_body_of_a_request_without_a_token(connect: Connect) -> None:
    size = http_limits.MAX_OPEN_BODY_BYTES + 1
    head = b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    assert response(connect(head % size + b"x" * size)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("body", [b"[" + b"{}," * http_limits.MAX_JSON_VALUES, b'{"a":' * 20_000, b"[" * 20_000])
@pytest.mark.parametrize("kind", [b"application/json", b"Application/Problem+JSON\r\nContent-Type: text/plain"])
def test_values_of_a_json_body(connect: Connect, body: bytes, kind: bytes) -> None:
    head = b"POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer %s\r\n"
    sent = head + b"Content-Type: %s\r\nContent-Length: %d\r\n\r\n%s"
    answer = response(connect(sent % (TOKEN.encode(), kind, len(body), body)))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"more than 4096 values" in answer


@pytest.mark.parametrize(("proxies", "status"), [((), b"429"), (("127.0.0.0/8",), b"401")])
def test_address_of_a_client_behind_a_proxy(tmp_path: Path, proxies: tuple[str, ...], status: bytes) -> None:
    runs = make_runs(tmp_path)
    auth = Auth(TOKEN)
    server = HttpServer(runs, "127.0.0.1", 0, auth, proxies=proxies)
    head = (
        b"GET /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer wrong\r\nX-Forwarded-For: 10.0.0.%d\r\n\r\n"
    )
    guesses = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(MAX_DELAYED + 1)]
    try:
        for number, guess in enumerate(guesses[:-1]):
            guess.sendall(head % number)
        until = time.monotonic() + 30
        while time.monotonic() < until and sum(auth.wrong_tokens._delayed.values()) < MAX_DELAYED:
            time.sleep(0.005)
        guesses[-1].sendall(head % MAX_DELAYED)
        assert guesses[-1].recv(4096).split(b" ")[1] == status
    finally:
        for guess in guesses:
            guess.close()
        server.close()
        runs.close()


def test_proxy_that_is_no_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trusted-proxy proxy\.example: give an address"):
        serve("127.0.0.1", 0, tmp_path, proxies=["proxy.example"])


def open_connections() -> int:
    return sum(connections.total for connections in list(http_limits._connections.values()))


def test_response_that_is_not_read(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "STALLED_S", 0.5)
    request = b"GET /static/vendor/swagger-ui/swagger-ui-bundle.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    connection, until = connect(request * 20), time.monotonic() + 60
    while not open_connections() and time.monotonic() < until:
        time.sleep(0.01)
    while open_connections() and time.monotonic() < until:
        time.sleep(0.05)
    assert len(response(connection)) < 30 << 20
