"""Authentication: tokens, host names, origins."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse

from tests.unit.control.stored_runs import HERE, make_runs
from xtoken_core.errors import ConfigError
from xtoken_services.cli.options import read_control_token
from xtoken_services.control import sessions
from xtoken_services.control.app import create_app
from xtoken_services.control.auth import COOKIE, Auth, is_loopback, read_token
from xtoken_services.control.runs import Runs

TOKEN = "a-token-of-some-length"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = make_runs(tmp_path)
    yield found
    found.close()


def status(runs: Runs, auth: Auth, headers: dict, path: str = "/v1/runs", method: str = "GET") -> int:
    client = TestClient(create_app(runs, auth), base_url=HERE)
    return client.request(method, path, headers=headers).status_code


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
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
    ],
    ids=str,
)
def test_host_and_origin(runs: Runs, headers: dict[str, str], expected: int) -> None:
    assert status(runs, Auth(), headers) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
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
    ],
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


@pytest.mark.parametrize(
    ("host", "expected"),
    [("192.168.1.7:8400", 200), ("gpu-1.lab:8400", 200), ("GPU-1.lab", 200), ("evil.example", 403)],
)
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
    with pytest.raises(ConfigError, match="must be readable by you only: chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    file.write_text("short")
    with pytest.raises(ConfigError, match="shorter than"):
        read_token(file)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_other_addresses(host: str) -> None:
    assert not is_loopback(host)
