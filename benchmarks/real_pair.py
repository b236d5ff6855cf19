"""Whole runs of two real models on one GPU and on two: `python -m benchmarks.real_pair --student DIR --teacher DIR`.

`--texts` holds what `texts` and `controls` of `experiments.real` write: `handbook-en` for runs on text, `problems-en`
for runs on completions. Runs go one after another. Every call adds its rows to the result file, and a rate is compared
with that of one GPU in the same call.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.end_to_end.pipeline import run_command, step_rows, tail
from benchmarks.harness import command_line, machine, write_result

WARM_UP = 6
"""Steps that no rate counts."""
ONE, COMPLETIONS = "one", "completions"
"""The runs on one GPU that others are compared with."""
VARIANTS: dict[str, dict[str, Any]] = {
    ONE: {},
    "two_ranks": {"workers": {"ranks": 2}},
    "two_ranks_fsdp": {"workers": {"ranks": 2}, "train": {"parallel": "fsdp"}},
    "two_groups": {"workers": {"nodes": 2}},
    "teacher_apart": {"teacher": {"gpu": 1}},
    "divided": {"teacher": {"gpus": 2}},
    "one_fp8": {"teacher": {"quantized": "fp8"}},
    "divided_fp8": {"teacher": {"gpus": 2, "quantized": "fp8"}},
    COMPLETIONS: {"rollout": {"max_new_tokens": 96}},
    "completions_apart": {"rollout": {"max_new_tokens": 96}},
}
ON_ONE = (ONE, "one_fp8", COMPLETIONS)
TITLES = {
    "two_ranks": "two ranks", "two_ranks_fsdp": "two ranks, FSDP2", "two_groups": "two node groups",
    "teacher_apart": "the teacher on the second", "divided": "the teacher divided", "one_fp8": "fp8, one GPU",
    "divided_fp8": "the teacher divided, fp8", "completions_apart": "completions generated on the second",
}  # fmt: skip


def main() -> int:
    """Run the chosen variants; the file is written after each."""
    parser = command_line(__doc__, "real_pair")
    for name in ("student", "teacher", "texts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--samples", type=int, default=64, help="of a step")
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--part-seconds", type=float, default=240.0, help="each run is ended after so long")
    parser.add_argument("--work", type=Path, default=Path("/tmp/xtoken-real-pair"))
    options = parser.parse_args()
    found = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {"calls": []}
    call: dict[str, Any] = {**machine(), "steps": options.steps, "samples": options.samples, "rows": {}}
    call |= {"student": options.student.name, "teacher": options.teacher.name}
    for name in options.variants:
        try:
            call["rows"][name] = measured(options, name)
        except RuntimeError as error:  # the others are measured all the same
            call["rows"][name] = {"error": str(error)[-2000:]}
        print(f"{name}: {json.dumps(call['rows'][name])}", flush=True)
        write_result(options.out, {"calls": [*found["calls"], call]})
    return 0


def run_file(options: Any, name: str, output: Path) -> dict[str, Any]:
    """Return a variant's run.

    Args:
        options: As `main` reads them.
        name: The variant.
        output: Directory of the run.
    """
    prompts = "rollout" in VARIANTS[name]
    text = options.texts.absolute() / ("problems-en" if prompts else "handbook-en")
    usual = {"context_length": options.context, "dtype": "bfloat16" if options.device == "cuda" else "float32"}
    document: dict[str, Any] = {
        "output": str(output),
        "student": {"model": str(options.student.absolute()), **usual},
        "teacher": {"model": str(options.teacher.absolute()), "content": "hidden", **usual},
        "data": {"path": f"{text}.train.jsonl", "epochs": 100},
        "eval": {"path": f"{text}.validation.jsonl", "every": options.steps},
        "loss": {"mode": "chain"},
        "train": {
            "samples_per_step": options.samples, "max_steps": options.steps, "micro_batch_tokens": 16384,
            "learning_rate": 2e-4, "warmup_steps": 4, "checkpoint_every": 1000,
        },
        "workers": {"device": options.device},
    }  # fmt: skip
    for table, changes in VARIANTS[name].items():
        document[table] = document.get(table, {}) | changes
    return document | ({"queue": {"block_size": options.samples}} if prompts else {})


def measured(options: Any, name: str) -> dict[str, Any]:
    """Make a variant's run and return its figures.

    Args:
        options: As `main` reads them.
        name: The variant.

    Raises:
        RuntimeError: It did not complete; the last lines of its logs are in the text.
    """
    directory = options.work / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "run.toml").write_text(tomli_w.dumps(run_file(options, name, directory / "out")), encoding="utf-8")
    code = run_command(directory, options.part_seconds, {"CUDA_VISIBLE_DEVICES": "0"} if name in ON_ONE else {})
    rows = step_rows(directory / "out")
    if code or len(rows) < options.steps:
        raise RuntimeError(f"xtoken run ended with {code} after {len(rows)} steps:\n{tail(directory)}")
    last = (directory / "out" / "eval.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return figures(rows, json.loads(last))


def figures(rows: list[dict[str, Any]], held_out: dict[str, Any]) -> dict[str, Any]:
    """Return a run's figures.

    Args:
        rows: Lines of `steps.jsonl`.
        held_out: The last line of `eval.jsonl`.
    """
    kept, trained = rows[WARM_UP:], [number for row in rows for number in row["ids"]]
    seconds = kept[-1]["time"] - rows[WARM_UP - 1]["time"]
    return {
        "tokens_per_second": sum(row["tokens"] for row in kept) / seconds,
        "bits_per_byte": held_out["bits_per_byte"],
        "ids_exact": sorted(trained) == list(range(len(trained))),
    }


if __name__ == "__main__":
    raise SystemExit(main())
