"""The page's pictures, as SVG that follows the reader's light or dark setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments.digits.methods import METHODS
from experiments.digits.summary import Measured, Summary, number

LEFT, WIDE, ROW, TOP = 330, 520, 26, 58
_STYLE = """  <style>
    svg { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; font-size: 13px; }
    .paper { fill: #ffffff; } .text { fill: #3d4a5a; } .name { fill: #14202e; font-weight: 600; font-size: 14px; }
    .grid { stroke: #d5d9de; } .error { stroke: #14202e; stroke-width: 1.5; } .dot { fill: #14202e; }
    .a { fill: #2a6fdb; } .b { fill: #d98324; } .c { fill: #b9c4d0; }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #12171e; } .text { fill: #b9c4d0; } .name { fill: #eef3f8; } .grid { stroke: #2b3440; }
      .error { stroke: #eef3f8; } .dot { fill: #eef3f8; }
      .a { fill: #4c86dd; } .b { fill: #dd9a4a; } .c { fill: #566170; }
    }
  </style>"""


def pictures(summary: Summary) -> dict[str, str]:
    """Return all pictures by file name; none without results."""
    if not summary:
        return {}
    rows = [("first students", summary.students())]
    rows += [(method.title.replace("`", ""), summary.runs(name)) for name, method in METHODS.items()]
    rows = [(title, found) for title, found in rows if found]
    teachers = [("teacher, digits", summary.teacher("teacher-digits"))]
    return {
        "evidence-answers.svg": _bars(
            "Right answers to held-out problems",
            "Bars are means over seeds, dots single seeds, lines the standard deviation.",
            [row for row in teachers if row[1]] + rows,
            (("exact_match.all", "a", "right answers"),),
        ),
        "evidence-gains.svg": _gains(summary),
        "evidence-numerals.svg": _bars(
            "Probability where an answer of several digits is due",
            "Means over seeds: on the right answer's first token, and on numerals that begin with another digit of it.",
            rows,
            (("numerals.right", "a", "right numeral"), ("numerals.misled", "b", "misled")),
        ),
    }


def _gains(summary: Summary) -> str:
    """Draw the gain in right answers over cross-entropy only, from the same first student."""
    path, least, most = "exact_match.all", -0.8, 0.2
    rows = [(m.title.replace("`", ""), summary.difference(name, "ce", path)) for name, m in METHODS.items()]
    rows = [(title, values) for title, values in rows[1:] if values]
    title = "Right answers, less those of cross-entropy only from the same first student"
    text = "; ".join(f"{name}: {100 * statistics.fmean(values):+.0f} points" for name, values in rows)
    lines = head(
        title,
        f"Bars are means over seeds, dots single seeds, lines the standard deviation. {text}.",
        len(rows),
        "percentage points",
    )

    def at(value: float) -> float:
        return LEFT + WIDE * (min(max(value, least), most) - least) / (most - least)

    bottom = TOP + ROW * len(rows)
    for tick in range(-8, 3, 2):
        lines += tick_at(at(tick / 10), bottom, f"{tick * 10:+d}" if tick else "0")
    for place, (name, values) in enumerate(rows):
        y, mean = TOP + ROW * place, statistics.fmean(values)
        lines.append(f'  <text class="text" x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{name}</text>')
        left, right = sorted((at(0), at(mean)))
        lines.append(f'  <rect class="a" x="{left:.1f}" y="{y + 5}" width="{right - left:.1f}" height="16"/>')
        lines += error(y + 13, [at(value) for value in values], LEFT, LEFT + WIDE)
    return "\n".join([*lines, "</svg>"]) + "\n"


def head(title: str, text: str, rows: int, legend: str = "") -> list[str]:
    """Return the first elements of a picture: its frame, title, description and legend.

    Args:
        title: Its title, also shown.
        text: Its content in words, for readers that do not see it.
        rows: Number of bars.
        legend: A line below the title.
    """
    height = TOP + ROW * rows + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img" aria-labelledby="title desc">',
        f'  <title id="title">{title}</title>',
        f'  <desc id="desc">{text}</desc>',
        _STYLE,
        f'  <rect class="paper" width="900" height="{height}" rx="10"/>',
        f'  <text class="name" x="20" y="26">{title}</text>',
    ]
    return [*lines, f'  <text class="text" x="{LEFT}" y="46">{legend}</text>'] if legend else lines


def tick_at(x: float, bottom: int, text: str) -> list[str]:
    """Return a vertical line of the grid with its label."""
    return [
        f'  <path class="grid" d="M{x:.0f} {TOP}V{bottom}"/>',
        f'  <text class="text" x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{text}</text>',
    ]


def _bars(
    title: str, text: str, rows: Sequence[tuple[str, list[Measured]]], parts: Sequence[tuple[str, str, str]]
) -> str:
    """Draw horizontal bars from 0 to 1; several parts stand one after the other."""
    lines = head(title, f"{text} {_in_words(rows, parts)}", len(rows))
    for place, (_, kind, name) in enumerate(parts):
        x = LEFT + 130 * place
        lines.append(f'  <rect class="{kind}" x="{x}" y="36" width="10" height="10"/>')
        lines.append(f'  <text class="text" x="{x + 16}" y="46">{name}</text>')
    bottom = TOP + ROW * len(rows)
    for tick in range(0, 11, 2):
        lines += tick_at(LEFT + WIDE * tick / 10, bottom, f"{tick * 10}%")
    for place, (name, found) in enumerate(rows):
        lines += _row(TOP + ROW * place, name, found, parts)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _row(y: int, name: str, found: list[Measured], parts: Sequence[tuple[str, str, str]]) -> list[str]:
    bars = [f'  <text class="text" x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{name}</text>']
    errors: list[str] = []
    start = float(LEFT)
    for path, kind, _ in parts:
        values = [WIDE * value for value in (number(one, path) for one in found) if value is not None]
        if values:
            mean = statistics.fmean(values)
            bars.append(f'  <rect class="{kind}" x="{start:.1f}" y="{y + 5}" width="{mean:.1f}" height="16"/>')
            errors += error(y + 13, [start + value for value in values], LEFT, LEFT + WIDE)
            start += mean
    return bars + errors


def error(y: int, places: Sequence[float], least: float, most: float) -> list[str]:
    """Return a dot per seed and the standard deviation around their mean, if there are several."""
    if len(places) < 2:
        return []
    mean, half = statistics.fmean(places), statistics.stdev(places)
    low, high = max(least, mean - half), min(most, mean + half)
    dots = [f'  <circle class="dot" cx="{place:.1f}" cy="{y}" r="2"/>' for place in places]
    return [f'  <path class="error" d="M{low:.1f} {y}H{high:.1f}"/>', *dots]


def _in_words(rows: Sequence[tuple[str, list[Measured]]], parts: Sequence[tuple[str, str, str]]) -> str:
    text = []
    for name, found in rows:
        values = [
            f"{what} {statistics.fmean(known):.0%}"
            for path, _, what in parts
            if (known := [v for v in (number(one, path) for one in found) if v is not None])
        ]
        text.append(f"{name}: {', '.join(values)}")
    return "; ".join(text) + "."
