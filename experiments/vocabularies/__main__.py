"""Build the chain tables of real vocabularies in every pairing: `python -m experiments.vocabularies --out FILE`.

The tokenizers of SmolLM2 and Gemma 3 are read from `--models` (see `experiments.real`), those of mistral-common from
that package; what is not there is left out. Texts are every edition of a handbook (`--handbook`) and Python's library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

from xtoken_core.atomic import atomic_write

RESULTS = Path(__file__).with_name("results")
FOLDERS = {"SmolLM2": "smollm2-135m-instruct", "Gemma 3": "gemma3-270m"}
CARRIED = {"tekken": "tekken_240911.json", "SentencePiece": "tokenizer.model.v1"}
NAMES = ("SentencePiece", "SmolLM2", "tekken", "Gemma 3")
"""Smallest vocabulary first; the first of a pair is the student."""
EDITION_BYTES, CODE_BYTES, FILES = 6000, 60000, 12


def loader(name: str, models: Path | None) -> Callable[[], Any] | None:
    """Return a function that loads a tokenizer; None if it is not there.

    Args:
        name: Of `NAMES`.
        models: Directory of the directories in `FOLDERS`.
    """
    if name in FOLDERS:
        directory = None if models is None else models / FOLDERS[name]
        if directory is None or not (directory / "tokenizer.json").exists():
            return None
        from xtoken_services.common.tokenizers.loading import load_tokenizer

        return lambda: load_tokenizer(directory, name)
    try:
        import mistral_common
        from transformers import MistralCommonBackend
    except ImportError:
        return None
    file = Path(mistral_common.__file__).parent / "data" / CARRIED[name]
    return lambda: MistralCommonBackend(tokenizer_path=str(file))


def texts(handbook: Path | None) -> dict[str, list[str]]:
    """Return documents of two kinds: multilingual and Python.

    Args:
        handbook: Directory with one folder of HTML per edition; None: there is no multilingual text.
    """
    found = {"Python": list(_sources())}
    if handbook is not None:
        found["26 languages"] = [text for edition in sorted(handbook.iterdir()) for text in _edition(handbook, edition)]
    return found


def _edition(handbook: Path, edition: Path) -> Iterator[str]:
    """Yield one document per page; paragraphs that an edition has in English are left out."""
    from experiments.real.texts import html_paragraphs

    size = 0
    for file in sorted(edition.glob("*.html")):
        english = handbook / "en-US" / file.name
        known: set[str] = set()
        if edition.name != "en-US" and english.exists():
            known = set(html_paragraphs(english.read_text(encoding="utf-8")))
        own = [text for text in html_paragraphs(file.read_text(encoding="utf-8")) if text not in known]
        text = "\n\n".join(own).encode()[: EDITION_BYTES - size].decode("utf-8", "ignore")
        if text:
            yield text
        size += len(text.encode())
        if size >= EDITION_BYTES:
            return


def _sources() -> Iterator[str]:
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]:
        yield file.read_text(encoding="utf-8")[: CODE_BYTES // FILES]


def measure(names: tuple[str, str], models: Path | None, handbook: Path | None) -> dict[str, Any]:
    """Build the tables of a pair in this process and count the texts."""
    from experiments.vocabularies.chunks import Counts
    from xtoken_core.alignment.tables import token_table
    from xtoken_core.chain import ChainTables, build_tables
    from xtoken_core.chain.report import side_report

    loaders = [loader(name, models) for name in names]
    student, teacher = (load() for load in loaders if load is not None)
    before, cpu, began = _peak(), _cpu(), time.monotonic()
    tables = ChainTables.of(build_tables(student, teacher))
    found: dict[str, Any] = {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(_cpu() - cpu, 1),
        "peak_gib": round(_peak(), 2),
        "peak_gib_before": round(before, 2),
        "common": tables.common,
        "file_mib": round(sum(x.numel() * x.element_size() for x in tables.flat().values()) / 2**20, 1),
    }
    reports = [
        side_report(side, tables.classes, token_table(tokenizer), samples=0)
        for side, tokenizer in ((tables.student, student), (tables.teacher, teacher))
    ]
    found["vocabularies"] = [report.tokens for report in reports]
    found["without_root"] = [sum(report.without_root.values()) for report in reports]
    found["texts"] = {}
    for kind, documents in texts(handbook).items():
        counts = Counts((student, teacher), tables)
        counts.add(documents)
        found["texts"][kind] = {"bytes": sum(len(text.encode()) for text in documents), **counts.summary()}
    return found


def _peak() -> float:
    """Return the most memory that this process had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _cpu() -> float:
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in usage)


def environment() -> dict[str, Any]:
    """Return versions and hardware."""
    import tokenizers
    import transformers

    cpu = next(x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Measure every pair in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--handbook", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "vocabularies.json")
    parser.add_argument("--pair", nargs=2, choices=NAMES, help="measure this pair only and print the result")
    arguments = parser.parse_args()
    if arguments.pair:
        print(json.dumps(measure(tuple(arguments.pair), arguments.models, arguments.handbook)))
        return
    there = [name for name in NAMES if loader(name, arguments.models) is not None]
    print("left out: " + (", ".join(sorted(set(NAMES) - set(there))) or "nothing"), flush=True)
    given = [f"--{name}={value}" for name in ("models", "handbook") if (value := getattr(arguments, name))]
    pairs: dict[str, Any] = {}
    for names in combinations(there, 2):
        command = [sys.executable, "-m", "experiments.vocabularies", *given, "--pair", *names]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        pairs[" / ".join(names)] = found = json.loads(done.stdout.splitlines()[-1])
        print(*names, {key: value for key, value in found.items() if key != "texts"}, flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(arguments.out, json.dumps({"environment": environment(), "pairs": pairs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
