"""Acceptance bounds: a measured figure, the limit that it must keep and, for some, a tighter aim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Bound:
    """A figure and its limits.

    Attributes:
        what: Name of the figure, with its unit.
        value: The measured figure; None where no result file has it.
        must: The limit; None where the figure is only reported.
        aim: A tighter limit that is not required.
        form: Format of the figure and of its limits.
        most: Whether the limits are upper ones.
    """

    what: str
    value: float | None
    must: float | None = None
    aim: float | None = None
    form: str = "{:.4g}"
    most: bool = False

    @property
    def value_text(self) -> str:
        """The figure as text."""
        return "not measured" if self.value is None else self.form.format(self.value)

    @property
    def must_text(self) -> str:
        """The limit as text."""
        return "reported" if self.must is None else self._limit(self.must)

    @property
    def aim_text(self) -> str:
        """The aim as text."""
        return "" if self.aim is None else self._limit(self.aim)

    @property
    def holds(self) -> bool:
        """Whether the figure was measured and keeps its limit."""
        return self.value is not None and (self.must is None or self._within(self.must))

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.value is None:
            return "not run"
        if not self.holds:
            return "fails"
        reached = self.aim is not None and self._within(self.aim)
        if self.must is None:
            return "" if self.aim is None else "aim reached" if reached else "below its aim"
        return "holds, aim reached" if reached else "holds"

    def _limit(self, limit: float) -> str:
        return ("≤" if self.most else "≥") + self.form.format(limit)

    def _within(self, limit: float) -> bool:
        assert self.value is not None
        return self.value <= limit if self.most else self.value >= limit


def at_least(what: str, value: float | None, limit: float, form: str = "{:.4g}") -> Bound:
    """Return a lower bound."""
    return Bound(what, value, limit, form=form)


def at_most(what: str, value: float | None, limit: float, form: str = "{:.4g}") -> Bound:
    """Return an upper bound."""
    return Bound(what, value, limit, form=form, most=True)


def collation_bounds(result: dict[str, Any], workers: dict[str, Any]) -> list[Bound]:
    """Return the bounds of alignment, collation and projection; each figure is the worst of all rows."""
    align, projection = result["align"], result["projection"]
    return [
        at_most("rows with a chunk whose sides spell different bytes", sum(not r["equal_chunks"] for r in align), 0),
        at_least("alignment alone, million student tokens/s", min(r["student_tokens_per_s"] for r in align) / 1e6, 8),
        at_least("alignment alone, relative to TRL's offset walk", min(r["times_offset_walk"] for r in align), 8),
        at_least("collator, relative to tokenizing", min(r["rate_of_tokenizing"] for r in result["collator"]), 0.85),
        at_most("projection of 130,000 tokens each, s", projection["seconds"], 5),
        at_most("projections of two processes that differ", int(not projection["identical"]), 0),
        at_least("two collators, relative to one", workers["two_of_one"], 1.8),
    ]


def divided_bound(result: dict[str, Any]) -> Bound:
    """Return the bound of a teacher over two GPUs, the worst of all rows."""
    return Bound("divided teacher, of one GPU's rate", min(result["times_one"].values()), 1.5, 1.8, "{:.2f}")


def control_bounds(result: dict[str, Any]) -> list[Bound]:
    """Return the bounds of the control plane."""
    slowest = max(times["p99_ms"] for times in result["list"].values() if isinstance(times, dict))
    crowd = result.get("crowd")
    listing = ("first page", "page in the middle", "page of runs")
    longest = max(crowd["requests"][name]["max_ms"] for name in listing) if crowd else None
    return [
        at_most("`GET /v1/runs`, slowest p99, ms", slowest, 20),
        at_most("500 readers: longest wait for a page of 10,000 runs, ms", longest, 1000),
        at_most("500 readers: longest delay of a followed line, ms", crowd and crowd["followed"]["max_ms"], 2000),
        at_most(
            "500 readers: slowest followed log, relative to the median",
            crowd and crowd["followed"]["slowest_to_median"],
            2,
        ),
        at_most("`POST /v1/runs` to the first step, slowest, s", max(result["first-step"]["seconds"]), 20),
        at_most("slow-down of training by readers", result["windows"]["slower"], 0.03),
    ]


def kill_bounds(small: dict[str, Any], errors: list[str]) -> list[Bound]:
    """Return the bounds of killed runs, from their summary."""
    limit = small["memory_limit"] / MIB
    return [
        at_most("kills that the peer did not report", small["unreported"], 0),
        at_most("slowest report of a kill, s", small["slowest_report_s"], small["deadline_s"], "{:.1f}"),
        at_most("GPU memory not returned, MiB", small["memory_not_returned"] / MIB, limit, "{:.0f}"),
        at_most("growth of a run's GPU memory, MiB", small["most_growth_of_a_run"] / MIB, limit, "{:.0f}"),
        at_most("runs that failed or did not train each id once", len(errors), 0),
    ]


def resume_bounds(resume: dict[str, Any]) -> list[Bound]:
    """Return the bounds of a killed and resumed run."""
    reported = [kill["reported_s"] for kill in resume["kills"]]
    slowest = max((seconds for seconds in reported if seconds is not None), default=None)
    wrong_ids = int(not resume["each_id_once"]) + int(not resume["same_ids_in_order"])
    difference, noise = (resume[name]["mean"] for name in ("difference", "noise"))
    whole, memory, limit = "whole run: ", resume["memory_not_returned"] / MIB, resume["memory_limit"] / MIB
    return [
        at_most(f"{whole}kills that the peer did not report", reported.count(None), 0),
        at_most(f"{whole}slowest report of a kill, s", slowest, resume["deadline_s"], "{:.1f}"),
        at_most(f"{whole}ids not trained once, or in another order", wrong_ids, 0),
        at_most(f"{whole}mean difference of the loss", difference, resume["times_noise_allowed"] * noise, "{:.2g}"),
        at_most(f"{whole}GPU memory not returned, MiB", memory, limit, "{:.0f}"),
    ]
