"""The whole demo, from the text to the report."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from xtoken_core.config import load_run_spec
from xtoken_core.errors import InputError, XtokenError
from xtoken_services.common.run.verdict import difference
from xtoken_services.demo.report import Run, read_run, table, write_report

TEACHER, STUDENT = "teacher", "student"
CROSS_ENTROPY, DISTILLED = "cross-entropy", "distilled"
_NAMES = {TEACHER: "teacher", CROSS_ENTROPY: "student, cross-entropy only", DISTILLED: "student, distilled"}
UNTRAINED_TEACHER = ".untrained-teacher"
TEACHER_LAYERS, STUDENT_LAYERS = 4, 2


@dataclass(frozen=True)
class Training:
    """Training of the teacher, or of both students.

    Attributes:
        steps: Optimiser steps.
        samples_per_step: Documents of a step.
        context_length: Tokens of a document at most, for student and teacher.
        learning_rate: At its highest.
        eval_every: Steps between two evaluations.
        seed: Of the order of documents.
    """

    steps: int = 96
    samples_per_step: int = 4
    context_length: int = 256
    learning_rate: float = 3e-3
    eval_every: int = 32
    seed: int = 0


TEACHER_TRAINING, STUDENT_TRAINING = Training(steps=216, eval_every=72), Training()


def run_demo(
    out: Path,
    *,
    console: Console | None = None,
    teacher: Training = TEACHER_TRAINING,
    student: Training = STUDENT_TRAINING,
) -> None:
    """Create text, tokenizers and models, train the teacher, then the student twice, compare, and write a report.

    Leaves in `out`: `report.html`, `table.txt`, the `teacher`, the untrained `student`, all runs' files and
    directories, and with them the distilled student in `runs/distilled/model`. An earlier demo's files are replaced.

    Args:
        out: A directory that is missing, empty, or was created by the demo.
        console: Console for progress and table; standard output if left out.
        teacher: Training of the teacher; by default about two minutes on two cores.
        student: Training of both students; by default about a minute each.

    Raises:
        InputError: `out` has other files.
        XtokenError: A run failed or was stopped.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin would take the cores from other processes
    console = console or Console()
    began = time.monotonic()
    prepare_directory(out)
    with _stage(console, "Text: the standard library's sources"):
        corpus = write_corpus(out / "corpus")
    console.print(f"  {corpus.train_bytes / 1e6:.1f} MB to train on, {corpus.heldout_bytes / 1e6:.1f} MB held out")
    with _stage(console, "Tokenizers: BPE over digits for the teacher, Unigram over whole numbers for the student"):
        from xtoken_services.demo.vocabularies import train_student_tokenizer, train_teacher_tokenizer, training_texts

        texts = training_texts(corpus.train)
        train_teacher_tokenizer(texts, out / "tokenizers" / TEACHER)
        train_student_tokenizer(texts, out / "tokenizers" / STUDENT)
    with _stage(console, "Models with random weights"):
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        write_model(out / UNTRAINED_TEACHER, out / "tokenizers" / TEACHER, layers=TEACHER_LAYERS)
        write_model(out / STUDENT, out / "tokenizers" / STUDENT, layers=STUDENT_LAYERS)
    for name, file in write_run_files(out, teacher, student).items():
        with _stage(console, f"Run: {_NAMES[name]}"):
            _train(file)
            if name == TEACHER:
                shutil.copytree(out / "runs" / TEACHER / "model", out / TEACHER)
    _show(console, out, [read_run(title, out / "runs" / name) for name, title in _NAMES.items()])
    console.print(f"The demo took {time.monotonic() - began:.0f} s.")


_MARK = ".xtoken-demo"


def prepare_directory(out: Path) -> None:
    """Create the directory, and remove the files of an earlier demo.

    Raises:
        InputError: It has files that are not the demo's, or cannot be written.
    """
    try:
        if out.exists() and any(out.iterdir()):
            if not (out / _MARK).is_file():
                raise InputError(f"{out} is not empty and was not made by the demo: name another directory with --out")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / _MARK).touch()
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}: name another directory with --out") from error


@contextmanager
def _stage(console: Console, title: str) -> Iterator[None]:
    console.print(f"[bold]{title}[/bold]")
    began = time.monotonic()
    yield
    console.print(f"  done in {time.monotonic() - began:.1f} s", style="dim")


def _train(run_file: Path) -> None:
    """Run one training to its end.

    Raises:
        XtokenError: It did not complete.
    """
    from xtoken_services.supervisor.local_run import run_locally

    result = run_locally(load_run_spec(run_file))
    if result.exit_code:
        error = XtokenError(result.error or f"the run {run_file.stem} was stopped: rerun `xtoken demo`")
        error.exit_code = result.exit_code
        raise error


