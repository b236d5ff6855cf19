"""The benchmark of whole runs: ratios within one file, its calls, its bounds."""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import pages
from benchmarks.bounds import Bound
from benchmarks.end_to_end import labels
from benchmarks.end_to_end import pipeline as pipeline_module
from benchmarks.end_to_end.__main__ import enter_figures, parsed
from benchmarks.end_to_end.assets import QWEN3_45B, SMALL, Assets
from benchmarks.end_to_end.bounds import bounds_of
from benchmarks.end_to_end.large_model import write_model
from benchmarks.end_to_end.report import SAME, compare, measured, opened, write
from benchmarks.end_to_end.timeline import Timeline
from benchmarks.end_to_end.variants import VARIANTS, run_spec

MACHINE = {"gpus": ["a GPU"], "digest": "0123", "torch": "2.11.0"}
TOKENS = {"student": 10, "teacher": 12, "shared": 8}
CALL = {"samples": 4, "context": 2048, "steps": 2, "warmup": 1, "small": False, "variants": [], "also": ""}


def section(result: dict[str, Any]) -> str:
    """Return the generated section about one result file."""
    (part,) = (part for part in pages.PARTS if part.name == "end_to_end")
    return part.text(results={"end_to_end": result})


def test_a_ratio_is_taken_within_its_own_file() -> None:
    compared = 0
    for result in pages.end_to_end_results().values():
        for variant in result["variants"].values():
            others = {"times_serial": result["serial"].get(variant["serial"]), "times_beside": None}
            if variant.get("beside"):
                others["times_beside"] = result["variants"].get(variant["beside"])
            for name, other in others.items():
                if name in variant:
                    assert other is not None
                    expected = variant["tokens_per_second"] / other["tokens_per_second"]
                    assert variant[name] == pytest.approx(expected)
                    compared += 1
    assert compared


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


@pytest.mark.parametrize("words", [[], ["--small"], ["--variants", "p_kl_wide"]])
def test_a_call_by_hand_leaves_the_page_s_files_alone(words: list[str]) -> None:
    assert parsed(words).out.parent == parsed(words).work
    assert (parsed(words).work == parsed([]).work) == ("--small" not in words), (
        "thin models are not taken for real ones"
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_model_is_written_as_transformers_reads_it(tied: bool, tmp_path: Path) -> None:
    values = {**QWEN3_45B, **SMALL, "vocab_size": 100, "tie_word_embeddings": tied}
    write_model(tmp_path / "model", AutoConfig.for_model(values.pop("model_type"), **values), 0)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    assert (model.model.norm.weight == 1).all()
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) == tied
    assert float(model.lm_head.weight.detach().float().std()) == pytest.approx(0.02, rel=0.05)
    assert torch.isfinite(model(torch.arange(5).unsqueeze(0)).logits).all()


def rate(tokens_per_second: float, losses: list[float], **more: Any) -> dict[str, Any]:
    """A variant's figures, as far as they are compared."""
    base = {"loss": "gold", "serial": "gold", "beside": ""}
    return {**base, "tokens_per_second": tokens_per_second, "losses": losses, **more}


def test_every_call_that_makes_a_file_keeps_its_settings(tmp_path: Path) -> None:
    out = tmp_path / "end_to_end.json"
    first = {**CALL, "variants": ["gold_wide"], "also": "another run"}
    report = opened(out, first, MACHINE, TOKENS, go_on=True)
    report["variants"]["gold_wide"] = rate(20.0, [1.0, 2.0])
    report["variants"]["gold"] = {"loss": "gold", "serial": "gold", "beside": "", "failed": "no memory"}
    write(report, out)
    report = opened(out, {**CALL, "variants": ["gold_wide_mps"]}, MACHINE, TOKENS, go_on=True)
    report["serial"] |= {"gold": {"tokens_per_second": 10.0}, "gold public": {"tokens_per_second": 2.0}}
    report["variants"]["gold_wide_mps"] = rate(30.0, [1.0, 2.5], beside="gold_wide")
    write(report, out)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(call["variants"], call["also"]) for call in found["calls"]] == [
        (["gold_wide"], "another run"),
        (["gold_wide_mps"], ""),
    ]
    first_one, second = found["variants"]["gold_wide"], found["variants"]["gold_wide_mps"]
    assert (first_one["times_serial"], first_one["times_public"]) == (2.0, 10.0), "a loop of a later call counts too"
    assert (second["times_serial"], second["times_beside"]) == (3.0, 1.5)
    assert second["loss_difference"] == {"first": 0.0, "mean": 0.25, "largest": 0.5}
    assert "times_serial" not in found["variants"]["gold"]
    assert opened(out, CALL, MACHINE, TOKENS, go_on=False)["variants"] == {}


