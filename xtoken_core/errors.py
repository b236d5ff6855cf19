"""The errors a user meets: one line that names the thing and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class XtokenError(Exception):
    """An expected failure: its text is the one line a command prints before it exits.

    Attributes:
        exit_code: Exit status of a command that ends with this error.
    """

    exit_code = 1


class ConfigError(XtokenError):
    """A setting is missing, impossible or unknown. Restarting the process cannot mend it."""

    exit_code = 2


class InputError(XtokenError):
    """A file or directory that the user named is missing, unreadable or of the wrong kind."""

    exit_code = 2


class OutputError(XtokenError):
    """Output cannot be written: the disk is full or permission is denied. A restart would not help."""

    exit_code = 2


class QueueUnreachableError(XtokenError):
    """The queue did not reply before the deadline."""

    exit_code = 3


class StaleSessionError(XtokenError):
    """The queue has ended this worker's session: the worker must exit and be started anew."""

    exit_code = 75


@contextmanager
def os_errors_as(kind: type[XtokenError], what: str) -> Iterator[None]:
    """Raise an error of the operating system in a block as one of ours, in one line.

    Args:
        kind: Its class.
        what: What cannot be done, such as "cannot read FILE"; the reason follows it.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the error's type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
