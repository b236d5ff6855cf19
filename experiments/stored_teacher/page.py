"""Write the result into `docs/operations.md`: `python -m experiments.stored_teacher.page`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.digits.predictions import holds
from experiments.stored_teacher.__main__ import FIRST_STEPS, LIVING, METHODS, RESULT, SIZES, STORED
from tests.ops.tolerances import OUTPUT
from xtoken_core.atomic import atomic_write

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
SIZES_RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "store.json"
PREDICTIONS = Path(__file__).with_name("predictions.toml")
BEGIN, END = "<!-- Begin: experiments.stored_teacher.page -->", "<!-- End: experiments.stored_teacher.page -->"
QUALITY = re.compile(r"stored-(chain|p-kl)-")
TITLES = {"p_kl": "P-KL", "chain": "chain"}
CONTENTS = {"logits": "whole logits", "topk": "64 largest logits", "hidden": "hidden states"}
KIT = {
    "float32": "32 bits",
    "float16": "16 bits",
    "polynomial": "16 values, polynomial",
    "normalized": "the same, `normalize_t`",
}
TEST = "bits_per_byte_handbook-de.test"
EARLIER = ", before chain had kernels for listed tokens"
"""Of the rows under `earlier` in the result file: the runs of `second` as they were first made."""
STEP_PARTS = {
    "step_seconds": "the whole step",
    "step_loss_seconds": "the loss's forward pass",
    "step_backward_seconds": "the backward pass, the student's with it,",
}
GIB, MIB = 1 << 30, 1 << 20
BOUND = OUTPUT["chunk", torch.bfloat16][0]
"""Relative deviation that the tolerance table allows."""


def render(result: Mapping[str, Any]) -> str:
    """Return the tables.

    Args:
        result: What `experiments.stored_teacher` wrote.
    """
    machine, runs = result["machine"], result["runs"]
    gpu = ", ".join(dict.fromkeys(machine["gpus"])) or "CPU"
    samples = next((run["samples_per_step"] for name, run in runs.items() if QUALITY.match(name)), 0)
    lines = [
        f"Measured with SmolLM2-135M-Instruct as the student and Gemma 3 270M as the teacher, {gpu}, "
        f"torch {machine['torch']}, German text, one data seed, learning rate {result['learning_rate']:g}. Quality, "
        f"held-out bits per byte of runs with {samples} documents a step:",
        "",
        *_quality(runs),
    ]
    earlier = result.get("earlier", {})
    if second := [*_second(earlier, EARLIER), *_second(runs)]:
        lines += [
            "",
            "Time and memory, one run after the other and nothing beside them; `whole run` is from command to end, "
            "kernels that Triton's cache lacks are compiled in it, and the GPU's memory is that of all processes:",
            "",
            "| run | steps | held-out bits per byte | seconds per step | whole run, s | kernels compiled | "
            "GPU's memory, GiB | student's tensors | waiting for the store |",
            "|---|---|---|---|---|---|---|---|---|",
            *second,
        ]
    for made, when in ((earlier, EARLIER), (runs, "")):
        if saved := list(_saved(made)):
            beside = f"A second run with the same teacher, beside the one with its whole logits{when}"
            lines += ["", f"{beside}: {'; '.join(saved)}."]
    lines += _same_steps(runs)
    if equal := list(_equal(runs)):
        lines += [
            "",
            "The same steps with the living teacher that sends what the store holds, and from the store. Losses of the "
            "first step come from equal weights; both then round in an order of their own. The "
            f"tolerance table allows {BOUND:g} of a chunk operator in bfloat16:",
            "",
            "| teacher's output | steps | same ids | first step's loss | store's | apart | at most, of all steps | |",
            "|---|---|---|---|---|---|---|---|",
            *equal,
        ]
    if made := result.get("producer"):
        lines += ["", *_producer(made)]
    if builds := result["builds"]:
        lines += ["", *_builds(builds)]
    return "\n".join([*lines, "", *_predictions({**runs, **earlier})])


def _builds(builds: Mapping[str, Any]) -> list[str]:
    """Return the table of stores' sizes and of how long they took to build."""
    return [
        "| store of | documents | tokens | bytes a token | start to end, s | µs a token | tokens a second | "
        "median step's |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {CONTENTS[content]} | {build['records']} | {build['tokens']:,} | {build['bytes_per_token']:.0f} | "
            f"{build['seconds']:.0f} | {1e6 * build['seconds'] / build['tokens']:.0f} | "
            f"{build['write_tokens_per_second']:,.0f} | "
            f"{build['median_tokens_per_second']:,.0f} |"
            for content, build in builds.items()
        ),
    ]


