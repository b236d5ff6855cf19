"""The README's figures are those of the result files."""

from __future__ import annotations

import json
import re

from benchmarks import readme


def test_the_readme_is_in_step_with_the_results() -> None:
    assert readme.rendered() == readme.PAGE.read_text(encoding="utf-8"), "run: python -m benchmarks.readme"


def test_a_figure_is_compared_with_the_one_beside_it() -> None:
    result = json.loads((readme.RESULTS / "end_to_end.json").read_text(encoding="utf-8"))
    (row,) = (line for line in readme.rendered().splitlines() if line.startswith("| a whole run"))
    found = re.search(r"\| ([\d,]+) tokens/s \| [^|]*: ([\d,]+) \| ([\d.]+) times", row)
    assert found is not None
    ours, serial, times = (float(number.replace(",", "")) for number in found.groups())
    assert ours in [round(variant["tokens_per_second"]) for variant in result["variants"].values()]
    assert abs(ours / serial - times) < 0.01


def test_every_command_beside_a_figure_is_a_target() -> None:
    targets = (readme.ROOT / "Makefile").read_text(encoding="utf-8")
    table = readme.rendered().partition(readme.START)[2].partition(readme.END)[0]
    commands = re.findall(r"`make ([\w-]+)`", table)
    assert len(commands) == len(table.strip().splitlines()) - 2
    assert all(f"\n{command}:" in targets for command in commands)
