"""What runs read, made before any of them: models, text, projection and chain tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.end_to_end.assets import PAIRS, Assets, make_assets, make_tokenizers
from benchmarks.end_to_end.pipeline import complete
from benchmarks.end_to_end.variants import LOSSES, Variant, run_spec
from xtoken_core.config.loss import PROJECTING_MODES, kind_of
from xtoken_core.config.spec import RunSpec
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_services.common.tables.pair_files import cache_of, pair_file


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
        chain = next((variant for variant in variants if kind_of(LOSSES[variant.loss].mode) == "chain"), None)
        tables = beside.submit(chain_tables, place, run_spec(chain, arguments)) if chain else None
        assets = make_assets(
            arguments.work,
            small=arguments.small,
            documents=documents,
            characters=6 * arguments.context,
            pair=pair,
            projected=not arguments.no_serial or any(LOSSES[v.loss].mode in PROJECTING_MODES for v in variants),
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
    sides = place / "student", place / "teacher"
    assets = Assets(*sides, place / "projection.safetensors", place / "text.jsonl")
    spec = RunSpec.model_validate({**complete(plain, assets, place / "out"), "eval": None})
    prints = tokenizer_fingerprint(sides[0]), tokenizer_fingerprint(sides[1])
    pairs = spec.teacher[0].special_tokens
    return pair_file(cache_of(spec), "chain", *sides, prints, spec.teacher_name(0), special_tokens=pairs)
