"""Formatting of values for pages: numbers and times."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from markupsafe import Markup, escape

from xtoken_services.common.run.quantities import span


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
