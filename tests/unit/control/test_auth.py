"""Who may ask the control plane, and how much: tokens, origins, limits of headers and bodies."""

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse

from tests.support.cases import cases
from tests.unit.control.stored_runs import HERE, make_runs
from xtoken_core.data_plane.address import is_loopback
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.cli.options import read_control_token
from xtoken_services.control import http_limits, sessions
from xtoken_services.control.app import create_app
from xtoken_services.control.auth import COOKIE, Auth, read_token
from xtoken_services.control.runs import Runs
from xtoken_services.control.serve import HttpServer, serve
from xtoken_services.control.sessions import MAX_DELAYED

TOKEN = "a-token-of-some-length"


def status(runs: Runs, auth: Auth, headers: dict, path: str = "/v1/runs", method: str = "GET") -> int:
    client = TestClient(create_app(runs, auth), base_url=HERE)
    return client.request(method, path, headers=headers).status_code


@cases(
    "headers, expected",
    ({"host": "evil.example"}, 403),
    ({"host": "evil.example:8400"}, 403),
    ({"host": "192.168.1.7:8400"}, 403),
    ({"host": "127.0.0.1.evil.example:8400"}, 403),
    ({"host": "["}, 403),
    ({"host": "evil.example@127.0.0.1:8400"}, 403),
    ({"host": "127.0.0.1:8400/evil.example"}, 403),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "http://127.0.0.1:3000"}, 403),
    ({"origin": "http://127.0.0.1"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://localhost:8400"}, 200),
    ({"origin": "http://127.0.0.1:8400"}, 200),
    ({"host": "localhost"}, 200),
    ({"host": "[::1]:8400"}, 200),
    ids=str,
)
def test_host_and_origin(runs: Runs, headers: dict[str, str], expected: int) -> None:
    assert status(runs, Auth(), headers) == expected


@cases(
    "headers, expected",
    ({}, 401),
    ({"authorization": f"Bearer {TOKEN}"}, 200),
    ({"authorization": f"bearer {TOKEN}"}, 200),
    ({"authorization": f"Bearer {TOKEN}x"}, 401),
    ({"authorization": "Bearer "}, 401),
    ({"authorization": TOKEN}, 401),
    ({b"authorization": b"Bearer \xe9"}, 401),
    ({"authorization": f"Basic {TOKEN}"}, 401),
    ({"cookie": f"{COOKIE}={TOKEN}"}, 401),
    ({b"host": b"127.0.0.1:8400", b"Host": b"evil.example"}, 400),
    ({"authorization": f"Bearer {TOKEN}", b"Authorization": b"Bearer x"}, 400),
    ids=str,
)
def test_token(runs: Runs, headers: dict, expected: int) -> None:
    assert status(runs, Auth(TOKEN), headers) == expected


@pytest.mark.parametrize(("scheme", "expected"), [("https", 200), ("http", 403)])
def test_origin_behind_a_proxy_with_tls(runs: Runs, scheme: str, expected: int) -> None:
    app = create_app(runs, Auth(names=frozenset({"xtoken.example"})))
    client = TestClient(app, base_url=f"{scheme}://xtoken.example")
    assert client.get("/v1/runs", headers={"origin": "https://xtoken.example"}).status_code == expected


def test_session(runs: Runs) -> None:
    auth = Auth(TOKEN)
    session = auth.sessions.open()
    assert status(runs, auth, {"cookie": f"{COOKIE}={session}"}) == 200
    assert status(runs, auth, {"cookie": f"{COOKIE}={session}", "origin": "https://evil.example"}) == 403
    assert status(runs, auth, {"cookie": f"{COOKIE}={session}x"}) == 401
    auth.sessions.close(session)
    assert status(runs, auth, {"cookie": f"{COOKIE}={session}"}) == 401


def test_wrong_tokens_are_slowed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "DELAY_S", 0.3)
    auth = Auth(TOKEN)
    app, began = create_app(runs, auth), time.monotonic()
    for send in (
        lambda client: client.get("/v1/runs", headers={"authorization": "Bearer wrong"}),
        lambda client: client.post("/login", data={"token": "wrong"}),
    ):
        assert send(TestClient(app, base_url=HERE)).status_code in (401, 403)
    assert time.monotonic() - began > 0.6
    session = auth.sessions.open()
    auth.wrong_tokens._delayed["testclient"] = sessions.MAX_DELAYED
    assert status(runs, auth, {"authorization": f"Bearer {TOKEN}"}) == 429
    assert status(runs, auth, {"cookie": f"{COOKIE}={session}"}) == 200


def test_every_route_needs_the_token(runs: Runs) -> None:
    app = create_app(runs, Auth(TOKEN))
    client = TestClient(app, base_url=HERE)
    for path, item in [*app.openapi()["paths"].items(), ("/openapi.json", {"get": {}})]:
        for method in item:
            expected = 200 if path in ("/livez", "/readyz") else 401
            assert client.request(method, path.replace("{run_id}", "x")).status_code == expected, (method, path)


@cases("host, expected", ("192.168.1.7:8400", 200), ("gpu-1.lab:8400", 200), ("GPU-1.lab", 200), ("evil.example", 403))
def test_names_of_a_remote_control_plane(runs: Runs, host: str, expected: int) -> None:
    auth = Auth(TOKEN, frozenset({"gpu-1.lab"}), remote=True)
    assert status(runs, auth, {"host": host, "authorization": f"Bearer {TOKEN}"}) == expected


def test_web_socket(runs: Runs) -> None:
    app = create_app(runs, Auth(TOKEN))

    @app.websocket("/socket")
    async def socket(connection) -> None:  # type: ignore[no-untyped-def]
        await connection.accept()
        await connection.close()

    client = TestClient(app, base_url=HERE)
    foreign = {"authorization": f"Bearer {TOKEN}", "origin": "https://evil.example"}
    for headers, expected in (({}, 401), (foreign, 403)):
        url = f"{HERE.replace('http', 'ws')}/socket"
        with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect(url, headers=headers):
            pass
        assert refused.value.status_code == expected


def test_remote_address_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0 is reachable from other machines: a token is required"):
        Auth.of("0.0.0.0", None)
    auth = Auth.of("0.0.0.0", tmp_path / "token")
    assert auth.remote and auth.token == (tmp_path / "token").read_text().strip()
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_control_plane_has_a_token_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    auth, file = Auth.of("127.0.0.1", None), tmp_path / "config" / "xtoken" / "control.token"
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]
    assert status(runs, auth, {}) == 401
    assert status(runs, auth, {"authorization": f"Bearer {file.read_text().strip()}"}) == 200
    assert Auth.of("127.0.0.1", None).token == auth.token == read_control_token(None, "http://localhost:8400")
    assert read_control_token(None, "http://elsewhere.example:8400") is None
    assert read_control_token(None, "http://127.0.0.1.example:8400") is None


def test_token_file_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o640)
    with pytest.raises(InputError, match="may be read by others: chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    file.write_text("short")
    with pytest.raises(ConfigError, match="shorter than"):
        read_token(file)


LOOPBACK = ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST")


@pytest.mark.parametrize("host", [*LOOPBACK, "0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host) == (host in LOOPBACK)


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


@cases(
    "sent",
    HEAD + b"X-A: " + b"a" * http_limits.MAX_HEADER_BYTES,
    HEAD + b"X-A: 1\r\n" * 200,
    b"GET /" + b"a" * http_limits.MAX_HEADER_BYTES + b" HTTP/1.1\r\n",
)
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