@pytest.mark.parametrize(
    ("call", "machine", "told"),
    [
        ({"steps": 3}, {}, "steps 2, not 3"),
        ({"samples": 8}, {}, "samples 4, not 8"),
        ({"context": 1024}, {}, "context 2048, not 1024"),
        ({"warmup": 0}, {}, "warmup 1, not 0"),
        ({"small": True}, {}, "small False, not True"),
        ({}, {"torch": "2.12.0"}, "machine torch 2.11.0, not 2.12.0"),
        ({}, {"gpus": ["another"]}, r"machine gpus \['a GPU'\], not \['another'\]"),
    ],
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


def test_figures_of_another_machine_of_the_kind_are_added_and_not_compared(tmp_path: Path) -> None:
    out = tmp_path / "end_to_end.json"
    report = opened(out, {**CALL, "digest": "0123"}, MACHINE, TOKENS, go_on=True)
    report["variants"]["chain_wide"] = rate(20.0, [1.0, 2.0], digest="0123")
    write(report, out)
    report = opened(out, {**CALL, "digest": "4567"}, {**MACHINE, "digest": "4567"}, TOKENS, go_on=True)
    assert labels.machines_of(report) == 2
    fp8 = rate(30.0, [1.0, 2.0], beside="chain_wide", digest="4567")
    report["variants"]["chain_fp8_wide"] = fp8
    write(report, out)
    assert "times_beside" not in fp8
    report["variants"]["chain_wide"] = rate(20.0, [1.0, 2.0], digest="4567")
    write(report, out)
    assert fp8["times_beside"] == 1.5


def test_figures_of_more_steps_are_kept_and_a_run_cut_short_counts(tmp_path: Path) -> None:
    out, call = tmp_path / "end_to_end.json", {**CALL, "digest": "0123"}
    report = opened(out, call, MACHINE, TOKENS, go_on=True)
    figures = {"tokens_per_second": 20.0, "losses": [1.0], "steps": 5}
    enter_figures(report, {}, call, out, "chain_wide", figures)
    found = json.loads(out.read_text(encoding="utf-8"))["variants"]["chain_wide"]
    assert (found["steps"], found["digest"], found["wide"]) == (5, "0123", True)
    assert measured(found) and not measured(found, steps=20)
    enter_figures(report, found, call, out, "chain_wide", {"failed": "no memory"})
    assert report["variants"]["chain_wide"] == found
    enter_figures(report, found, call, out, "chain_wide", {**figures, "steps": 20})
    assert report["variants"]["chain_wide"]["steps"] == 20
    assert call["variants"] == ["chain_wide"]


def test_a_time_line_says_what_a_run_does_and_keeps_when(tmp_path: Path) -> None:
    output, console, said = tmp_path / "out", tmp_path / "console.log", []
    timeline = Timeline(output, console, said.append)
    timeline.poll()
    (output / "logs").mkdir(parents=True)
    console.write_text("run: starting, building tables: 10%\n", encoding="utf-8")
    timeline.poll()
    console.write_text("run: starting, building tables: 20%\n", encoding="utf-8")
    (output / "resolved.json").write_text("{}", encoding="utf-8")
    (output / "logs" / "teacher-0-0.1.log").write_text("teacher loaded from there\n", encoding="utf-8")
    timeline.poll()
    row = {"step": 0, "time": time.time(), "seconds": 2.0, "loss_seconds": 1.5}
    (output / "steps.jsonl").write_text(json.dumps(row) + '\n{"step": 1', encoding="utf-8")
    timeline.poll()
    assert list(timeline.events) == ["files checked", "teacher loaded", "first step"]
    assert len(timeline.rows) == 1, "a line that is being written is read when it is whole"
    words = [line.partition(" s  ")[2] for line in said]
    assert words[0] == "starting, building tables: 10%"
    assert words[1:] == [
        "== files checked",
        "== teacher loaded",
        "== first step",
        "step 1: 2.000 s (loss_seconds 1.500)",
    ]


def pretended(directory: Path, rows: int, seconds: float) -> list[str]:
    """Return a command that writes the records of some steps, then runs on."""
    code = f"""
import json, pathlib, sys, time
out = pathlib.Path({str(directory)!r}) / "out"
out.mkdir()
row = {{"seconds": 0.5, "tokens": 100, "loss": 1.0, "memory_peak_bytes": 0}}
lines = [json.dumps({{**row, "step": i, "time": time.time() + i * 0.5}}) for i in range({rows})]
(out / "steps.jsonl").write_text("".join(line + chr(10) for line in lines))
time.sleep({seconds})
"""
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(("rows", "told"), [(2, "after 2 steps"), (9, "")])
def test_a_run_out_of_time_counts_the_steps_that_it_has_done(
    rows: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    run = pipeline_module._run
    monkeypatch.setattr(pipeline_module, "_run", lambda _, *rest: run(pretended(place, rows, 60), *rest))
    assets = Assets(tmp_path / "student", tmp_path / "teacher", tmp_path / "p.safetensors", tmp_path / "text.jsonl")
    spec = run_spec(VARIANTS["chain_wide"], parsed(["--steps", "20", "--warmup", "2"]))
    found: list[dict[str, Any]] = []

    def measure() -> dict[str, Any]:
        return pipeline_module.pipeline(
            assets, spec, directory=place, warmup=2, timeout_s=3.0, partial=lambda figures: found.append(figures)
        )

    if told:
        with pytest.raises(RuntimeError, match=f"not done after 3 s, {told}"):
            measure()
        assert not found
    else:
        figures = measure()
        assert (figures["steps"], figures["tokens_per_second"]) == (7, pytest.approx(200.0, rel=0.01))
        assert [part["steps"] for part in found] == [7]


def test_nothing_is_added_to_a_file_that_does_not_say_its_calls(tmp_path: Path) -> None:
    out = tmp_path / "end_to_end.json"
    out.write_text(json.dumps({"machine": MACHINE, "vocabularies": TOKENS, "settings": CALL}), encoding="utf-8")
    with pytest.raises(SystemExit, match="no list of its calls"):
        opened(out, CALL, MACHINE, TOKENS, go_on=True)


def test_the_page_says_what_each_call_was_and_what_ran_meanwhile() -> None:
    result = pages.result("end_to_end")
    plain = {**result["calls"][0], "public_loss": False, "also": ""} | {"trl": ""}
    result["calls"] = [
        {**plain, "variants": ["p_kl_wide", "h_kl_wide"], "also": "a browser ran"},
        {**plain, "variants": ["gold_wide"], "public_loss": True, "trl": "1.2.3"},
    ]
    text = section(result)
    assert "1. `--variants p_kl_wide h_kl_wide`; meanwhile a browser ran.\n" in text
    assert "2. `--variants gold_wide --public-loss` (TRL 1.2.3).\n" in text
    assert "one after the other, in 2 calls:" in text


def test_the_parts_of_a_trainer_s_step_are_told_where_it_has_told_them() -> None:
    result = pages.result("end_to_end")
    title = "A step of xtoken's trainer, ms:"
    for variant in result["variants"].values():
        variant["median"] = {name: value for name, value in variant["median"].items() if name not in labels.STEP_PARTS}
    assert title not in section(result)
    parts = {"forward_seconds": 0.05, "loss_seconds": 0.02, "backward_seconds": 0.11, "optimizer_seconds": 0.004}
    result["variants"]["p_kl_wide"]["median"] |= {"seconds": 0.2, **parts}
    result["variants"]["p_kl_hidden_checkpointed"]["median"] |= {"seconds": 0.3, "loss_seconds": 0.02}
    assert section(result).partition(title)[2].strip().splitlines() == [
        "- P-KL, four samples together, activations kept: 200 (forward 50, loss 20, backward 110, optimiser 4)",
        "- P-KL, hidden states, activations recomputed: 300 (loss 20)",
    ]


def test_documents_of_drawn_lengths_are_compared_with_padded_ones_and_with_one_length() -> None:
    median = {"data_wait": 0.0, "teacher_wait": 0.0, "padding": 0.004, "mfu": 0.4}
    result = pages.result("end_to_end")
    for name, tokens in (("fixed_lengths", 100.0), ("text_padded", 50.0), ("text_packed", 95.0)):
        variant = {**asdict(VARIANTS[name]), "serial": "p_kl", "tokens_per_second": tokens, "losses": [1.0]}
        result["variants"][name] = {**variant, "median": median, "command_to_first_step_s": 9.0}
    compare(result)
    found = {b.what.removeprefix("one GPU, lengths of text, packed, "): b for b in bounds_of({"one": result})}
    assert found["relative to documents of one length"].value == pytest.approx(0.95)
    assert found["relative to padded rows"].verdict == "holds, aim reached"
    assert found["computed positions that are no token"].verdict == "holds, aim reached"
    line = "lengths of text: 40.0% MFU, 0.40% of the computed positions are no token, 0.95 times the rate"
    assert line in section(result)


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
    (bound,) = (
        found for found in bounds_of(results) if found.what.startswith("student waits for rows or for its teacher")
    )
    assert bound.value == pytest.approx(0.011)
    assert (bound.must, bound.aim, bound.verdict) == (0.02, 0.005, "holds")


@pytest.mark.parametrize(
    ("found", "must", "aim", "most", "verdict"),
    [
        (2.0, 1.5, 1.8, False, "holds, aim reached"),
        (1.6, 1.5, 1.8, False, "holds"),
        (1.4, 1.5, 1.8, False, "fails"),
        (0.6, 0.5, 0.25, True, "fails"),
        (0.2, 0.5, 0.25, True, "holds, aim reached"),
        (2.0, None, 1.8, False, "aim reached"),
        (1.0, None, 1.8, False, "below its aim"),
        (1.0, None, None, True, ""),
        (None, 1.5, 1.8, False, "not run"),
    ],
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
    (share,) = (b.value for b in bounds_of({"one": result}) if "hidden states, activations kept" in b.what)
    assert share == pytest.approx(0.4)
    result["serial"] = {}
    assert all(b.value is None for b in bounds_of({"one": result}) if "hidden states" in b.what)
