"""A whole run at real model sizes, beside the plain serial loop: `python -m benchmarks.end_to_end` (`make bench-e2e`).

Random weights of Llama-3.2-1B's and Qwen3-4B's shapes, real vocabularies, documents of 2,048 tokens or of lengths drawn
from a distribution by `--seed`. Every variant runs in processes of its own, one after the other; the plain loop runs
once per loss, before the first variant that is compared with it. `--prepare` only makes what runs read, and needs no
GPU. A variant's figures are in the result file from its fifth step after the warm-up on. With `--go-on` several calls
make one file, which keeps the settings of each: what it has is not measured again, but for a variant that was cut
short. They may be on several machines of a kind; figures are compared only with those of the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end.mps import mps_daemon
from benchmarks.end_to_end.report import measured, opened, write
from benchmarks.end_to_end.variants import DEFAULT, LOSSES, VARIANTS, Variant, context_of, run_spec
from benchmarks.lengths import DISTRIBUTIONS
from xtoken_core.config.loss import PROJECTING_MODES

if TYPE_CHECKING:
    from benchmarks.end_to_end.assets import Assets

ROOT = Path(__file__).parents[2]
PUBLIC_STEPS = {"steps": 5, "warmup": 1}
"""TRL's loss takes seconds for what the others do in milliseconds."""
HIDDEN = ("serial", "public", "checkpointing", "out", "work", "prepare")
"""Arguments that are no settings of a call."""


def main() -> int:
    """Measure the chosen variants, write JSON after every part."""
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a run that is under way is ended too
    if arguments.serial:
        print(json.dumps(_serial(arguments)))
        return 0
    if arguments.public_loss and importlib.util.find_spec("trl") is None:
        raise SystemExit("--public-loss needs TRL: pip install -e '.[bench]', or leave it out")
    from benchmarks.end_to_end.assets import PAIRS
    from benchmarks.end_to_end.prepare import prepared

    pair, *others = {VARIANTS[name].pair for name in arguments.variants}
    if others:
        raise SystemExit("--variants: a result file is of one pair of models: name those of the small models alone")
    documents = _most_samples(arguments) * max(arguments.steps + arguments.warmup, sum(PUBLIC_STEPS.values()))
    chosen = [VARIANTS[name] for name in arguments.variants]
    if arguments.prepare:
        prepared(arguments, chosen, documents)
        return 0
    machine = _machine()
    call = {**_call(arguments), "digest": machine["digest"]}
    report = opened(arguments.out, call, machine, PAIRS[pair].vocabularies, go_on=arguments.go_on)
    assets = prepared(arguments, chosen, documents)
    for name in arguments.variants:
        variant = VARIANTS[name]
        for loop, public in _loops(variant, arguments):
            if report["serial"].get(loop, {}).get("digest", report["machine"].get("digest")) != call["digest"]:
                began = time.monotonic()
                found = _serial_process(arguments, variant, public=public)
                report["serial"][loop] = {**found, "digest": call["digest"]}
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
        report["variants"][name] = {**asdict(variant), "serial": variant.loop, "digest": call["digest"], **found}
        call["variants"] += [name] if name not in call["variants"] else []
    write(report, out)


def _most_samples(arguments: argparse.Namespace) -> int:
    return max(arguments.samples, *(VARIANTS[name].samples for name in arguments.variants))


def _loops(variant: Variant, arguments: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Yield the serial loops that a variant is compared with, and whether their loss is a public one."""
    if not arguments.no_serial and LOSSES[variant.loss].mode in PROJECTING_MODES:
        yield variant.loop, False
    if arguments.public_loss and variant.loss == "gold":
        yield f"{variant.loss} public", True


def _measure(
    variant: Variant, name: str, assets: Assets, arguments: argparse.Namespace, enter: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    from benchmarks.end_to_end.assets import with_lengths
    from benchmarks.end_to_end.pipeline import pipeline

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
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="thin models: to try the harness on a CPU")
    parser.add_argument("--no-serial", action="store_true", help="leave the plain loop out")
    parser.add_argument("--public-loss", action="store_true", help="beside gold, a serial loop with TRL's loss too")
    parser.add_argument("--public", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--go-on", action="store_true", help="add what the result file lacks; same GPUs, versions and settings"
    )
    parser.add_argument("--prepare", action="store_true", help="make models, text and tables, and measure nothing")
    parser.add_argument("--also", default="", help="what else the machine does meanwhile, for the page")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one variant")
    parser.add_argument("--serial", choices=LOSSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    work = arguments.work or Path("runs", "end-to-end-small" if arguments.small else "end-to-end")
    arguments.work = work.absolute()  # paths in a run file are relative to the file
    arguments.out = arguments.out or arguments.work / "end_to_end.json"
    return arguments


def _serial_process(arguments: argparse.Namespace, variant: Variant, *, public: bool = False) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--serial", variant.loss, "--work", str(arguments.work)]
    counts = PUBLIC_STEPS if public else {name: getattr(arguments, name) for name in ("steps", "warmup")}
    for name, value in {**counts, "samples": arguments.samples, "context": arguments.context}.items():
        command += [f"--{name}", str(value)]
    command += ["--public"] if public else []
    command += ["--checkpointing"] if variant.checkpointing else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _serial(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from benchmarks.end_to_end.assets import Assets
    from benchmarks.end_to_end.serial import serial_loop

    work = arguments.work
    assets = Assets(work / "student", work / "teacher", work / "projection.safetensors", work / "text.jsonl")
    return serial_loop(
        assets,
        LOSSES[arguments.serial],
        context=arguments.context,
        samples=arguments.samples,
        steps=arguments.steps,
        warmup=arguments.warmup,
        checkpointing=arguments.checkpointing,
        public=arguments.public,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    )


def _machine() -> dict[str, Any]:
    import torch
    import transformers

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    own = sorted(str(getattr(gpu, "uuid", platform.node())) for gpu in gpus) or [platform.node()]
    return {
        "gpus": [gpu.name for gpu in gpus],
        "digest": hashlib.sha256(" ".join(own).encode()).hexdigest()[:12],  # distinguishes two machines of a kind
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


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


if __name__ == "__main__":
    sys.exit(main())