def _show(console: Console, out: Path, runs: list[Run]) -> None:
    """Print the table, and write it and the report."""
    teacher, *students = runs
    console.print(table(runs))
    with (out / "table.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=120).print(table(runs))
    write_report(out / "report.html", teacher, students)
    console.print(f"Distilled beside cross-entropy only: {difference(students[1].final, students[0].final)}.")
    console.print(f"Report: {out / 'report.html'}\nModel:  {out / 'runs' / DISTILLED / 'model'}")


def write_run_files(out: Path, teacher: Training, student: Training) -> dict[str, Path]:
    """Write `teacher.toml`, and `cross-entropy.toml` and `distilled.toml`, which are equal but for the loss.

    Args:
        out: Where models and corpus are; the runs get directories below it.
        teacher: How the teacher is trained.
        student: How both students are trained.

    Returns:
        The file of each run, by its name, in the order in which they run.
    """
    taught = f'[teacher]\nmodel = "{TEACHER}"\ncontext_length = {student.context_length}\n\n'
    plain = "kl_loss_weight = 0.0\nce_loss_scale = 1.0"
    texts = {
        TEACHER: run_file(TEACHER, UNTRAINED_TEACHER, "", plain, teacher),
        CROSS_ENTROPY: run_file(CROSS_ENTROPY, STUDENT, taught, plain, student),
        DISTILLED: run_file(
            DISTILLED, STUDENT, taught, 'mode = "chain"\nkl_loss_weight = 1.0\nce_loss_scale = 1.0', student
        ),
    }
    files = {name: out / f"{name}.toml" for name in texts}
    for name, file in files.items():
        file.write_text(texts[name], encoding="utf-8")
    return files


EVAL_BYTES = 40_000


def run_file(name: str, model: str, teacher: str, loss: str, training: Training) -> str:
    """Return the text of a run file; its paths are relative to its own directory."""
    return f"""# Created by `xtoken demo`; rerun it with `xtoken run {name}.toml`.
name = "{name}"
output = "runs/{name}"
seed = {training.seed}

[student]
model = "{model}"
context_length = {training.context_length}

{teacher}[data]
path = "corpus/train.jsonl"

[eval]
path = "corpus/heldout.jsonl"
every = {training.eval_every}
max_bytes = {EVAL_BYTES}

[loss]
{loss}

[train]
samples_per_step = {training.samples_per_step}
max_steps = {training.steps}
micro_batch_tokens = {training.samples_per_step * training.context_length}
learning_rate = {training.learning_rate}
min_learning_rate = {float(f"{training.learning_rate / 20:.6g}")}
warmup_steps = {max(1, training.steps // 10)}
weight_decay = 0.01
checkpoint_every = {training.steps}

[workers]
collators = 2
device = "cpu"
"""


_INITIAL_RANGE = 0.05


def write_model(
    directory: Path, tokenizer_dir: Path, *, layers: int, hidden: int = 256, seed: int = 0, positions: int = 512
) -> Path:
    """Write a small Llama-like model with random weights from a seed, and its tokenizer, as a Hugging Face directory.

    Its head is as wide as the tokenizer and tied to the embedding; attention heads are 64 wide.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=_INITIAL_RANGE,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Corpus:
    """Files of the documents, one `{"text": ...}` per line.

    Attributes:
        train: Documents to train on.
        heldout: Documents of other files, to evaluate on.
        train_bytes: UTF-8 bytes of text in the first.
        heldout_bytes: UTF-8 bytes of text in the second.
    """

    train: Path
    heldout: Path
    train_bytes: int
    heldout_bytes: int


def write_corpus(directory: Path, *, library: Path | None = None) -> Corpus:
    """Write `train.jsonl` and `heldout.jsonl`.

    A file of the library belongs to one of them by a hash of its name, so the split is the same on every machine.
    Both are written in the order of a hash of the documents: any prefix of a file is an unbiased sample of it.

    Args:
        directory: Directory of both files; created if missing.
        library: The standard library's directory; this interpreter's own if left out.

    Raises:
        InputError: The library contains no Python sources.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    documents: dict[bool, list[str]] = {False: [], True: []}
    for path in library_files(library):
        documents[is_held_out(path, library)] += cut_at_lines(_source_text(path))
    if not (documents[False] and documents[True]):
        raise InputError(f"{library} does not hold the standard library's sources (.py files): the demo needs them")
    directory.mkdir(parents=True, exist_ok=True)
    train, heldout = directory / "train.jsonl", directory / "heldout.jsonl"
    train_bytes = _write_jsonl(train, documents[False])
    heldout_bytes = _write_jsonl(heldout, documents[True])
    return Corpus(train, heldout, train_bytes, heldout_bytes)


_LEFT_OUT = {"test", "tests", "idlelib", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_ONE_IN = 16


def library_files(library: Path) -> list[Path]:
    """Return the library's `.py` files, without its tests, IDLE and installed packages, sorted by name."""
    kept = [path for path in library.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(library).parts)]
    return sorted(path for path in kept if path.is_file())


def is_held_out(path: Path, library: Path) -> bool:
    """Return whether a file belongs to the sixteenth that is held out for evaluation."""
    name = path.relative_to(library).as_posix()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _HELD_OUT_ONE_IN == 0


_SMALLEST, _LARGEST = 600, 1000


def cut_at_lines(text: str) -> Iterator[str]:
    """Split a text into documents of 600 to 1000 bytes at line ends; only a longer line makes a longer document.

    How long each is to be follows from its first line, so that lengths vary. The last one takes what is left and
    may be shorter. Together they are the text, but for blank documents.
    """
    lines: list[str] = []
    size = wanted = 0
    for line in text.splitlines(keepends=True):
        width = len(line.encode("utf-8"))
        if lines and size + width > wanted:
            yield from _unless_blank(lines)
            lines, size = [], 0
        if not lines:
            wanted = _SMALLEST + zlib.crc32(line.encode("utf-8")) % (_LARGEST - _SMALLEST + 1)
        lines.append(line)
        size += width
    yield from _unless_blank(lines)


def _unless_blank(lines: list[str]) -> Iterator[str]:
    document = "".join(lines)
    if document.strip():
        yield document


def _source_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # a few files of the library are in other encodings


def _write_jsonl(path: Path, documents: list[str]) -> int:
    ordered = sorted(documents, key=lambda text: hashlib.sha256(text.encode("utf-8")).digest())
    with path.open("w", encoding="utf-8") as file:
        for text in ordered:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return sum(len(text.encode("utf-8")) for text in ordered)
