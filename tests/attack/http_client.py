"""Attacks on the control plane over HTTP: slow, malformed, oversized and repeated requests."""

import random
import socket
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import httpx

from tests.attack.target import Attack, FaultError, Target

CONNECTIONS = 300
LOGIN_ATTEMPTS = 50


def expect_refusal(response: httpx.Response, what: str) -> None:
    """Check that a hostile request was answered as the client's mistake.

    Raises:
        FaultError: It was answered by an internal error, or accepted.
    """
    if response.status_code >= 500:
        raise FaultError(f"HTTP {response.status_code} for {what}: {response.text[:200]}")
    if response.status_code == 201:
        raise FaultError(f"a run was started from {what}")


def half_headers(target: Target, rng: random.Random, seconds: float) -> None:
    """Hold connections whose request line or headers never end."""
    slow(target, seconds, lambda: b"GET /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "[: rng.randrange(1, 48)])


def half_bodies(target: Target, rng: random.Random, seconds: float) -> None:
    """Hold connections whose bodies never end."""
    head = (
        "POST /v1/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n"
        f"Authorization: Bearer {target.http_token}\r\n\r\n"
    )
    slow(target, seconds, lambda: head.encode() + b"{" * rng.randrange(100))


def slow(target: Target, seconds: float, beginning: Any) -> None:
    """Open many connections, send how each begins, and then a byte now and then."""
    held: list[socket.socket] = []
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            for _ in range(CONNECTIONS - len(held)):
                with suppress(OSError):
                    held.append(socket.create_connection(target.http_address, timeout=2))
                    held[-1].sendall(beginning())
            time.sleep(0.3)
            for one in list(held):
                try:
                    one.sendall(b"a")
                except OSError:
                    held.remove(one)
                    one.close()
    finally:
        for one in held:
            one.close()


def hostile_documents(target: Target, rng: random.Random, seconds: float) -> None:
    """Post run files that are nested, huge, of wrong types or with odd names."""
    del seconds
    deep = rng.choice((100, 1_000, 20_000))
    texts = {
        "nested JSON": '{"a":' * deep + "1" + "}" * deep,
        "nested lists": "[" * deep + "]" * deep,
        "an integer of 5,000 digits": '{"seed": ' + "9" * 5_000 + "}",
        "a wide object": "{" + ",".join(f'"k{n}":1' for n in range(50_000)) + "}",
        "NaN": '{"seed": NaN}',
        "lone surrogates": '{"name": "\\ud800"}',
    }
    changed: dict[str, dict[str, Any]] = {
        "a name of 300 letters": {"name": "n" * 300},
        "an output of 300 letters": {"output": "o" * 300},
        "an output of 5,000 letters": {"output": "/o" * 2_500},
        "a null byte": {"output": "a\0b"},
        "a teacher that is a map": {"teacher": {"0": target.spec["teacher"][0]}},
        "a thousand teachers": {"teacher": target.spec["teacher"] * 1_000},
        "a huge seed": {"seed": 1 << 200},
    }
    with target.http() as http:
        for what, text in texts.items():
            headers = {"Content-Type": "application/json"}
            expect_refusal(http.post("/v1/runs", content=text, headers=headers), what)
        for what, change in changed.items():
            expect_refusal(http.post("/v1/runs", json={**target.spec, **change}, params={"dry_run": "true"}), what)


def hostile_forms(target: Target, rng: random.Random, seconds: float) -> None:
    """Post TOML that takes long to parse."""
    del seconds
    size = rng.choice((10_000, 40_000, 200_000))
    texts = [
        "a." * (size // 2) + "a = 1",
        "".join(f"[{'a.' * 50}b{n}]\n" for n in range(size // 100)),
        "a = " + "[" * (size // 2) + "]" * (size // 2),
        "a = " + "{a = " * 5_000 + "1" + "}" * 5_000,
        "a = " + "9" * 5_000,
        'x = "' + "\\u0041" * (size // 6) + '"',
    ]
    with target.http() as http:
        for text in texts:
            what = f"a form with the run file {text[:40]!r}"
            began = target.clock.now()
            response = http.post(
                "/runs/new",
                content=urlencode({"action": "check", "toml": text}),
                headers={"Content-Type": "application/x-www-form-urlencoded"},
            )
            expect_refusal(response, what)
            if (waited := target.clock.since(began)) > 10:
                raise FaultError(f"{what} took {waited:.1f} s")


def odd_queries(target: Target, rng: random.Random, seconds: float) -> None:
    """Ask for runs, files and metrics with parameters out of every range."""
    del seconds
    values = ("-1", "9" * 5_000, "NaN", "\0", "%00", "../../../etc/passwd", "a" * 5_000, "1e308", "\ud800", "٣")
    routes = ("/v1/runs?cursor=", "/v1/runs?state=", "/v1/runs?limit=", f"/v1/runs/{target.victim}/metrics?after=",
              f"/v1/runs/{target.victim}/logs?worker=", f"/v1/runs/{target.victim}/logs?attempt=", "/v1/runs/",
              f"/v1/runs/{target.victim}/artifacts/", "/runs/", "/runs/new?from=")  # fmt: skip
    with target.http() as http:
        for route in routes:
            for value in rng.sample(values, 6):
                text = urlencode({"": value.encode("utf-8", "surrogatepass")})[1:]
                response = http.get(route + text)
                expect_refusal(response, f"GET {route}{text[:60]}")
                if "root:x:" in response.text:
                    raise FaultError(f"GET {route}{text[:60]} returned /etc/passwd")


def two_hosts(target: Target, rng: random.Random, seconds: float) -> None:
    """Send two Host headers.

    Raises:
        FaultError: The request is served.
    """
    del rng, seconds
    for hosts in (("127.0.0.1", "evil.example"), ("evil.example", "127.0.0.1")):
        lines = ["GET /v1/runs HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close"]
        lines.append(f"Authorization: Bearer {target.http_token}")
        with socket.create_connection(target.http_address, timeout=10) as raw:
            raw.sendall("\r\n".join([*lines, "", ""]).encode())
            answer = raw.recv(4096)
        if answer.startswith(b"HTTP/1.1 200"):
            raise FaultError(f"a request with the Host headers {' and '.join(hosts)} is served")


def guessed_tokens(target: Target, rng: random.Random, seconds: float) -> None:
    """Try one wrong token after the other at the login form.

    Raises:
        FaultError: The attempts are not slowed.
    """
    del seconds
    began = time.monotonic()
    with httpx.Client(base_url=target.url, timeout=60) as http:
        for _ in range(LOGIN_ATTEMPTS):
            response = http.post("/login", data={"token": rng.randbytes(8).hex()})
            if response.status_code == 429:
                return
            expect_refusal(response, "a wrong token")
            if time.monotonic() - began > 20:
                return
    raise FaultError(f"{LOGIN_ATTEMPTS} wrong tokens took {time.monotonic() - began:.1f} s")


def kept_cookie(target: Target, rng: random.Random, seconds: float) -> None:
    """Use a session's cookie after it was logged out.

    Raises:
        FaultError: It is still accepted.
    """
    del rng, seconds
    with httpx.Client(base_url=target.url, timeout=30) as http:
        response = http.post("/login", data={"token": target.http_token})
        if response.status_code != 303:
            return
        cookies = dict(http.cookies)
        http.post("/logout", cookies=cookies)
    response = httpx.get(f"{target.url}/v1/runs", cookies=cookies, timeout=30)
    if response.status_code == 200:
        raise FaultError("a cookie is accepted after its log-out")


ATTACKS: dict[str, Attack] = {
    f"http.{attack.__name__}": attack
    for attack in (
        half_headers, half_bodies, hostile_documents, hostile_forms, odd_queries, two_hosts, guessed_tokens,
        kept_cookie,
    )
}  # fmt: skip
