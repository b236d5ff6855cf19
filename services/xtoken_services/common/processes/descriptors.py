"""The soft limit of file descriptors of this process, which bounds how many connections a server may accept."""

from __future__ import annotations

import resource
from contextlib import suppress


def raise_descriptor_limit(wanted: int | None = None) -> int | None:
    """Raise the soft limit of descriptors as far as the hard one allows.

    Args:
        wanted: Descriptors that suffice; None for as many as the hard limit allows.

    Returns:
        The soft limit, or None if there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted is None or (hard != resource.RLIM_INFINITY and hard < wanted):
        wanted = hard
    if soft != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or wanted > soft):
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int | None:
    """Return the soft limit of descriptors, or None if there is none."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft
