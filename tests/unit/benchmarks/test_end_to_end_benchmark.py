"""The benchmark of whole runs: ratios within one file, its calls, its bounds."""

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.bounds import Bound
from benchmarks.end_to_end import labels
from benchmarks.end_to_end.__main__ import SAME, compare, opened, parsed, write
from benchmarks.end_to_end.labels import bounds_of
from benchmarks.end_to_end.variants import VARIANTS, run_spec
from tests.support.cases import cases

MACHINE = {"gpus": ["a GPU"], "digest": "0123", "torch": "2.11.0"}
TOKENS = {"student": 10, "teacher": 12, "shared": 8}
CALL = {"samples": 4, "context": 2048, "steps": 2, "warmup": 1, "small": False, "variants": [], "also": ""}


def test_what_the_files_compare_is_what_would_be_compared_now() -> None:
    for result in pages.end_to_end_results().values():
        again = copy.deepcopy(result)
        compare(again)
        assert again == result


@pytest.mark.parametrize("name", labels.FILES)
def test_a_target_measures_what_its_file_has(name: str) -> None:
    """Whoever runs it gets the page's rows again, and no fewer."""
    text = (pages.ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"-m benchmarks\.end_to_end (.*)", text)
    (asked,) = (found for found in map(parsed, map(shlex.split, commands)) if found.out.stem == name)
    assert pages.ROOT / asked.out == pages.RESULTS / f"{name}.json"
    result = pages.result(name)
    calls = result["calls"]
    assert set(asked.variants) == {variant for call in calls for variant in call["variants"]} == set(result["variants"])
    assert all(getattr(asked, setting) == call[setting] for setting in SAME for call in calls)
    assert asked.public_loss == any(call["public_loss"] for call in calls)
    assert asked.no_serial == all(call["no_serial"] for call in calls)


@cases(
    "call, machine, told",
    ({"steps": 3}, {}, "steps 2, not 3"),
    ({"samples": 8}, {}, "samples 4, not 8"),
    ({"context": 1024}, {}, "context 2048, not 1024"),
    ({"warmup": 0}, {}, "warmup 1, not 0"),
    ({"small": True}, {}, "small False, not True"),
    ({}, {"torch": "2.12.0"}, "machine torch 2.11.0, not 2.12.0"),
    ({}, {"gpus": ["another"]}, r"machine gpus \['a GPU'\], not \['another'\]"),
)
def test_nothing_is_added_to_a_file_of_something_else(
    call: dict[str, Any], machine: dict[str, Any], told: str, tmp_path: Path
) -> None:
    out = tmp_path / "end_to_end.json"
    write(opened(out, CALL, MACHINE, TOKENS, go_on=False), out)
    before = out.read_bytes()
    with pytest.raises(SystemExit, match=told) as refused:
        opened(out, {**CALL, **call}, {**MACHINE, **machine}, TOKENS, go_on=True)
    assert "\n" not in str(refused.value)
    assert out.read_bytes() == before


def test_a_packed_variant_and_its_padded_one_differ_in_packing_alone() -> None:
    words = parsed(["--variants", "text_packed"])
    packed, padded = (run_spec(VARIANTS[f"text_{form}"], words) for form in ("packed", "padded"))
    assert padded["train"].pop("packing") == "off"
    assert packed == padded
    assert (packed["train"]["samples_per_step"], packed["train"]["micro_batch_tokens"]) == (16, 16_384)
    assert run_spec(VARIANTS["chat_packed"], words)["teacher"]["context_length"] == 4096


def test_the_student_s_waiting_is_the_worst_sum_of_both_waits() -> None:
    def waits(wide: bool, rows: float, teacher: float) -> dict[str, Any]:
        return {"wide": wide, "median": {"data_wait": rows, "teacher_wait": teacher}}

    one = {"p_kl_wide": waits(True, 0.004, 0.001), "gold_wide": {"wide": True, "failed": "no memory"}}
    two = {"teacher_apart": waits(True, 0.002, 0.009), "p_kl_hidden": waits(False, 0.5, 0.5)}
    results = {name: {"serial": {}, "variants": variants} for name, variants in {"one": one, "two": two}.items()}
    (bound,) = (found for found in bounds_of(results) if found.what.startswith("waits: "))
    assert bound.value == pytest.approx(0.011)
    assert (bound.must, bound.aim, bound.verdict) == (0.02, 0.005, "holds")


@cases(
    "found, must, aim, most, verdict",
    (2.0, 1.5, 1.8, False, "holds, aim reached"),
    (1.6, 1.5, 1.8, False, "holds"),
    (1.4, 1.5, 1.8, False, "fails"),
    (0.6, 0.5, 0.25, True, "fails"),
    (0.2, 0.5, 0.25, True, "holds, aim reached"),
    (2.0, None, 1.8, False, "aim reached"),
    (1.0, None, 1.8, False, "below its aim"),
    (1.0, None, None, True, ""),
    (None, 1.5, 1.8, False, "not run"),
)
def test_a_figure_is_held_to_its_limits(
    found: float | None, must: float | None, aim: float | None, most: bool, verdict: str
) -> None:
    assert Bound("x", found, must, aim, most=most).verdict == verdict


def test_memory_counts_the_teacher_and_its_ring_and_needs_the_serial_loop_beside() -> None:
    parts = {"peak_bytes_above_state": 2, "teacher_bytes_above_weights": 1, "ring_bytes": 1}
    result = {
        "serial": {"p_kl": {"peak_bytes_above_state": 10}},
        "variants": {"p_kl_hidden": {"serial": "p_kl", "wide": False, **parts}},
    }
    (share,) = (b.value for b in bounds_of({"one": result}) if "P-KL, hidden, kept" in b.what)
    assert share == pytest.approx(0.4)
    result["serial"] = {}
    assert all(b.value is None for b in bounds_of({"one": result}) if "P-KL, hidden" in b.what)
