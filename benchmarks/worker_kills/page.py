"""Write what kills and a resumed run have shown into `docs/performance.md`, and draw the run's losses.

    python -m benchmarks.worker_kills.page [--check]

With `--check` nothing is written: the exit status says whether the page is up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.worker_kills.whole_run import RUNS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "img" / "resume.svg"
START, END = "<!-- kills: written by benchmarks/worker_kills/page.py -->", "<!-- end of kills -->"
MIB = 1 << 20


def figures() -> str:
    """The generated part of the page."""
    lines = [START]
    for name, (tell, what) in PARTS.items():
        file = RESULTS / f"{name}.json"
        found = [*tell(json.loads(file.read_text(encoding="utf-8")))] if file.exists() else [f"Not measured: {what}."]
        lines += [*found, ""]
    return "\n".join([*lines, END])


def rendered() -> str:
    """The page as the result files want it."""
    return pages.with_part(PAGE, START, END, figures())


def _kills(result: dict[str, Any]) -> Iterator[str]:
    found = result["summary"]
    count = sum(found["kills"].values())
    yield (
        f"{count} kills in {result['seconds']:.0f} s on {result['device']}: {result['runs']} runs of two-layer models "
        f"side by side, {result['rounds']} rounds, {sum(result['steps']):,} steps; {found['kills_while_pairing']} of "
        "the kills hit a pair that was just being made again."
    )
    yield ""
    yield from _table(
        [
            ("kills of a teacher, of a trainer", " and ".join(map(str, found["kills"].values())), "100 in all", None),
            (
                "kills of a pair that the other one did not report, s until the slowest report",
                f"{found['unreported']}, {_seconds(found['slowest_report_s'])}",
                f"0, {found['deadline_s']:g}",
                not found["unreported"] and found["slowest_report_s"] <= found["deadline_s"],
            ),
            (
                "until the sessions were a pair again and had taken a step, median and slowest, s",
                " and ".join(_seconds(s) for s in found["pair_again_s"].values()),
                "",
                None,
            ),
            _memory("GPU memory not returned at the end, MiB", found["memory_not_returned"], found["memory_limit"]),
            _memory("growth of one run's after any round, MiB", found["most_growth_of_a_run"], found["memory_limit"]),
            ("runs whose `steps.jsonl` has not each id once, or that failed", str(len(result["errors"])), "0",
             not result["errors"]),
        ]
    )  # fmt: skip


def _resume(result: dict[str, Any]) -> Iterator[str]:
    kills = result["kills"]
    told = [kill["reported_s"] for kill in kills]
    slowest = max((seconds for seconds in told if seconds is not None), default=None)
    noise, difference, times = result["noise"], result["difference"], result["times_noise_allowed"]
    victims = [sum(kill["victim"] == name for kill in kills) for name in ("teacher-0-0", "trainer-0")]
    steps = len(result["losses"][RUNS[0]])
    layers = f", the models cut to {result['layers']} layers" if result.get("layers") else ""
    yield (
        f"A whole run of {steps} steps on {result['machine']}, eager{layers}, its teacher killed {victims[0]} times, "
        f"its trainer {victims[1]} times, with a checkpoint every {result['checkpoint_every']} steps; beside it, at "
        "the same time and with the same seed, two that were left alone."
    )
    yield ""
    yield from _table(
        [
            (
                "kills that were not reported, s until the slowest report",
                f"{told.count(None)}, {_seconds(slowest)}",
                f"0, {result['deadline_s']:g}",
                None not in told and slowest is not None and slowest <= result["deadline_s"],
            ),
            ("each id trained once", _yes(result["each_id_once"]), "yes", result["each_id_once"]),
            ("the same ids in the same order", _yes(result["same_ids_in_order"]), "yes", result["same_ids_in_order"]),
            (
                "loss, killed beside undisturbed: mean and largest difference of a step",
                f"{difference['mean']:.2e}, {difference['largest']:.2e}",
                f"mean at most {times:g} times the two undisturbed ones': {noise['mean']:.2e}, {noise['largest']:.2e}",
                difference["mean"] <= times * noise["mean"],
            ),
            _memory("GPU memory not returned at the end, MiB", result["memory_not_returned"], result["memory_limit"]),
        ]
    )
    yield ""
    yield f"![Loss of three runs by step, and how far two of them are from the first](img/{PICTURE.name})"


PARTS = {
    "worker_kills": (_kills, "kills of small runs"),
    "resume": (_resume, "the whole run that is killed beside two that are not (`benchmarks.worker_kills.whole_run`)"),
}
"""What is told of a result file, and what is missing without it."""


def _memory(what: str, found: int, limit: int) -> tuple[str, str, str, bool]:
    return what, f"{found / MIB:.0f}", f"at most {limit // MIB}", found <= limit


def _table(rows: list[tuple[str, str, str, bool | None]]) -> Iterator[str]:
    yield "| | this run | must | |"
    yield "|---|---|---|---|"
    for what, found, must, holds in rows:
        yield f"| {what} | {found} | {must} | {'' if holds is None else 'holds' if holds else 'fails'} |"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def draw(result: dict[str, Any], path: Path) -> None:
    """The losses, and below them the differences from the first run by step, as SVG for light and dark pages."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    ink = "#808080"
    style = {"svg.hashsalt": "resume", "text.color": ink, "axes.edgecolor": ink, "axes.labelcolor": ink,
             "xtick.color": ink, "ytick.color": ink, "font.size": 9}  # fmt: skip
    with pyplot.rc_context(style):
        figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7.2, 4.6), height_ratios=(3, 2))
        losses = result["losses"]
        looks = dict(zip(RUNS, (("#1f77b4", "-", 3.0), ("#2ca02c", "--", 2.0), ("#d62728", ":", 2.0)), strict=True))
        for name, (colour, line, width) in looks.items():
            above.plot(losses[name], line, color=colour, linewidth=width, label=name)
        for name in RUNS[1:]:
            apart = [abs(a - b) for a, b in zip(losses[name], losses[RUNS[0]], strict=True)]
            below.plot(apart, looks[name][1], color=looks[name][0], label=f"{name}, from {RUNS[0]}")
        for number, kill in enumerate(result["kills"]):
            above.axvline(kill["step"] + 0.5, color=ink, linewidth=0.5, label="" if number else "a kill")
        above.set_ylabel("loss")
        below.set(xlabel="step", ylabel="difference")
        below.set_yscale("symlog", linthresh=1e-6)
        below.set_ylim(bottom=0.0)
        for axes in (above, below):
            axes.legend(frameon=False, fontsize=8)
        figure.tight_layout()
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def main() -> int:
    """Write the page and the picture, or say whether the page is up to date."""
    status = pages.command(__doc__, lambda: {PAGE: rendered()})
    file = RESULTS / "resume.json"
    if "--check" not in sys.argv and file.exists():
        draw(json.loads(file.read_text(encoding="utf-8")), PICTURE)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
