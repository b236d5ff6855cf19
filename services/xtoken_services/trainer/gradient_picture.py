"""Picture of the gradients by class of chunk: a table of cosines, with each class's size and norm."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

CELL, LEFT, TOP = 62, 300, 110
STYLE = (
    "text{font:12px sans-serif;fill:#14202e}rect.paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#eef3f8}rect.paper{fill:#12171e}}"
)


def gradient_picture(measured: Mapping[str, Any]) -> str:
    """Return an SVG of the cosines; blue cells point the same way, orange ones against each other.

    Args:
        measured: The result of `measure_gradients`.
    """
    names = list(measured["classes"])
    width, height = LEFT + CELL * len(names) + 20, TOP + CELL * len(names) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>',
        _text(10, 24, "Cosine between the gradients of classes of chunks"),
        _text(10, 44, f"{measured['documents']} held-out documents; norm: of the mean's gradient, cross-entropy = 1"),
    ]
    for row, a in enumerate(names):
        y = TOP + CELL * row
        entry = measured["classes"][a]
        ratio = "-" if entry["norm_ratio"] is None else f"{entry['norm_ratio']:.2f}"
        parts.append(_text(10, y + 26, a))
        parts.append(_text(10, y + 42, f"{entry['count']} of {entry['value']:.3f} nats, norm {ratio}"))
        parts.append(_text(LEFT + CELL * row + CELL / 2, TOP - 8, str(row + 1), "middle"))
        parts.append(_text(LEFT - 18, y + 34, str(row + 1), "middle"))
        for column, b in enumerate(names):
            parts.append(_cell(LEFT + CELL * column, y, measured["cosine"][a][b]))
    return "\n".join([*parts, "</svg>", ""])


def _cell(x: float, y: float, cosine: float | None) -> str:
    colour = "#2a6fdb" if (cosine or 0.0) >= 0 else "#d98324"
    opacity = abs(cosine or 0.0) * 0.8
    box = f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="{colour}" fill-opacity="{opacity:.3f}"/>'
    return box + _text(x + CELL / 2, y + CELL / 2 + 4, "-" if cosine is None else f"{cosine:.2f}", "middle")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
