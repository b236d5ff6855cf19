"""Requests to servers that fail, stall, refuse or lie, over real sockets."""

import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.engine_server import RAW_ATTACKS, Answer, Handler, raw_serving, serving
from xtoken_core.config.served import ServedSpec, check_waiting
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.http_engine.errors import EngineError, EngineRefusalError
from xtoken_services.common.http_engine.keys import VARIABLE, read_key
from xtoken_services.common.http_engine.pool import EnginePool
from xtoken_services.common.processes import waits
from xtoken_services.common.processes.waits import longest_wait

KEY = "sk-secret-0123"


def pool_of(stack: ExitStack, *handlers: Handler, **settings: Any) -> EnginePool:
    urls = tuple(stack.enter_context(serving(handler)) for handler in handlers)
    pool = EnginePool(ServedSpec(url=urls, **settings), "teacher.0")
    stack.callback(pool.close)
    return pool


def raw_pool(stack: ExitStack, handle: Callable[[socket.socket], None], **settings: Any) -> EnginePool:
    """A pool of one server that answers with bytes of its own."""
    pool = EnginePool(ServedSpec(url=(stack.enter_context(raw_serving(handle)),), **settings), "teacher.0")
    stack.callback(pool.close)
    return pool


def ok(method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
    return 200, {}, {"path": path, "body": body}


def failing(status: int, headers: dict[str, str] | None = None, content: Any = b"") -> Handler:
    return lambda *_: (status, headers or {}, content)


def test_an_answer_is_read_as_json(stack: ExitStack) -> None:
    pool = pool_of(stack, ok)
    assert pool.call("POST", "/x", {"a": [1]}, decode=msgspec.json.decode) == {"path": "/x", "body": {"a": [1]}}
    assert (pool.requests, pool.retries) == (1, 0)


def test_a_failed_request_goes_to_another_server(stack: ExitStack) -> None:
    pool = pool_of(stack, failing(503), ok)
    for _ in range(4):
        assert pool.call("GET", "/x", decode=msgspec.json.decode)["path"] == "/x"
    assert pool.replicas[0].failures > 0
    assert pool.requests == 4


def test_a_server_that_asks_for_time_gets_it(stack: ExitStack) -> None:
    times: list[float] = []

    def busy_once(*_: Any) -> Answer:
        times.append(time.monotonic())
        return (429, {"Retry-After": "0.4"}, {"detail": "busy"}) if len(times) == 1 else (200, {}, 1)

    pool = pool_of(stack, busy_once)
    assert pool.call("GET", "/x", decode=msgspec.json.decode) == 1
    assert times[1] - times[0] >= 0.4
    assert pool.retries == 1


def test_a_wait_is_named_by_server_time_and_reason(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "QUIET_S", 0.0)
    seen: list[str] = []

    def loading_once(*_: Any) -> Answer:
        seen.append(longest_wait())
        return (503, {"Retry-After": "0"}, {"detail": "loading"}) if len(seen) == 1 else (200, {}, 1)

    pool = pool_of(stack, loading_once)
    assert pool.call("GET", "/x", decode=msgspec.json.decode) == 1
    url = pool.replicas[0].url
    assert seen == [f"waiting 0 s for {url}", f"waiting 0 s for {url}: status 503: loading"]
    assert longest_wait() == ""


def test_a_held_server_gets_only_requests_that_name_it(stack: ExitStack) -> None:
    pool = pool_of(stack, failing(200, content=0), failing(200, content=1), url_connections=1)
    first = pool.replicas[0]
    with pool.holding(first):
        assert [pool.call("GET", "/x", decode=msgspec.json.decode) for _ in range(3)] == [1, 1, 1]
        assert pool.call("GET", "/x", decode=msgspec.json.decode, replica=first) == 0
    assert pool.call("GET", "/x", decode=msgspec.json.decode) == 0


def test_a_server_that_accepts_and_never_answers(stack: ExitStack) -> None:
    release = threading.Event()
    stack.callback(release.set)

    def hang(*_: Any) -> Answer:
        release.wait(30)
        return 200, {}, "late"

    pool = pool_of(stack, hang, ok, url_timeout_s=1.0)
    for _ in range(2):
        assert pool.call("GET", "/x", decode=msgspec.json.decode)["path"] == "/x"
    alone = pool_of(stack, hang, url_timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"teacher\.0\.url: no server has answered in time; http://.*: no answer"):
        alone.call("GET", "/x", decode=msgspec.json.decode)
    assert time.monotonic() - began < 5
    named = pool_of(stack, hang, ok, url_timeout_s=0.8)
    with pytest.raises(EngineError, match="no answer"):
        named.call("GET", "/x", decode=msgspec.json.decode, replica=named.replicas[0])
    assert named.retries == 1, "no other server needs a part of its time"


def test_the_number_of_requests_at_a_time_is_bounded(stack: ExitStack) -> None:
    now, most, lock = [0], [0], threading.Lock()

    def count(*_: Any) -> Answer:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return 200, {}, None

    pool = pool_of(stack, count, url_connections=3)
    threads = [
        threading.Thread(target=pool.call, args=("GET", "/x"), kwargs={"decode": msgspec.json.decode})
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 3
    assert pool.requests == 16


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (failing(400, content={"error": {"message": "too many\nlogprobs"}}), "status 400: too many logprobs"),
        (failing(302, {"Location": "http://127.0.0.1:9/"}), "status 302"),
        (failing(200, content=b"<html>"), "something else than JSON"),
    ],
)
def test_a_refusal_is_not_repeated(stack: ExitStack, handler: Handler, message: str) -> None:
    pool = pool_of(stack, handler)
    with pytest.raises(EngineRefusalError, match=message):
        pool.call("GET", "/x", decode=msgspec.json.decode)
    assert pool.retries == 0


