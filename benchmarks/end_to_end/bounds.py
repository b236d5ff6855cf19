"""What the whole run must show, and what it aims at, beside what its result files say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Bound:
    """A figure and its limits.

    Attributes:
        what: In words.
        found: None where no result file has it.
        must: None where it is only reported.
        form: How a figure is written.
        most: Whether less is better.
    """

    what: str
    found: float | None
    must: float | None
    aim: float | None
    form: str = "{:.2f}"
    most: bool = False

    @property
    def told(self) -> str:
        """What was found."""
        return "not measured" if self.found is None else self.form.format(self.found)

    @property
    def must_told(self) -> str:
        """The limit."""
        return "reported" if self.must is None else self._limit(self.must)

    @property
    def aim_told(self) -> str:
        """The aim."""
        return "" if self.aim is None else self._limit(self.aim)

    @property
    def verdict(self) -> str:
        """Whether it holds, and whether the aim is reached as well."""
        if self.found is None:
            return "not run"
        if self.must is not None and not self._within(self.must):
            return "fails"
        reached = self.aim is not None and self._within(self.aim)
        if self.must is None:
            return "" if self.aim is None else "aim reached" if reached else "below its aim"
        return "holds, aim reached" if reached else "holds"

    def _limit(self, limit: float) -> str:
        return ("at most " if self.most else "at least ") + self.form.format(limit)

    def _within(self, limit: float) -> bool:
        assert self.found is not None
        return self.found <= limit if self.most else self.found >= limit


def bounds_of(results: Results) -> Iterator[Bound]:
    """Every figure, from the result files that have it."""
    one = "one GPU, "
    yield Bound(one + "P-KL, tokens/s", _rate(results, "p_kl_wide"), 25_000, 30_000, "{:,.0f}")
    yield Bound(one + "P-KL, times the serial loop", _of(results, "p_kl_wide", "times_serial"), 1.75, None)
    for loss, name in (("gold", "gold"), ("h_kl", "H-KL")):
        yield Bound(one + f"{name}, tokens/s", _rate(results, f"{loss}_wide"), 22_000, 27_000, "{:,.0f}")
        yield Bound(one + f"{name}, times the serial loop", _of(results, f"{loss}_wide", "times_serial"), 2.5, None)
    public = _of(results, "gold_wide", "times_public")
    yield Bound(one + "gold, times a serial loop with a public loss, TRL's GOLD", public, 2.5, None)
    for eight, words in (("p_kl_fp8_wide", ""), ("p_kl_fp8_wide_mps", ", with MPS")):
        what = f"P-KL, teacher in 8 bits{words}, tokens/s"
        yield Bound(one + what, _rate(results, eight), None, 40_000, "{:,.0f}")
    difference = _of(results, "p_kl_fp8_wide", "loss_difference")
    mean = difference["mean"] if difference else None
    yield Bound("its loss differs from bfloat16's by, mean over steps", mean, None, None, "{:.4f}", most=True)
    what = "student waits for rows or for its teacher, share of a step, worst row with four samples together"
    yield Bound(what, _wait(results), 0.02, 0.005, "{:.2%}", most=True)
    for name, words in (("p_kl_hidden", "kept"), ("p_kl_hidden_checkpointed", "recomputed")):
        share = _memory_share(results, name)
        yield Bound(
            f"P-KL from hidden states, activations {words}: peak memory above weights, gradients and moments, trainer, "
            "teacher and ring together, of the serial loop's",
            share, 0.5, 0.25, "{:.0%}", most=True,
        )  # fmt: skip
    yield Bound("two GPUs, teacher on its own, times one GPU", _of(results, "teacher_apart", "times_beside"), 1.5, 1.8)
    ways = ("two_ranks", "two_ranks_kept", "two_ranks_mps")
    times = {way: found for way in ways if (found := _of(results, way, "times_beside"))}
    best = max(times, key=lambda way: times[way], default="")
    yield Bound("two GPUs, student shared by FSDP2, a teacher each, times one GPU", times.get(best), 1.8, 1.95)
    shared = _of(results, best, "loss_difference")
    largest = shared["largest"] if shared else None
    yield Bound("its loss differs from one GPU's by, largest of a step", largest, 1e-3, None, "{:.5f}", most=True)


def _of(results: Results, variant: str, name: str) -> Any:
    """A variant's figure, from the first result file that has it."""
    for result in results.values():
        found = result["variants"].get(variant, {}).get(name)
        if found is not None:
            return found
    return None


def _rate(results: Results, variant: str) -> float | None:
    found: float | None = _of(results, variant, "tokens_per_second")
    return found


def _wait(results: Results) -> float | None:
    """The worst of all wide variants; both waits, since a teacher's slot is claimed through the queue too."""
    variants = [variant for result in results.values() for variant in result["variants"].values()]
    medians = [variant["median"] for variant in variants if variant["wide"] and "median" in variant]
    return max((median["data_wait"] + median["teacher_wait"] for median in medians), default=None)


def _memory_share(results: Results, name: str) -> float | None:
    parts = ("peak_bytes_above_state", "teacher_bytes_above_weights", "ring_bytes")
    for result in results.values():
        variant = result["variants"].get(name, {})
        serial = result["serial"].get(variant.get("serial", ""))
        if serial and all(part in variant for part in parts):
            return float(sum(variant[part] for part in parts) / serial["peak_bytes_above_state"])
    return None
