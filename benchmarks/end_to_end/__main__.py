"""A whole run at real model sizes, beside the plain serial loop: `python -m benchmarks.end_to_end` (`make bench-e2e`).

Random weights of Llama-3.2-1B's and Qwen3-4B's shapes, real vocabularies, 4 documents of 2,048 tokens a step. Every
variant runs in processes of its own, one after the other, the plain loop first and last; ratios are of one call.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end.mps import mps_daemon
from benchmarks.end_to_end.variants import LOSSES, VARIANTS, Variant, run_spec

if TYPE_CHECKING:
    from benchmarks.end_to_end.assets import Assets

ROOT = Path(__file__).parents[2]
PUBLIC_STEPS = {"steps": 5, "warmup": 1}
"""TRL's loss takes seconds for what the others do in milliseconds."""


def main() -> int:
    """Measure what is asked for, write JSON after every variant."""
    arguments = _arguments()
    if arguments.serial:
        print(json.dumps(_serial(arguments)))
        return 0
    from benchmarks.end_to_end.assets import VOCABULARIES, make_assets

    assets = make_assets(
        arguments.work,
        small=arguments.small,
        documents=arguments.samples * (arguments.steps + arguments.warmup),
        characters=6 * arguments.context,
    )
    report: dict[str, Any] = {
        "settings": _plain(arguments),
        "machine": _machine(),
        "vocabularies": VOCABULARIES,
        "serial": {},
        "variants": {},
    }
    if arguments.go_on and arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        report |= {name: before[name] for name in ("serial", "variants")}
    for name in arguments.variants:
        variant = VARIANTS[name]
        loop = variant.loss + (" checkpointed" if variant.checkpointing else "")
        began = time.monotonic()
        if loop not in report["serial"] and not arguments.no_serial:
            report["serial"][loop] = _serial_process(arguments, variant)
            _say(f"serial loop, {loop}", report["serial"][loop], began)
            _write(report, arguments.out)
        public = f"{variant.loss} public"
        if arguments.public_loss and variant.loss == "gold" and public not in report["serial"]:
            began = time.monotonic()
            report["serial"][public] = _serial_process(arguments, variant, public=True)
            _say("serial loop, TRL's GOLD", report["serial"][public], began)
            _write(report, arguments.out)
        began = time.monotonic()
        found = _measure(variant, name, assets, arguments)
        _compare(found, report["serial"].get(loop, {}), report["variants"].get(variant.beside, {}))
        if public in report["serial"] and "failed" not in found:
            found["times_public"] = found["tokens_per_second"] / report["serial"][public]["tokens_per_second"]
        report["variants"][name] = {**asdict(variant), "serial": loop, **found}
        _say(name, found, began)
        _write(report, arguments.out)
    return 0


def _write(report: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _measure(variant: Variant, name: str, assets: Assets, arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.end_to_end.pipeline import pipeline

    try:
        with mps_daemon() if variant.mps else nullcontext({}) as env:
            return pipeline(
                assets,
                run_spec(variant, arguments),
                directory=arguments.work / name,
                warmup=arguments.warmup,
                timeout_s=arguments.timeout,
                env=env,
            )
    except RuntimeError as error:
        return {"failed": str(error)}


def _compare(found: dict[str, Any], serial: dict[str, Any], other: dict[str, Any]) -> None:
    """Beside the plain loop and another variant of the same call: rates as ratios, losses as differences by step."""
    if "failed" in found:
        return
    if serial:
        found["times_serial"] = found["tokens_per_second"] / serial["tokens_per_second"]
    if "losses" in other:
        found["times_beside"] = found["tokens_per_second"] / other["tokens_per_second"]
        differences = [abs(a - b) for a, b in zip(found["losses"], other["losses"], strict=True)]
        found["loss_difference"] = {
            "first": differences[0],
            "mean": statistics.fmean(differences),
            "largest": max(differences),
        }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"), help="models, text and runs")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "end_to_end.json")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["p_kl_wide", "p_kl_hidden", "gold_wide"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="thin models: to try the harness on a CPU")
    parser.add_argument("--no-serial", action="store_true", help="leave the plain loop out")
    parser.add_argument("--public-loss", action="store_true", help="beside gold, a serial loop with TRL's loss too")
    parser.add_argument("--public", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--go-on", action="store_true", help="add to what the output file holds of the same call")
    parser.add_argument("--also", default="", help="what else the machine does meanwhile, for the page")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one variant")
    parser.add_argument("--serial", choices=LOSSES, help=argparse.SUPPRESS)
    return parser.parse_args()


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

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in ("serial", "public", "out", "work")
    }


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
