"""A whole run at real model sizes, beside the plain serial loop: `python -m benchmarks.end_to_end` (`make bench-e2e`).

Random weights of Llama-3.2-1B's and Qwen3-4B's shapes, real vocabularies, documents of 2,048 tokens or of lengths drawn
from a distribution by `--seed`. Every variant runs in processes of its own, one after the other; the plain loop runs
once per loss, before the first variant that is compared with it. A variant's figures are in the result file from its
fifth step after the warm-up on. With `--go-on` several calls make one file, which keeps the settings of each: what it
has is not measured again, but for a variant that was cut short. They may be on several machines of a kind; figures are
compared only with those of the same one.

What runs read, made before any of them: models, text, projection and chain tables.

A result file of the whole run: the calls that it was put together by, and how its figures compare.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.assets import PAIRS, Assets, assets_of, make_assets, make_tokenizers, with_lengths
from benchmarks.end_to_end.mps import mps_daemon
from benchmarks.end_to_end.pipeline import complete, pipeline
from benchmarks.end_to_end.variants import DEFAULT, LOSSES, VARIANTS, Variant, context_of, run_spec
from benchmarks.harness import in_process, machine, write_result
from benchmarks.lengths import DISTRIBUTIONS
from xtoken_core.config.loss import PAIR_KINDS
from xtoken_core.config.spec import RunSpec
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_services.common.tables.pair_files import cache_of, pair_file

PUBLIC_STEPS = {"steps": 5, "warmup": 1}
"""TRL's loss takes seconds for what the others do in milliseconds."""
HIDDEN = ("out", "work")
"""Arguments that are no settings of a call."""
SAME = ("samples", "context", "steps", "warmup", "small")
"""Settings that all calls of a file have in common."""
OWN = "digest"
"""Field of a machine that may differ between calls: it distinguishes machines of a kind."""


def main() -> int:
    """Measure the chosen variants, write JSON after every part."""
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a run that is under way is ended too
    if arguments.public_loss and importlib.util.find_spec("trl") is None:
        raise SystemExit("--public-loss needs TRL: pip install -e '.[bench]', or leave it out")
    pair, *others = {VARIANTS[name].pair for name in arguments.variants}
    if others:
        raise SystemExit("--variants: a result file is of one pair of models: name those of the small models alone")
    documents = _most_samples(arguments) * max(arguments.steps + arguments.warmup, sum(PUBLIC_STEPS.values()))
    chosen = [VARIANTS[name] for name in arguments.variants]
    here = {**machine(), OWN: _digest_of_machine()}
    call = {**_call(arguments), OWN: here[OWN]}
    report = opened(arguments.out, call, here, PAIRS[pair].vocabularies, go_on=arguments.go_on)
    assets = prepared(arguments, chosen, documents)
    for name in arguments.variants:
        variant = VARIANTS[name]
        for loop, public in _loops(variant, arguments):
            if loop not in report["serial"] or _digest(report, report["serial"][loop]) != call[OWN]:
                began = time.monotonic()
                found = _serial(arguments, variant, public=public)
                report["serial"][loop] = {**found, OWN: call[OWN]}
                write(report, arguments.out)
                _say(f"serial loop, {loop}", report["serial"][loop], began)
        earlier = report["variants"].get(name, {})
        if measured(earlier, steps=arguments.steps):
            print(f"{name}: measured before", flush=True)
            continue
        began = time.monotonic()
        print(f"{name}: {arguments.steps} steps after {arguments.warmup}", flush=True)
        enter = partial(enter_figures, report, earlier, call, arguments.out, name)
        enter(_measure(variant, name, assets, arguments, enter))
        _say(name, report["variants"][name], began)
    print(f"written: {arguments.out}", flush=True)
    return 0


def enter_figures(
    report: dict[str, Any], earlier: dict[str, Any], call: dict[str, Any], out: Path, name: str, found: dict[str, Any]
) -> None:
    """Put a variant's figures into the report and write it, unless an earlier call has figures of more steps."""
    variant = VARIANTS[name]
    if measured(earlier) and earlier.get("steps", 0) > found.get("steps", 0):
        report["variants"][name] = earlier
    else:
        report["variants"][name] = {**asdict(variant), "serial": variant.loop, OWN: call[OWN], **found}
        call["variants"] += [name] if name not in call["variants"] else []
    write(report, out)


def _most_samples(arguments: argparse.Namespace) -> int:
    return max(arguments.samples, *(VARIANTS[name].samples for name in arguments.variants))


