"""Parts of a picture of bars, as SVG that follows the reader's light or dark setting."""

from __future__ import annotations

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


def head(title: str, text: str, rows: int, legend: str) -> list[str]:
    """Return the first elements of a picture: its frame, title, description and legend.

    Args:
        title: Its title, also shown.
        text: Its content in words, for readers that do not see it.
        rows: Number of bars.
        legend: A line below the title.
    """
    height = TOP + ROW * rows + 34
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" role="img" aria-labelledby="title desc">',
        f'  <title id="title">{title}</title>',
        f'  <desc id="desc">{text}</desc>',
        _STYLE,
        f'  <rect class="paper" width="900" height="{height}" rx="10"/>',
        f'  <text class="name" x="20" y="26">{title}</text>',
        f'  <text class="text" x="{LEFT}" y="46">{legend}</text>',
    ]


def tick_at(x: float, bottom: int, text: str) -> list[str]:
    """Return a vertical line of the grid with its label."""
    return [
        f'  <path class="grid" d="M{x:.0f} {TOP}V{bottom}"/>',
        f'  <text class="text" x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{text}</text>',
    ]
