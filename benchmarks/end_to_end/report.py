"""A result file of the whole run: the calls that it was put together by, and how its figures compare."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAME = ("samples", "context", "steps", "warmup", "small")
"""Settings that all calls of a file have in common."""
OWN = "digest"
"""Field of a machine that may differ between calls: it distinguishes machines of a kind."""


def opened(
    out: Path, call: dict[str, Any], machine: dict[str, Any], vocabularies: dict[str, int], *, go_on: bool
) -> dict[str, Any]:
    """Return a new report of one call, or (`go_on`) the one that a file holds, with this call as its last.

    Args:
        out: The file; nothing is written.
        call: Settings of this call; its `variants` are those that it has measured so far.
        machine: GPUs and versions.
        vocabularies: Tokens of both sides.
        go_on: Add to the file, if there is one.

    Raises:
        SystemExit: The file is of other GPUs, of other versions or of other settings.
    """
    fresh = {"machine": machine, "vocabularies": vocabularies, "calls": [call], "serial": {}, "variants": {}}
    if not go_on or not out.exists():
        return fresh
    before: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if others := "; ".join(_differences(before, fresh)):
        raise SystemExit(f"--go-on: {out} was taken with {others}: leave --go-on out, or name another file by --out")
    return {**before, "calls": [*before["calls"], call]}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if not before.get("calls"):
        yield "no list of its calls"
        return
    pairs = [(part, before.get(part, {}), now[part]) for part in ("machine", "vocabularies")]
    pairs += [("", *({name: report["calls"][0].get(name) for name in SAME} for report in (before, now)))]
    for part, old, new in pairs:
        for name in {**old, **new}:
            if name != OWN and old.get(name) != new.get(name):
                yield f"{part} {name} {old.get(name)}, not {new.get(name)}".strip()


def write(report: dict[str, Any], out: Path) -> None:
    """Write the report with its comparisons, as JSON."""
    compare(report)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(out)


def compare(report: dict[str, Any]) -> None:
    """Enter beside every variant what it is compared with: rates as ratios, losses as differences by step.

    Only figures of the same machine are compared.
    """
    for variant in report["variants"].values():
        if not measured(variant):
            continue
        others = {
            "times_serial": report["serial"].get(variant["serial"], {}),
            "times_public": report["serial"].get(f"{variant['loss']} public", {}),
            "times_beside": report["variants"].get(variant["beside"], {}),
            "times_fixed": report["variants"].get(variant.get("fixed", ""), {}),
        }
        for name, other in others.items():
            variant.pop(name, None)
            if measured(other) and _digest(report, other) == _digest(report, variant):
                variant[name] = variant["tokens_per_second"] / other["tokens_per_second"]
        if "times_beside" in variant:
            pairs = zip(variant["losses"], others["times_beside"]["losses"], strict=False)  # one may be cut short
            differences = [abs(ours - theirs) for ours, theirs in pairs]
            variant["loss_difference"] = {
                "first": differences[0],
                "mean": statistics.fmean(differences),
                "largest": max(differences),
            }


def _digest(report: dict[str, Any], found: dict[str, Any]) -> str:
    """Return the digest of the machine that something was measured on."""
    return str(found.get(OWN, report["machine"].get(OWN, "")))


def measured(found: dict[str, Any], *, steps: int = 0) -> bool:
    """Return whether a variant or a loop was measured, over so many steps or more; it may have failed or be missing."""
    return "tokens_per_second" in found and found.get("steps", steps) >= steps
