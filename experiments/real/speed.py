"""Measure a student's training step by loss, each alone on its GPU: `python -m experiments.real.speed`.

For every method with its first weights, on the same German documents and with the same models as its runs: time of the
student's forward pass, of the loss and of the backward pass, and the memory that they take above the weights and the
teacher's logits. The teacher's logits are computed before; its own time is measured apart. Nothing is trained.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tomllib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import tomli_w
import torch

from experiments.real.machines import machine
from experiments.real.methods import CONDITIONS, DROPPED, METHODS, SEEDS, Cell
from experiments.real.models import MissingSourceError
from experiments.real.run_files import job
from experiments.real.stages import prepare, write_sample
from xtoken_core.atomic import atomic_write
from xtoken_core.errors import XtokenError

RESULT = Path(__file__).parent / "results" / "speed.json"
CONDITION, RATE = "de-500k", 2e-4
DOCUMENTS, REPEATS, WARM_UP = 24, 7, 3
PARTS = ("forward", "loss", "backward")


def main() -> int:
    """Measure, and write the result file after every method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, default=Path("runs/real"), help="models and texts")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[])
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="documents of a step")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    names = arguments.methods or [name for name in METHODS if name not in DROPPED]
    rows: list[dict[str, Any]] = []
    failed = False
    for name in names:
        try:
            row = measure(
                arguments.state.absolute(),
                name,
                device=arguments.device,
                documents=arguments.documents,
                repeats=arguments.repeats,
            )
        except (MissingSourceError, XtokenError, torch.cuda.OutOfMemoryError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        rows.append(row)
        print(json.dumps(row), flush=True)
        result = {"machine": machine(), "condition": CONDITION, "repeats": arguments.repeats, "rows": rows}
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


def measure(state: Path, name: str, *, device: str, documents: int, repeats: int) -> dict[str, Any]:
    """Return the medians of a method's step over several repetitions.

    Args:
        state: Directory of models and texts.
        name: The method.
        device: As `workers.device` of a run file.
        documents: Number of documents of the step.
        repeats: Number of repetitions that are timed.

    Returns:
        `tokens` of the student and its `micro_batches`; milliseconds of a step's `forward_ms`, `loss_ms`,
        `backward_ms`, and `teacher_ms` for the teacher's forward pass; `tokens_per_second` of the three without the
        teacher; `peak_bytes` above weights and teacher's logits, None without a GPU.

    Raises:
        MissingSourceError: A model or text has not been made.
    """
    step = _Step(state, name, device, documents)
    for _ in range(WARM_UP):
        step.run()
    step.start_memory()
    times = [step.run() for _ in range(repeats)]
    median = {part: statistics.median(each[part] for each in times) for part in PARTS}
    row = {
        "method": name,
        "weight": METHODS[name].first_weight,
        "tokens": step.tokens,
        "micro_batches": len(step.batches),
        **{f"{part}_ms": 1e3 * seconds for part, seconds in median.items()},
        "teacher_ms": 1e3 * step.teacher_seconds,
        "tokens_per_second": step.tokens / sum(median.values()),
        "peak_bytes": step.peak_memory(),
    }
    del step
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


class _Step:
    """One step of a method: student, loss, batches on the device, and the teacher's logits of each.

    Attributes:
        batches: The micro-batches with their layouts.
        tokens: Tokens of the student in all of them, of which `valid` are learnt.
        chunks: Valid chunks of each teacher.
        teacher_seconds: Time of the teacher's forward passes.
    """

    def __init__(self, state: Path, name: str, device: str, documents: int) -> None:
        from xtoken_core import schema
        from xtoken_services.common.batches.packed_batch import packed_batch
        from xtoken_services.common.models.loading import load_model, pick_device
        from xtoken_services.common.models.packed_attention import packed_inputs
        from xtoken_services.common.run.defaults import load_run
        from xtoken_services.common.run.resolve import resolve_run
        from xtoken_services.common.text.collation import make_collator, row_counts
        from xtoken_services.common.text.training_text import open_held_out
        from xtoken_services.common.tokenizers.loading import tokenizer_of
        from xtoken_services.trainer.main import make_loss
        from xtoken_services.trainer.student import load_student
        from xtoken_services.trainer.timing import DeviceTimer

        file = _run_file(state, name, device)
        spec, _ = load_run(file)
        run, where = resolve_run(spec), pick_device(spec.workers.device, 0)
        assert run.packed, "the experiment's models can be packed"
        tokenizer = tokenizer_of(spec.student, "student")
        self.student = load_student(spec, where, ranks=1, packed=True)
        self.loss = make_loss(run, where, METHODS[name].custom or None, tokenizer)
        self.weight, self.timer = spec.loss.kl_weight_at(0, run.steps), DeviceTimer(where)
        texts = [{"text": text} for text in islice(filter(str.strip, open_held_out(spec).documents()), documents)]
        collator, count, sides = make_collator(run), row_counts(run), range(len(spec.teacher))
        rows = max(1, spec.train.micro_batch_tokens // max(m.context_length for m in (spec.student, *spec.teacher)))
        own, others = schema.INPUT_LENGTHS.name, [schema.field_name(schema.TEACHER_INPUT_LENGTHS, n) for n in sides]
        self.batches = []
        for columns in (collator.rows(texts[at : at + rows], count).columns for at in range(0, len(texts), rows)):
            widths = [sum(columns.get(name, columns[own]).values.cast("q")) for name in (own, *others)]
            batch = packed_batch(columns, widths=widths, pad_ids=[0] * len(widths))
            tensors = {name: value.to(where) for name, value in batch.data.items() if isinstance(value, torch.Tensor)}
            self.batches.append((tensors, batch))

        def sum_of(column: str) -> int:
            return sum(int(tensors[column].sum()) for tensors, _ in self.batches)

        self.tokens, self.valid, self._ids = sum_of(own), sum_of(schema.CE_TOKENS.name), schema.INPUT_IDS.name
        same = run.same_tokenizer
        self.chunks = [self.valid if same[n] else sum_of(schema.field_name(schema.KD_CHUNKS, n)) for n in sides]
        ids = [self._ids if same[n] else schema.field_name(schema.TEACHER_INPUT_IDS, n) for n in sides]
        teachers = [load_model(each, f"teacher {n}", where, packed=True).eval() for n, each in enumerate(spec.teacher)]

        def logits(tensors: dict[str, Any], rows: Sequence[Any], n: int) -> Any:
            layout = packed_inputs(rows[1 + n], where, longest=spec.teacher[n].context_length)
            return teachers[n](input_ids=tensors[ids[n]], use_cache=False, **layout).logits

        with torch.no_grad():
            for _ in range(2):  # the first pass warms up
                self.timer.start()
                self.signals = [[logits(tensors, batch.rows, n) for n in sides] for tensors, batch in self.batches]
                self.timer.lap("teacher")
                self.teacher_seconds = self.timer.collect()["teacher"]

    def run(self) -> dict[str, float]:
        """Run forward, loss and backward of all micro-batches; return the seconds of each part."""
        for (tensors, batch), signals in zip(self.batches, self.signals, strict=True):
            self.timer.start()
            outputs = self.student.outputs(tensors[self._ids], batch.rows[0])
            self.timer.lap("forward")
            blocks = None
            if self.student.blockwise:
                blocks = self.loss.token_blocks(batch.data, [signal.shape[1] for signal in signals])
            loss, _ = self.loss(
                tensors,
                outputs,
                signals,
                global_valid_toks=self.valid,
                global_valid_chunks=self.chunks,
                blocks=blocks,
                kl_loss_weight=self.weight,
            )
            self.timer.lap("loss")
            del outputs
            loss.backward()  # type: ignore[no-untyped-call]
            self.timer.lap("backward")
        self.student.zero_grad(set_to_none=False)
        return self.timer.collect()

    def start_memory(self) -> None:
        """Start to record the peak of the allocated memory above what is allocated now."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def peak_memory(self) -> int | None:
        """Return the peak since `start_memory`, in bytes; None without a GPU."""
        if self.student.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated() - self._before


def _run_file(state: Path, name: str, device: str) -> Path:
    """Write the run file of the measured step: that of the experiment, its layers not compiled."""
    cell = Cell(CONDITION, name, METHODS[name].first_weight, RATE, SEEDS[0])
    prepare(state, [cell])
    write_sample(state / "texts", cell)
    document = tomllib.loads(job(cell, device=device, steps=1).file)
    document["name"], document["output"] = f"speed-{name}", f"runs/speed-{name}"
    document["eval"] = {"path": f"texts/{CONDITIONS[CONDITION].source}.validation.jsonl"}
    for table in (document["student"], *document.get("teacher", ())):
        table.pop("compile", None)
        table.pop("content", None)
    file = state / f"speed-{name}.toml"
    atomic_write(file, tomli_w.dumps(document))
    return file


def shown(result: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the rows of a result file with their title and their step's time over cross-entropy's, by the loss's time.

    Args:
        result: Content of the result file.
    """
    rows = sorted(result["rows"], key=lambda row: row["loss_ms"])
    base = next((row["tokens_per_second"] for row in rows if row["method"] == "ce"), None)
    return [
        {**row, "title": METHODS[row["method"]].title, "ratio": base / row["tokens_per_second"] if base else None}
        for row in rows
    ]


def forward_spread(result: dict[str, Any]) -> tuple[int, float, float]:
    """Return how much the time of one computation varies: the forward pass of rows with equally many micro-batches.

    Args:
        result: Content of the result file.

    Returns:
        The number of micro-batches that most rows have, and their least and longest forward pass, in milliseconds.
    """
    most = statistics.mode(row["micro_batches"] for row in result["rows"])
    times = [row["forward_ms"] for row in result["rows"] if row["micro_batches"] == most]
    return most, min(times), max(times)


if __name__ == "__main__":
    sys.exit(main())
