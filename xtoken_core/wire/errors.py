"""Errors of a queue: a code for programs and a message for people."""

from __future__ import annotations

from typing import Literal, get_args

Code = Literal[
    "bad_frame",  # the bytes are no message of this protocol
    "bad_request",  # the message is well-formed and asks for something impossible
    "unsupported_version",  # the hello names no version that this queue speaks
    "unknown_message",  # the type is not known to this version
    "stale_session",  # the session has ended: the worker must exit
    "unknown_partition",
    "unknown_task",
    "unknown_sample",
    "conflict",  # the same name, id or field already stands for something else
    "lease_revoked",  # the lease is not held any more: drop the work and ask again
    "rewound",  # the run was rewound: start again at the step the reply names
    "ring_closed",  # the pair of teacher and student session has ended
    "exhausted",  # nothing will ever come again
    "run_failed",  # the run was given up, for the reason in the message
    "no_room",  # the memory limit is reached
    "too_large",  # a bound of the protocol is exceeded
    "forbidden",  # this role may not do that
]

CODES: tuple[Code, ...] = get_args(Code)


class QueueError(Exception):
    """The queue refused a request.

    Attributes:
        code: One of `CODES`.
        detail: Values that go with the code, such as the step after `rewound`.
    """

    def __init__(self, code: Code, message: str, detail: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.code: Code = code
        self.detail = detail or {}
