"""Time from `xtoken run` to its first step with pretrained models on a GPU, with a line of time for every process.

    python -m benchmarks.startup_gpu STUDENT TEACHER TEXT --other TREE

The run file has student, teacher and text, everything else is left to its defaults: chain, eager models, and held-out
text that is evaluated before the first step. The first round fills the caches (page cache, chain tables, compiled
kernels) and is reported beside the following ones, of which the smallest counts. `--other` is the tree of another
commit; both are then compared by P-KL with a projection file, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.startup import ROOT, command, until_first_step
from xtoken_core.atomic import atomic_write

OUT = Path(__file__).parent / "results" / "startup_gpu.json"
MUST_S = 25.0
"""Longest time to the first step with eager models and warm caches."""
CONTEXT = 1024
SHORT = """output = "{output}"
student = "{student}"
teacher = "{teacher}"
data = "{text}"
"""
COMPARED = """output = "{output}"
[student]
model = "{student}"
context_length = {context}
dtype = "bfloat16"
[teacher]
model = "{teacher}"
context_length = {context}
dtype = "bfloat16"
projection = "{projection}"
[data]
path = "{text}"
[eval]
path = "{held_out}"
max_bytes = 100000
[train]
samples_per_step = 32
micro_batch_tokens = 8192
max_steps = 1000
[loss]
vocab_topk = 8192
[workers]
collators = 2
"""
"""A run file that both trees read; `vocab_topk` means P-KL to older commits as well."""


class Timeline:
    """The time at which each process began its log, and at which each file of the run appeared."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.seconds: dict[str, float] = {}

    def look(self, seconds: float) -> None:
        """Note the files that are new."""
        for path in (*self._output.glob("logs/*.log"), *self._output.glob("*.json*")):
            name = path.name.removesuffix(".log")
            if not name.startswith(".") and name not in self.seconds and path.stat().st_size:
                self.seconds[name] = round(seconds, 2)


def measure(tree: Path, text: str, scratch: Path, label: str, keep: Path | None, limit_s: float) -> dict[str, Any]:
    """Return the times of one start.

    Args:
        tree: The tree whose command runs.
        text: The run file, with `{output}` left open.
        scratch: Directory of the run file and the output.
        label: Name of both.
        keep: Where the logs are copied to; None: they are not.
        limit_s: Seconds after which the step is no longer waited for.
    """
    output, file = scratch / label, scratch / f"{label}.toml"
    file.write_text(text.replace("{output}", str(output)), encoding="utf-8")
    timeline = Timeline(output)
    try:
        times: dict[str, Any] = until_first_step(tree, file, output, limit_s=limit_s, look=timeline.look)
    except RuntimeError as error:
        times = {"failed": str(error)}
    if keep is not None:
        shutil.copytree(output / "logs", keep / label, dirs_exist_ok=True)
    shutil.rmtree(output, ignore_errors=True)
    return {**times, "files": timeline.seconds}


def on_gpu(document: dict[str, Any]) -> dict[str, Any]:
    """Return the result as its page shows it: the first start of each run file, and the smallest of the others."""
    known = {"chain": "student, teacher and text alone: chain", "p_kl": "P-KL with a projection file"}
    starts: dict[str, list[dict[str, Any]]] = document["starts"]

    def shown(times: list[dict[str, Any]], metric: str = "seconds") -> str:
        finished = [each for each in times if "seconds" in each]
        if not finished:
            return next((each["failed"] for each in times), "not measured")
        best = min(finished, key=lambda each: float(each["seconds"]))
        if metric not in best:
            return "–"
        return f"{'at most ' if best.get('at_most') else ''}{best[metric]:.1f} s"

    return {
        **document,
        "note": document.get("note", ""),
        "rows": [(name, known.get(name, f"the same at `{name}`")) for name in starts],
        "first": {name: shown(times[:1]) for name, times in starts.items()},
        "best": {name: shown(times[1:]) for name, times in starts.items()},
        "evaluated": {name: shown(times[1:], "evaluated_seconds") for name, times in starts.items()},
    }


def main() -> int:
    """Measure each kind of start in turn, and write the table as JSON after every start."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("student", "teacher", "text"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--held-out", type=Path, help="the text that is evaluated when two trees are compared")
    parser.add_argument("--other", type=Path, help="the tree of another commit, its name the commit's")
    parser.add_argument(
        "--only-compared", action="store_true", help="leave out the short run file, and add to the result"
    )
    parser.add_argument("--projection", type=Path, help="a projection of the two; by default it is built")
    parser.add_argument("--rounds", type=int, default=3, help="with the first, which fills the caches")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a start is given up")
    parser.add_argument("--logs", type=Path, help="where the logs of each start are copied to")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    values = {name: getattr(arguments, name).resolve() for name in ("student", "teacher", "text")}
    values |= {"context": CONTEXT, "output": "{output}"}
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": len(os.sched_getaffinity(0)), "load": [round(load, 2) for load in os.getloadavg()],
        "torch": torch.__version__, "student": values["student"].name, "teacher": values["teacher"].name,
        "must_s": MUST_S, "rounds": arguments.rounds, "starts": {},
    }  # fmt: skip
    if arguments.only_compared and arguments.out.exists():
        document["starts"] = json.loads(arguments.out.read_text(encoding="utf-8"))["starts"]
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        starts = [] if arguments.only_compared else [("chain", ROOT, SHORT.format(**values))]
        if arguments.other is not None:
            projection = scratch / "projection.safetensors"
            values |= {"projection": arguments.projection or projection, "held_out": arguments.held_out.resolve()}
            if arguments.projection is None:
                pair = ("--student", str(values["student"]), "--teacher", str(values["teacher"]))
                command(ROOT, "projection", "build", *pair, "--out", str(projection)).wait()
            text, other = COMPARED.format(**values), arguments.other.resolve()
            starts += [("p_kl", ROOT, text), (other.name, other, text)]
        for number in range(arguments.rounds):
            for name, tree, text in starts:
                times = measure(tree, text, scratch, f"{name}-{number}", arguments.logs, arguments.limit)
                document["starts"].setdefault(name, []).append(times)
                print(number, name, json.dumps(times), flush=True)
                atomic_write(arguments.out, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
