"""Two collator processes beside one: `python -m benchmarks.collate_workers`; about two minutes on two free cores.

A real queue, two real collators, no trainer: rows are discarded between turns. Both collators live through the
whole benchmark; in every other turn one of them is paused by SIGSTOP, so that nothing but their number changes. The
vocabularies are tekken's (130,000 tokens) and its first 32,000 merges; documents fill the contexts.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from transformers import AutoTokenizer

from benchmarks.collate import corpora
from benchmarks.harness import command_line, host, write_result
from tests.support import vocabularies
from tests.support.collators import CollatorCrew
from tests.support.tiny_run import make_model, write_jsonl
from xtoken_core.config.spec import RunSpec
from xtoken_core.projection import build_projection, write_projection

NAMES = ("collator-0", "collator-1")
CONTEXT = 2048
DOCUMENTS = 600


def run_spec(directory: Path) -> RunSpec:
    """Write tokenizers, thin models and text to a directory; return a run on a source that a turn cannot exhaust."""
    places = directory / "student", directory / "teacher"
    for seed, (place, tokenizer) in enumerate(
        zip(places, (vocabularies.tekken(), vocabularies.tekken(32000)), strict=True)
    ):
        tokenizer.save_pretrained(place)
        make_model(place, seed=seed, extra_rows=0)
    projection = directory / "projection.safetensors"
    write_projection(build_projection(*(AutoTokenizer.from_pretrained(place) for place in places)), projection)
    text, size = "".join(corpora().values()), CONTEXT * 5
    texts = [text[at : at + size] for at in range(0, len(text) - size, size)][:DOCUMENTS]
    return RunSpec.model_validate(
        {
            "output": directory / "out",
            "student": {"model": places[0], "context_length": CONTEXT},
            "teacher": [{"model": places[1], "context_length": CONTEXT, "projection": projection}],
            "data": {"path": write_jsonl(directory / "text.jsonl", texts), "epochs": 1000},
            "loss": {"mode": "p_kl"},
            "train": {"samples_per_step": 64, "micro_batch_tokens": CONTEXT},
            "queue": {"block_size": 4, "span_steps": 64, "memory_limit": 1 << 32},
            "workers": {"device": "cpu"},
        }
    )


def rate(crew: CollatorCrew, seconds: float) -> dict[str, float]:
    """Return the rates of the collators while they run on.

    Returns:
        `rows_per_s`: rows a second by the clock; `rows_per_cpu_s`: by the CPU time of the collators, which shows what
        the two take from each other from what other processes take from both; `queue_cores`: cores that the queue took.
    """
    crew.discard()
    time.sleep(0.5)
    begun, rows, spent, queue = time.perf_counter(), crew.rows_put(), _collators_cpu_s(crew), crew.cpu_s()
    time.sleep(seconds)
    took, rows = time.perf_counter() - begun, crew.rows_put() - rows
    return {
        "rows_per_s": rows / took,
        "rows_per_cpu_s": rows / (_collators_cpu_s(crew) - spent),
        "queue_cores": (crew.cpu_s() - queue) / took,
    }


def _collators_cpu_s(crew: CollatorCrew) -> float:
    return sum(crew.cpu_s(name) for name in NAMES)


def turns(crew: CollatorCrew, count: int, seconds: float) -> list[dict[str, dict[str, float]]]:
    """Measure rates of one collator and of two, in turn; each of the two is paused as often as the other."""
    found = []
    for turn in range(count):
        paused = NAMES[turn % 2]
        crew.signal(paused, signal.SIGSTOP)
        one = rate(crew, seconds)
        crew.signal(paused, signal.SIGCONT)
        found.append({"one": one, "two": rate(crew, seconds)})
    return found


def main() -> None:
    """Run, print and keep the figures."""
    parser = command_line(__doc__, "collate_workers")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        crew = CollatorCrew(run_spec(Path(directory)))
        try:
            for name in NAMES:
                crew.start(name)
            crew.wait(lambda: set(NAMES) <= crew.running() and crew.rows_put() > 0)
            found = turns(crew, options.turns, options.seconds)
        finally:
            crew.close()
    result: dict[str, Any] = {
        "machine": host(),
        "settings": {"context": CONTEXT, "block": 4, "turns": options.turns, "seconds": options.seconds},
        **{
            figure: {name: statistics.median(turn[name][figure] for turn in found) for name in ("one", "two")}
            for figure in ("rows_per_s", "rows_per_cpu_s", "queue_cores")
        },
        "two_of_one": statistics.median(turn["two"]["rows_per_s"] / turn["one"]["rows_per_s"] for turn in found),
        "turns": found,
    }
    print(f"{result['rows_per_s']} rows/s of {CONTEXT} tokens, two are {result['two_of_one']:.2f} times one")
    write_result(options.out, result)


if __name__ == "__main__":
    main()