def _loops(variant: Variant, arguments: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Yield the serial loops that a variant is compared with, and whether their loss is a public one."""
    if not arguments.no_serial and PAIR_KINDS.get(LOSSES[variant.loss].mode) == "projection":
        yield variant.loop, False
    if arguments.public_loss and variant.loss == "gold":
        yield f"{variant.loss} public", True


def _measure(
    variant: Variant, name: str, assets: Assets, arguments: argparse.Namespace, enter: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    samples, steps = variant.samples or arguments.samples, arguments.steps + arguments.warmup
    if variant.lengths:
        lengths = DISTRIBUTIONS[variant.lengths]
        lengths = replace(lengths, context=min(lengths.context, context_of(variant, arguments)))
        assets = with_lengths(assets, lengths, documents=samples * steps, seed=arguments.seed)
    try:
        with mps_daemon() if variant.mps else nullcontext({}) as env:
            return pipeline(
                assets,
                run_spec(variant, arguments),
                directory=arguments.work / name,
                warmup=arguments.warmup,
                timeout_s=arguments.timeout,
                env=env,
                partial=enter,
            )
    except RuntimeError as error:
        print(error, flush=True)
        return {"failed": str(error).partition("\n")[0].rstrip(":")}


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or the given words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="models, text and runs (runs/end-to-end, small ones beside it)")
    parser.add_argument("--out", type=Path, help="the result file (end_to_end.json among them)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(DEFAULT))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0, help="of the documents' lengths, where they are drawn")
    parser.add_argument("--small", action="store_true", help="thin models: to try the harness on a CPU")
    parser.add_argument("--no-serial", action="store_true", help="leave the plain loop out")
    parser.add_argument("--public-loss", action="store_true", help="beside gold, a serial loop with TRL's loss too")
    parser.add_argument(
        "--go-on", action="store_true", help="add what the result file lacks; same GPUs, versions and settings"
    )
    parser.add_argument("--also", default="", help="what else the machine does meanwhile, for the page")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one variant")
    arguments = parser.parse_args(words)
    work = arguments.work or Path("runs", "end-to-end-small" if arguments.small else "end-to-end")
    arguments.work = work.absolute()  # paths in a run file are relative to the file
    arguments.out = arguments.out or arguments.work / "end_to_end.json"
    return arguments


def _serial(arguments: argparse.Namespace, variant: Variant, *, public: bool) -> dict[str, Any]:
    """Return the figures of the serial loop that a variant is compared with, from a process of its own."""
    import torch

    from benchmarks.end_to_end.serial import serial_loop

    counts = PUBLIC_STEPS if public else {name: getattr(arguments, name) for name in ("steps", "warmup")}
    settings = {name: getattr(arguments, name) for name in ("context", "samples")} | counts
    settings |= {"checkpointing": variant.checkpointing, "public": public}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loop = partial(serial_loop, assets_of(arguments.work), LOSSES[variant.loss], **settings, device=device)
    return dict(in_process(loop))


def _digest_of_machine() -> str:
    """Return a text that distinguishes two machines of a kind."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    own = sorted(str(getattr(gpu, "uuid", platform.node())) for gpu in gpus) or [platform.node()]
    return hashlib.sha256(" ".join(own).encode()).hexdigest()[:12]


def _call(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return this call's settings; its variants are entered as they are measured."""
    settings = {name: value for name, value in vars(arguments).items() if name not in HIDDEN}
    trl = {"trl": importlib.metadata.version("trl")} if arguments.public_loss else {}
    return {**settings, **trl, "variants": []}


def _say(name: str, found: dict[str, Any], began: float) -> None:
    if "failed" in found:
        text = "failed: " + found["failed"]
    else:
        ratio = f", {found['times_serial']:.2f} times the serial loop" if "times_serial" in found else ""
        beside = f", {found['times_beside']:.2f} times the one beside it" if "times_beside" in found else ""
        text = f"{found['tokens_per_second']:,.0f} tokens/s{ratio}{beside}"
    print(f"{name}: {text} ({time.monotonic() - began:.0f} s)", flush=True)


def prepared(arguments: argparse.Namespace, variants: Sequence[Variant], documents: int) -> Assets:
    """Make what is missing, the chain tables beside the models, and print how long each part took.

    Args:
        arguments: The command line.
        variants: Runs that it is for, of one pair of models.
        documents: Records of text.
    """
    began, (pair,) = time.monotonic(), {variant.pair for variant in variants}
    place = arguments.work / pair
    if not (place / "student" / "tokenizer.json").exists():
        make_tokenizers(place, PAIRS[pair])
        print(f"tokenizers made ({time.monotonic() - began:.1f} s)", flush=True)
    with ThreadPoolExecutor(1) as beside:
        chain = next((variant for variant in variants if PAIR_KINDS.get(LOSSES[variant.loss].mode) == "chain"), None)
        tables = beside.submit(chain_tables, place, run_spec(chain, arguments)) if chain else None
        assets = make_assets(
            arguments.work,
            small=arguments.small,
            documents=documents,
            characters=6 * arguments.context,
            pair=pair,
            projected=not arguments.no_serial
            or "projection" in (PAIR_KINDS.get(LOSSES[v.loss].mode) for v in variants),
        )
        print(f"models and text made ({time.monotonic() - began:.1f} s)", flush=True)
        if tables is not None:
            print(f"chain tables: {tables.result()} ({time.monotonic() - began:.1f} s)", flush=True)
    return assets


def chain_tables(place: Path, plain: dict[str, object]) -> Path:
    """Return the chain tables of both tokenizers where a run looks for them, built first if there are none.

    Args:
        place: Directory of student and teacher.
        plain: The run as plain values.
    """
    assets = assets_of(place)
    sides = assets.student, assets.teacher
    spec = RunSpec.model_validate({**complete(plain, assets, place / "out"), "eval": None})
    prints = tokenizer_fingerprint(sides[0]), tokenizer_fingerprint(sides[1])
    pairs = spec.teacher[0].special_tokens
    return pair_file(cache_of(spec), "chain", *sides, prints, spec.teacher_name(0), special_tokens=pairs)


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
    write_result(out, report)


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


if __name__ == "__main__":
    sys.exit(main())
