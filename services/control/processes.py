"""Processes of this machine beyond what `subprocess` knows: by pid and time of start a process is named for good."""

from __future__ import annotations

import contextlib

import psutil  # type: ignore[import-untyped] # its types are a package of their own, which is not installed


def created(pid: int) -> float | None:
    """When a process was started, in seconds since the epoch; None if it is gone."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below one, those that have left its group or session included."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL to each that still is the one it was."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
