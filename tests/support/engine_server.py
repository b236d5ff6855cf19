"""Servers that speak the protocols of programs which serve models: of scripted answers, or of a real small model."""

import base64
import gzip
import itertools
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Answer = tuple[int, dict[str, str], Any]
"""Status, headers, body (JSON unless bytes)."""
Handler = Callable[[str, str, Any, dict[str, str]], Answer]
"""Of method, path, body and headers."""


@contextmanager
def serving(handler: Handler, port: int = 0) -> Iterator[str]:
    """Serve a handler's answers on a port, 0: a free one; yield the address."""

    class Requests(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, headers, content = handler(self.command, self.path, body, dict(self.headers))
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _answer  # noqa: N815 - the names of the standard library

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

        def handle(self) -> None:
            with suppress(ConnectionError, BrokenPipeError):
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", port), Requests)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def raw_serving(script: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve by a script that is given every connection after its first bytes; yield the address."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            script(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def dripped_headers(connection: socket.socket) -> None:
    """Send headers that do not end, a byte at a time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def endless_continue(connection: socket.socket) -> None:
    """Send interim answers without an end."""
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 64)
        time.sleep(0.001)


def nested_gzip(connection: socket.socket) -> None:
    """Send a few KB that are 5 GB once both codings are undone."""
    coder, zeros = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(4 << 20)
    # A block after a full flush refers to nothing before it, so that it may be repeated.
    first, block = (coder.compress(zeros) + coder.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    data = gzip.compress(first + 1279 * block)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


def endless_body(connection: socket.socket) -> None:
    """Send a body without an end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in itertools.count():
        connection.sendall(b"0" * (1 << 16))


RAW_ATTACKS: dict[str, Callable[[socket.socket], None]] = {
    script.__name__: script for script in (dripped_headers, endless_continue, nested_gzip, endless_body)
}


@cache
def _loaded(directory: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)


@dataclass
class ModelHandler:
    """A model in a directory behind the protocol of vLLM or SGLang.

    Attributes:
        shift: Positions by which the log-probabilities of prompts are wrong.
        most: Most tokens that a position lists; 0: only the text's own.
        key: The bearer token that it wants.
        busy: Requests that it turns away before it answers one.
    """

    directory: Path
    name: str = "served"
    max_length: int = 4096
    shift: int = 0
    most: int = 1 << 30
    key: str = ""
    busy: int = 0
    delay_s: float = 0.0
    seen: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, self.tokenizer = _loaded(self.directory)
        self.lock = threading.Lock()

    def __call__(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        self.seen.append((path, body))
        if self.key and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {}, {"error": {"message": f"Incorrect key: {headers.get('Authorization')}"}}
        if self.busy:
            self.busy -= 1
            return 503, {"Retry-After": "0.01"}, {"detail": "busy"}
        time.sleep(self.delay_s)
        if path == "/v1/models":
            return 200, {}, {"data": [{"id": self.name, "max_model_len": self.max_length}]}
        if path == "/tokenize":
            return 200, {}, {"tokens": self.tokenizer(body["prompt"])["input_ids"]}
        answer = {"/v1/completions": self.vllm, "/generate": self.sglang}.get(path)
        ids = (body or {}).get("prompt") or (body or {}).get("input_ids") or ()
        if len(ids) + 1 > self.max_length:
            return 400, {}, {"error": {"message": f"maximum context length is {self.max_length} tokens", "code": 400}}
        return (404, {}, {"detail": "Not Found"}) if answer is None else (200, {}, answer(body))

    @torch.no_grad()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """`[T, V]`: row t of what follows token t."""
        with self.lock:
            logits = self.model(torch.tensor([ids])).logits[0, :, : len(self.tokenizer)]
        return torch.log_softmax(logits.double(), dim=-1)

    def best(self, row: torch.Tensor, k: int, own: int | None) -> dict[int, float]:
        """The likeliest tokens of a position, and the text's own."""
        values, ids = row.topk(min(k, self.most, len(row)))
        entries = dict(zip(ids.tolist(), values.tolist(), strict=True))
        return entries | ({} if own is None else {own: row[own].item()})

    def rows(self, ids: list[int]) -> list[torch.Tensor]:
        """The row that each token is said to be predicted by."""
        rows = self.log_probs(ids)
        return [rows[min(max(at - 1 + self.shift, 0), len(ids) - 1)] for at in range(1, len(ids))]

    def vllm(self, body: Any) -> Any:
        ids, k = body["prompt"], body["prompt_logprobs"]
        listed: list[Any] = [None]
        for token, row in zip(ids[1:], self.rows(ids), strict=True):
            entries = self.best(row, k, token)
            listed.append(
                {str(i): {"logprob": v, "rank": n, "decoded_token": ""} for n, (i, v) in enumerate(entries.items(), 1)}
            )
        after = self.best(self.log_probs(ids)[-1], body["logprobs"], None)
        generated = {"top_logprobs": [{f"token_id:{i}": v for i, v in after.items()}]}
        return {"choices": [{"index": 0, "text": "", "logprobs": generated, "prompt_logprobs": listed}]}

    def sglang(self, body: Any) -> Any:
        ids, k = body["input_ids"], body["top_logprobs_num"]
        own: list[Any] = [[None, ids[0], None]]
        top: list[dict[int, float]] = []
        for token, row in zip(ids[1:], self.rows(ids), strict=True):
            own.append([row[token].item(), token, None])
            top.append(self.best(row, k, None))
        after = [[v, i, None] for i, v in self.best(self.log_probs(ids)[-1], k, None).items()]
        meta = {"input_token_logprobs": own, "output_top_logprobs": [after]}
        if k:
            assert body["return_flat_raw_top_logprobs"] and body["return_flat_raw_top_logprobs_b64"]
            meta |= flat_top_logprobs([row for row in top if row], k, len(ids))
        return {"text": "", "meta_info": meta}


def flat_top_logprobs(rows: list[dict[int, float]], k: int, length: int) -> dict[str, Any]:
    """Likeliest tokens as SGLang writes them in base64: `_build_flat_top_logprobs_fields_from_arrays`."""
    parts: dict[str, Any] = {
        "val": (np.array([[*row.values()] for row in rows], dtype="<f4"), "float32"),
        "idx": (np.array([[*row] for row in rows], dtype="<i4"), "int32"),
    }
    made: dict[str, Any] = {
        "input_top_logprobs_shape": [len(rows), len(rows[0]) if rows else k],
        "input_top_logprobs_null_prefix": length - len(rows),
    }
    for name, (array, dtype) in parts.items():
        made[f"input_top_logprobs_{name}_flat_b64"] = base64.b64encode(array.tobytes()).decode()
        made[f"input_top_logprobs_{name}_flat_b64_dtype"] = dtype
    return made