def test_a_key_is_sent_and_shown_nowhere(stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def echo(method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        assert headers["Authorization"] == f"Bearer {KEY}"
        return (401 if path == "/no" else 500), {}, {"error": f"Incorrect key provided: {KEY}"}

    (tmp_path / "key").write_text(KEY + "\n")
    caplog.set_level(logging.DEBUG)
    pool = pool_of(stack, echo, url_key_file=tmp_path / "key", url_timeout_s=0.5)
    errors = []
    for path in ("/no", "/busy"):
        with pytest.raises((EngineError, EngineRefusalError)) as raised:
            pool.call("GET", path, decode=msgspec.json.decode)
        errors.append(str(raised.value))
    assert "it takes another key" in errors[0]
    assert KEY not in "".join(errors) + caplog.text + repr(pool.replicas)


def test_an_illegal_status_line_is_in_no_log(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    def repeat(connection: socket.socket) -> None:
        connection.sendall(f"HTTP/1.1 {KEY} OK\r\n\r\n".encode())

    pool = raw_pool(stack, repeat, url_timeout_s=0.5)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(EngineError, match="something else than HTTP") as raised:
        pool.call("GET", "/x", decode=msgspec.json.decode)
    assert KEY not in caplog.text + str(raised.value)


@pytest.mark.parametrize("name", sorted(RAW_ATTACKS))
def test_an_exchange_has_one_deadline_and_an_answer_a_bound(stack: ExitStack, name: str) -> None:
    pool = raw_pool(stack, RAW_ATTACKS[name], url_timeout_s=1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = {"nested_gzip": "encodes its answer", "endless_body": "more than 1048576 bytes"}
    with pytest.raises((EngineError, EngineRefusalError), match=refused.get(name, "no answer")):
        pool.call("GET", "/x", decode=msgspec.json.decode)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB; the test's own server compresses


def test_a_request_that_waits_ends_with_its_pool(stack: ExitStack) -> None:
    pool = raw_pool(stack, RAW_ATTACKS["dripped_headers"])
    errors: list[Exception] = []

    def call() -> None:
        try:
            pool.call("GET", "/x", decode=msgspec.json.decode)
        except EngineError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not pool.replicas[0].in_flight:
        time.sleep(0.01)
    pool.close()
    thread.join(10)
    assert "the connections were closed" in str(errors)
    with pytest.raises(EngineError, match="the connections were closed"):
        pool.call("GET", "/x", decode=msgspec.json.decode)


def test_where_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_key(None, "f") is None
    monkeypatch.setenv(VARIABLE, f" {KEY}\n")
    assert read_key(None, "f") == KEY
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_key(tmp_path / "empty", "f")
    with pytest.raises(InputError, match="cannot read the key"):
        read_key(tmp_path / "none", "f")


@pytest.mark.parametrize("url", ["ftp://h", "http://", "h:8000", "http://h/?key=1", "http://h:99999"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="url: "):
        ServedSpec(url=(url,))


def test_an_address_carries_no_key() -> None:
    with pytest.raises(ValueError, match="carries no key") as raised:
        ServedSpec(url=("http://user:sesame@h:1",))
    assert "sesame" not in str(raised.value.errors()[0]["msg"])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="url_model belongs to url"):
        ServedSpec(url_model="x")


def test_a_request_may_not_wait_for_longer_than_a_worker() -> None:
    served = ServedSpec(url=("http://h:1",), url_timeout_s=700.0)
    with pytest.raises(ValueError, match=r"teacher\.0\.url_timeout_s = 700: .* raise workers\.hang_timeout_s \(600\)"):
        check_waiting({"rollout": None, "teacher.0": served}, 600.0)
    check_waiting({"teacher.0": served}, 700.0)
