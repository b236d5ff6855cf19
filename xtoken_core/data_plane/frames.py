"""Multipart messages in and out of a ZeroMQ socket, without a copy of large buffers."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from xtoken_core.wire.bounds import MAX_FRAMES
from xtoken_core.wire.columns import Buffer

ZERO_COPY_BYTES = 1 << 14
SKIP_AT_ONCE = 1000
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
MORE, MORE_AT_ONCE = int(zmq.SNDMORE), int(zmq.SNDMORE | zmq.NOBLOCK)


class TooManyFramesError(Exception):
    """A message has more frames than any message of the protocol; the rest of it is still to be received.

    Attributes:
        first: Its first frame, a peer's routing id at a server.
    """

    def __init__(self, first: zmq.Frame) -> None:
        super().__init__(f"a message has more than {MAX_FRAMES} frames")
        self.first = first


def receive_frames(socket: zmq.Socket[bytes], most: int = MAX_FRAMES) -> list[zmq.Frame]:
    """Receive the frames of one message, at most `most`.

    Raises:
        zmq.Again: None came within the socket's timeout.
        TooManyFramesError: There are more.
    """
    frame = socket.recv(0, False)
    frames = [frame]
    while frame.more:
        if len(frames) == most:
            raise TooManyFramesError(frames[0])
        frame = socket.recv(0, False)
        frames.append(frame)
    return frames


def skip_frames(socket: zmq.Socket[bytes], seconds: float) -> bool:
    """Receive and drop the rest of a message; False if it has not ended after some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for _ in range(SKIP_AT_ONCE):
            if not socket.recv(0, False).more:
                return True
    return False


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received."""
    return bool(int(socket.get(EVENTS)) & READABLE)


def send_frames(socket: zmq.Socket[bytes], header: bytes, buffers: Sequence[Buffer]) -> None:
    """Send the header and then the buffers; large ones are not copied and must not change until they are sent.

    A buffer that is a whole received frame is sent as that frame.

    Raises:
        zmq.ZMQError: The socket accepts no message.
    """
    left = len(buffers)
    socket.send(header, MORE if left else 0)
    for buffer in buffers:
        left -= 1
        view = memoryview(buffer)
        copied = view.nbytes < ZERO_COPY_BYTES
        frame = view.obj
        whole = not copied and isinstance(frame, zmq.Frame) and len(frame) == view.nbytes
        socket.send(frame if whole else buffer, MORE if left else 0, copied)
