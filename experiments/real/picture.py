"""A picture of bars, as SVG that follows the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Sequence

LEFT, WIDE, ROW, TOP = 330, 520, 26, 58
_STYLE = """  <style>
    svg { font-family: system-ui, -apple-system, "Segoe UI", sans-serif; font-size: 13px; }
    .paper { fill: #ffffff; } .text { fill: #3d4a5a; } .name { fill: #14202e; font-weight: 600; font-size: 14px; }
    .grid { stroke: #d5d9de; } .a { fill: #2a6fdb; } .b { fill: #d98324; }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #12171e; } .text { fill: #b9c4d0; } .name { fill: #eef3f8; } .grid { stroke: #2b3440; }
      .a { fill: #4c86dd; } .b { fill: #dd9a4a; }
    }
  </style>"""


def bars(
    title: str, text: str, legend: str, rows: Sequence[tuple[str, float, str]], scale: tuple[float, float, float]
) -> str:
    """Return a picture of horizontal bars.

    Args:
        title: Its title, also shown.
        text: Its content in words, for readers that do not see it.
        legend: A line below the title.
        rows: Name, value and colour (`a` or `b`) of each bar.
        scale: Least and largest value of the axis, and the distance of its lines.
    """
    least, most, step = scale

    def at(value: float) -> float:
        return LEFT + WIDE * (min(max(value, least), most) - least) / (most - least)

    height, bottom = TOP + ROW * len(rows) + 34, TOP + ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img" aria-labelledby="title desc">',
        f'  <title id="title">{title}</title>',
        f'  <desc id="desc">{text}</desc>',
        _STYLE,
        f'  <rect class="paper" width="900" height="{height}" rx="10"/>',
        f'  <text class="name" x="20" y="26">{title}</text>',
        f'  <text class="text" x="{LEFT}" y="46">{legend}</text>',
    ]
    for number in range(round(least / step), round(most / step) + 1):
        x, label = at(number * step), f"{number * step:+.2f}" if number else "0"
        lines.append(f'  <path class="grid" d="M{x:.0f} {TOP}V{bottom}"/>')
        lines.append(f'  <text class="text" x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for y, (name, value, kind) in zip(range(TOP, bottom, ROW), rows, strict=True):
        left, right = sorted((at(0.0), at(value)))
        lines.append(f'  <text class="text" x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{name}</text>')
        lines.append(f'  <rect class="{kind}" x="{left:.1f}" y="{y + 5}" width="{right - left:.1f}" height="16"/>')
        lines.append(f'  <text class="text" x="{right + 6:.1f}" y="{y + 18}">{value:+.3f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