def render_sizes(result: Mapping[str, Any]) -> str:
    """Return the tables of a store's sizes and rates, and of DistillKit's format.

    Args:
        result: What `benchmarks.store` wrote.
    """
    lines = [
        f"Sizes and rates of one thread each, of the output of {result['model']} ({result['vocabulary']:,} tokens), "
        f"{result['machine']['processor']}, {result['machine']['cores']} cores, load average "
        f"{result['load_average']:.1f}; every bit comes back:",
        "",
        "| output | bytes a token | not deflated | written a second | read a second |",
        "|---|---|---|---|---|",
    ]
    kits = []
    for name, form in result["forms"].items():
        output = f"{name.removeprefix('topk ')} largest" if name.startswith("topk") else CONTENTS[name]
        lines.append(
            f"| {output} | {form['bytes_per_token']:.0f} | {form['bytes_per_token_raw']:.0f} | "
            f"{form['write_tokens_per_second']:,.0f} | {form['read_tokens_per_second']:,.0f} |"
        )
        kits += [
            f"| {output} | {KIT[setting]} | {kit['bytes_per_token']:.0f} | {form['bytes_per_token']:.0f} | "
            f"{kit['mean_error']:.1e} | {kit['largest_error']:.1e} | {kit['pack_tokens_per_second']:,.0f} | "
            f"{kit['unpack_tokens_per_second']:,.0f} |"
            for setting, kit in form.get("distillkit", {}).items()
        ]
    if kits:
        lines += [
            "",
            f"The same logits in DistillKit's bit-packed format (commit {result['distillkit'][:7]}), by its own "
            "compressor in memory, with one thread. It keeps log-probabilities and ids; a position of ours also has "
            "two normalisers, the mass of the others and the text's own token. Errors are those of log-probabilities; "
            "ours are 0:",
            "",
            "| output | DistillKit's values | bytes a token | ours | mean error | largest | packed a second | "
            "unpacked |",
            "|---|---|---|---|---|---|---|---|",
            *kits,
        ]
    return "\n".join(lines)


