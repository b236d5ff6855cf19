"""Durations and sizes as people read them."""

from __future__ import annotations


def span(seconds: float | None) -> str:
    """Format a duration in its two largest units.

    >>> [span(s) for s in (0.4, 42, 61, 3700, 200_000, None)]
    ['0 s', '42 s', '1 min 1 s', '1 h 1 min', '2 d 7 h', '–']
    """
    if seconds is None:
        return "–"
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((i for i, (value, _) in enumerate(parts) if value), 3)
    shown = [f"{value} {unit}" for value, unit in parts[first : first + 2] if value]
    return " ".join(shown) or "0 s"


def size(value: float | None) -> str:
    """Format a number of bytes with a binary unit.

    >>> [size(b) for b in (0, 1023, 1536, 5 * 2**30, None)]
    ['0 B', '1023 B', '1.5 KiB', '5.0 GiB', '–']
    """
    if value is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
