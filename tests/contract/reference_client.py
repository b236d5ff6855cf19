"""A client of the transfer queue, written from `proto/README.md` alone: pyzmq and msgpack, nothing of xtoken.

A column is `(kind, dtype, item_shape, rows)`; `rows` are the bytes of each row, or plain values in an object column.
"""

import itertools
import math
import secrets
import struct
import time

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

ITEM_SIZES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
ITEM_SIZES |= {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SLICE_S = 5.0


class RefusedError(Exception):
    """The queue answered `error`."""

    def __init__(self, code, message, detail):
        super().__init__(f"{code}: {message}")
        self.code, self.detail = code, detail


class UnreachableError(Exception):
    """No reply came within the client's patience."""


class Client:
    """One connection, one lane, one session; `curve` is (server's public key, own public key, own secret key)."""

    def __init__(self, url, token=None, curve=None, patience_s=20.0):
        self.url, self.token, self.curve, self.patience_s = url, token, curve, patience_s
        self.context, self.socket = zmq.Context(), None
        self.lane, self.numbers = secrets.token_hex(8), itertools.count(1)
        self.session = self.partition = None
        self.versions = [2]

    def hello(self, name, role, incarnation, **options):
        """Open a session; None if `needs_run` and no run was opened in `wait_s`."""
        reply = self.call(
            "hello", bare=True, versions=self.versions, name=name, role=role, incarnation=incarnation, **options
        )
        if reply is not None:
            self.session, self.partition = reply["session"], reply.get("partition", "")
        return reply

    def call(self, kind, bare=False, columns=None, wait_s=None, **fields):
        """One call: the reply as a map with its columns decoded, or None if nothing came within `wait_s`."""
        header = {"type": kind, **({} if bare else {"session": self.session}), **fields}
        heads, buffers = pack(columns or {})
        if columns is not None:
            header["columns"] = heads
        left = wait_s
        while True:
            header["id"] = f"{self.lane}.{next(self.numbers)}"
            if left is not None:
                header["wait_s"] = float(min(left, SLICE_S))
            reply, frames = self.exchange(header, buffers)
            if reply["type"] == "error":
                raise RefusedError(reply["code"], reply["message"], reply.get("detail", {}))
            if reply["type"] != "empty":
                reply["columns"] = unpack(reply.get("columns", []), frames)
                return reply
            left = (left or 0.0) - header.get("wait_s", 0.0)
            if left <= 0:
                return None

    def close(self):
        """Let the connection go; the session stays."""
        self.drop()
        self.context.term()

    def exchange(self, header, buffers):
        """Send a request, again on a new connection if its reply is lost."""
        frames = [msgpack.packb(header, use_bin_type=True), *buffers]
        wait_s = header.get("wait_s", 0.0)
        deadline = time.monotonic() + wait_s + self.patience_s
        while time.monotonic() < deadline:
            if self.socket is None:
                self.connect()
            try:
                self.socket.send_multipart(frames)
                reply = self.receive(header["id"], min(deadline, time.monotonic() + wait_s + SLICE_S))
            except zmq.Again:
                reply = None
            if reply is not None:
                return reply
            self.drop()
            time.sleep(0.05)
        raise UnreachableError(f"no reply from {self.url}")

    def receive(self, request_id, deadline):
        """The reply to a request, or None if the connection or the time is over; replies to older ones are dropped."""
        poller = zmq.Poller()
        for source in (self.socket, self.monitor):
            poller.register(source, zmq.POLLIN)
        while ready := dict(poller.poll(max(0, int((deadline - time.monotonic()) * 1000)))):
            if self.socket not in ready:
                if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    return None
                raise UnreachableError(f"the queue at {self.url} refuses the token or key")
            header, *buffers = self.socket.recv_multipart()
            reply = msgpack.unpackb(header, raw=False, strict_map_key=False)
            if reply.get("id") == request_id:
                return reply, buffers
        return None

    def connect(self):
        """A DEALER socket that authenticates in its handshake."""
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.sndtimeo = 0, int(SLICE_S * 1000)
        if self.token is not None:
            self.socket.plain_username, self.socket.plain_password = b"xtoken", self.token.encode()
        if self.curve is not None:
            self.socket.curve_serverkey, self.socket.curve_publickey, self.socket.curve_secretkey = self.curve
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        self.socket.connect(self.url)

    def drop(self):
        """Close the socket, if there is one."""
        if self.socket is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)
        self.socket = None


def pack(columns):
    """Heads and buffers of columns."""
    heads, buffers = [], []
    for name, (kind, dtype, item_shape, rows) in columns.items():
        head = {"name": name, "kind": kind, "dtype": dtype, "rows": len(rows), "item_shape": list(item_shape)}
        heads.append(head)
        raw = [msgpack.packb(row, use_bin_type=True) for row in rows] if kind == "object" else rows
        if kind != "dense":
            unit = unit_bytes(head)
            offsets = itertools.accumulate([len(row) // unit for row in raw], initial=0)
            buffers.append(struct.pack(f"<{len(raw) + 1}q", *offsets))
        buffers.append(b"".join(raw))
    return heads, buffers


def unpack(heads, buffers):
    """Columns of a reply."""
    columns, rest = {}, iter(buffers)
    for head in heads:
        unit = unit_bytes(head)
        if head["kind"] == "dense":
            bounds = [row * unit for row in range(head["rows"] + 1)]
        else:
            bounds = [step * unit for step in struct.unpack(f"<{head['rows'] + 1}q", next(rest))]
        values = next(rest)
        rows = [values[start:stop] for start, stop in itertools.pairwise(bounds)]
        if head["kind"] == "object":
            rows = [msgpack.unpackb(row, raw=False, strict_map_key=False) for row in rows]
        columns[head["name"]] = (head["kind"], head["dtype"], tuple(head["item_shape"]), rows)
    return columns


def unit_bytes(head):
    """Bytes that an offset, or a dense row, counts."""
    return 1 if head["kind"] == "object" else ITEM_SIZES[head["dtype"]] * math.prod(head["item_shape"])