def _quality(runs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the quality runs: held-out bits per byte after each evaluation."""
    made = [run for name, run in runs.items() if QUALITY.match(name)]
    at = sorted({row["step"] for run in made for row in run["curve"]} - {0})
    yield (
        "| loss | teacher's output | steps | loss at the end | "
        + "".join(f"after {step} | " for step in at)
        + ("above whole logits, at the last of both | student's tensors, GiB |")
    )
    yield "|---|---|---|---|" + "---|" * len(at) + "---|---|"
    for method in METHODS:
        name = f"stored-{method.replace('_', '-')}"
        whole = runs.get(f"{name}-whole")
        for size in ("whole", *SIZES):
            run = runs.get(f"{name}-{size}")
            if run is None:
                continue
            above = "" if whole is None or run is whole else f"{_bits_above(run, whole):+.4f}"
            bits = "".join(f"{_bits(run)[step]:.4f} | " if step in _bits(run) else "| " for step in at)
            output = "whole logits" if size == "whole" else f"{size} largest"
            tensors = f"{run['trainer_peak_bytes'] / GIB:.2f}" if "trainer_peak_bytes" in run else ""
            yield (f"| {TITLES[method]} | {output} | {run['steps']} | {run['loss']:.4f} | {bits}{above} | {tensors} |")


def _bits(run: Mapping[str, Any]) -> dict[int, float]:
    """Return held-out bits per byte by step."""
    return {row["step"]: row[TEST] for row in run["curve"]}


def _bits_above(run: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return how much higher a run's bits per byte are at the last evaluation that both have."""
    step = max(_bits(run).keys() & _bits(other).keys())
    return _bits(run)[step] - _bits(other)[step]


def _second(runs: Mapping[str, Any], when: str = "") -> Iterator[str]:
    titles = [("living", content, "teacher beside it") for content in LIVING]
    titles += [("again", content, "from the store") for content in STORED]
    for kind, content, title in titles:
        run = runs.get(f"stored-{kind}-{content}")
        if run is None:
            continue
        waited = f"{run['store_wait_fraction']:.2%}" if "store_wait_fraction" in run else ""
        used = f"{(run['gpu_peak_bytes'] - run['gpu_before_bytes']) / GIB:.1f}" if "gpu_peak_bytes" in run else ""
        bits = f"{_value(run, 'bits'):.4f}" if run["curve"][-1]["step"] else ""
        yield (
            f"| {CONTENTS[content]}, {title}{when} | {run['steps']} | {bits} | "
            f"{run['seconds_per_step']:.3f} | {run.get('run_seconds', '')} | {run.get('kernels_compiled', '')} | "
            f"{used} | {run['trainer_peak_bytes'] / GIB:.2f} | {waited} |"
        )


def _saved(runs: Mapping[str, Any]) -> Iterator[str]:
    """Yield how much time and memory the run from each store takes beside the living teacher's."""
    living = runs.get("stored-living-logits", {})
    for content in STORED:
        again = runs.get(f"stored-again-{content}", {})
        if not all("run_seconds" in run and run["steps"] == living["steps"] for run in (living, again)):
            continue
        shown = f"from {CONTENTS[content]} {again['run_seconds']:.0f} s instead of {living['run_seconds']:.0f}"
        if all("gpu_peak_bytes" in run for run in (living, again)):
            used = [(run["gpu_peak_bytes"] - run["gpu_before_bytes"]) / GIB for run in (again, living)]
            shown += f", {used[0]:.1f} GiB instead of {used[1]:.1f}"
        yield shown


def _same_steps(runs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a paragraph on each store's run that was ended early, beside the living teacher's over the same steps."""
    living = runs.get("stored-living-logits", {})
    for content in STORED:
        again = runs.get(f"stored-again-{content}", {})
        if not all("step_seconds" in run for run in (living, again)) or again["steps"] >= living["steps"]:
            continue
        of = slice(FIRST_STEPS, again["steps"])
        shown = [
            f"{title} {median(again[key][of]):.3f} s and {median(living[key][of]):.3f} s"
            for key, title in STEP_PARTS.items()
            if key in again and key in living
        ]
        yield ""
        yield (
            f"The run from the store of {CONTENTS[content]} was ended after {again['steps']} steps. Medians of its "
            f"steps from number {FIRST_STEPS} on, and of the same steps with the living teacher: {'; '.join(shown)}."
        )


def _equal(runs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a row for each content: the run from the store beside that with the living teacher."""
    for content in STORED:
        living, again = (runs.get(f"stored-{kind}-{content}") for kind in ("living", "again"))
        if living is None or again is None or "ids_sha256" not in again or again["steps"] != living["steps"]:
            continue
        apart = [abs(stored / given - 1) for stored, given in zip(again["losses"], living["losses"], strict=True)]
        same = "yes" if again["ids_sha256"] == living["ids_sha256"] else "**no**"
        yield (
            f"| {CONTENTS[content]} | {again['steps']} | {same} | {living['losses'][0]:.5f} | "
            f"{again['losses'][0]:.5f} | {apart[0]:.1e} | {max(apart):.1e} | "
            f"{'within' if max(apart) <= BOUND else 'first step within' if apart[0] <= BOUND else '**not within**'} |"
        )


def _producer(made: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of what a micro-batch costs the teacher, by content."""
    forms = made["forms"]
    alone = forms["forward pass alone"]["seconds_least"]
    yield (
        f"What a content costs the teacher, without a queue and a student: a micro-batch of {made['rows']} rows of "
        f"{made['length']} tokens, median and least of its passes. The host's delays are in the medians, also in that "
        "of the forward pass alone, which came first; differences are those of the least times. `sorted` selects by "
        "`torch.topk` over whole rows:"
    )
    yield ""
    yield (
        "| content | ms, median | least | above the forward pass | tokens a second, median | memory of the pass, MiB | "
        "its slot, MiB |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, form in forms.items():
        kind, _, k = name.partition(" ")
        title = f"{k} largest" + (", sorted" if kind == "sorted" else "") if k.isdigit() else CONTENTS.get(name, name)
        least = form["seconds_least"]
        above = f"{1e3 * (least - alone):.2f}" if form is not forms["forward pass alone"] else ""
        memory = f"{form['peak_bytes'] / MIB:.0f}" if "peak_bytes" in form else ""
        slot = f"{form['slot_bytes'] / MIB:.1f}" if form["slot_bytes"] else ""
        yield (
            f"| {title} | {1e3 * form['seconds']:.2f} | {1e3 * least:.2f} | {above} | "
            f"{made['tokens'] / form['seconds']:,.0f} | {memory} | {slot} |"
        )


def _value(run: Mapping[str, Any], measure: str) -> float:
    value: float = run["curve"][-1][TEST] if measure == "bits" else run[measure]
    return value


def _predictions(runs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of what was predicted, and what came of it."""
    yield "| predicted before | range | measured | |"
    yield "|---|---|---|---|"
    for made in tomllib.loads(PREDICTIONS.read_text(encoding="utf-8"))["prediction"]:
        low, high, measure = made.get("low"), made.get("high"), made["measure"]
        wanted = f"at most {high:g}" if low is None else f"{low:g} to {high:g}"
        named = [made["run"], *(made[key] for key in ("less", "of") if key in made)]
        values = [_value(runs[name], measure) for name in named if name in runs and measure in ("bits", *runs[name])]
        if len(values) < len(named):
            yield f"| {made['says']} | {wanted} | not run | |"
            continue
        if measure == "bits" and "less" in made:
            values = [_bits_above(runs[made["run"]], runs[made["less"]]), 0.0]
        value = values[0] - values[1] if "less" in made else values[0] / values[1] if "of" in made else values[0]
        verdict = "as predicted" if holds(value, low, high) else "**not**"
        yield f"| {made['says']} | {wanted} | {value:.4f} | {verdict} |"


def written() -> str:
    """Return `docs/operations.md` as the result file asks for."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made = [(render_sizes, SIZES_RESULT), (render, RESULT)]
    tables = "\n\n".join(show(json.loads(file.read_text(encoding="utf-8"))) for show, file in made if file.exists())
    return before + BEGIN + "\n\n" + tables + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    atomic_write(PAGE, written())
