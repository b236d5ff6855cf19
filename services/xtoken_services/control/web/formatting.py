"""Formatting of values for pages: numbers, durations, sizes and times."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from markupsafe import Markup, escape


def code(text: str) -> Markup:
    """Return HTML in which words in backticks are code.

    >>> code("`a` < b")
    Markup('<code>a</code> &lt; b')
    """
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def seconds_since(stamp: str) -> float:
    """Return the seconds since a time in ISO 8601."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds())


def ago(stamp: str | None) -> str:
    """Format the time since a time stamp.

    >>> ago(None)
    '–'
    """
    if not stamp:
        return "–"
    seconds = seconds_since(stamp)
    return "just now" if seconds < 10 else f"{span(seconds)} ago"


def clock(stamp: str | None) -> str:
    """Format a time stamp for a tooltip.

    >>> clock("2026-01-02T03:04:05.678+00:00")
    '2026-01-02 03:04:05 UTC'
    """
    return f"{stamp[:19].replace('T', ' ')} UTC" if stamp else ""


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


def number(value: float | None) -> str:
    """Format a number with four significant digits.

    >>> [number(v) for v in (None, 0, 5.867766, 2310.946, 0.00015044)]
    ['–', '0', '5.868', '2,311', '0.0001504']
    """
    if value is None:
        return "–"
    if value and abs(value) < 1e-4:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value == 0 or abs(value) >= 1000 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """Format a fraction as a percentage.

    >>> [percent(v) for v in (None, 0.0213)]
    ['–', '2.1 %']
    """
    return "–" if value is None else f"{value * 100:.1f} %"


def count(value: int | None) -> str:
    """Format an integer with thousands separators.

    >>> [count(v) for v in (None, 12345)]
    ['–', '12,345']
    """
    return "–" if value is None else f"{value:,}"


def sentence(text: str) -> str:
    """Return a text with a capital first letter.

    >>> sentence("held-out text: 1.2 Bits")
    'Held-out text: 1.2 Bits'
    """
    return text[:1].upper() + text[1:]
