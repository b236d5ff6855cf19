"""Multipart messages in and out of a ZeroMQ socket, without a copy of large buffers."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from xtoken_core.wire.columns import Buffer

ZERO_COPY_BYTES = 1 << 14
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
MORE, MORE_AT_ONCE = int(zmq.SNDMORE), int(zmq.SNDMORE | zmq.NOBLOCK)


def receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """Receive the frames of one message.

    Raises:
        zmq.Again: None came within the socket's timeout.
    """
    frame = socket.recv(0, False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(0, False)
        frames.append(frame)
    return frames


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
