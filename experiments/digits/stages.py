"""The stages, each of which leaves out what is done already."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any

from experiments.digits.methods import CROSS, SAME, custom_options, planned, run_file, run_name
from experiments.digits.settings import Scale
from experiments.digits.summary import number
from experiments.digits.text import Texts, read_texts, write_texts
from experiments.jobs import Job, finished, run_all
from experiments.machines import joined_machines

TOKENIZERS = "tokenizers"
SAME_STUDENT = {"bits_per_byte.code": 0.005, "exact_match.all": 0.03}
"""Most by which a first student that is trained again may differ from the one before."""
_TEACHER_SEED = 100
_MASS = "mass"


class OtherStudentsError(RuntimeError):
    """A result file's rows begin from other first students; the message names one."""


def prepare(state: Path, scale: Scale) -> None:
    """Write text and tokenizers."""
    from experiments.digits.vocabularies import make_student_tokenizer, make_teacher_tokenizer

    if (state / TOKENIZERS / "student" / "tokenizer.json").is_file():
        return
    texts = write_texts(state / "text", scale)
    some = read_texts(texts.clean)[:20_000]
    make_teacher_tokenizer(some, scale.teacher_vocabulary, state / TOKENIZERS / "teacher")
    make_student_tokenizer(some, scale.student_words, scale.numerals, state / TOKENIZERS / "student")


def scratch(state: Path, scale: Scale, *, side_by_side: int, only: tuple[str, ...] = ()) -> None:
    """Train both teachers and the first students and build the projection, each model in a process of its own."""
    prepare(state, scale)
    texts = Texts(state / "text")
    teacher = {"family": "qwen3", "shape": scale.teacher, "settings": scale.teach}
    student = {"family": "llama", "shape": scale.student, "settings": scale.begin, "tokenizer": "student"}
    wanted: dict[str, dict[str, Any]] = {
        CROSS: {**teacher, "tokenizer": "teacher", "texts": texts.clean, "seed": _TEACHER_SEED},
        SAME: {**student, "settings": scale.teach_same, "texts": texts.clean, "seed": _TEACHER_SEED},
    }
    for seed in range(scale.seeds):
        wanted[f"student-{seed}"] = {**student, "texts": texts.wrong, "seed": seed}
    missing = [n for n in wanted if not (state / n).is_dir() and (not only or n in only)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(side_by_side, max(1, len(missing))), _few_threads, (side_by_side,)) as pool:
        pool.starmap(_train, [(state, name, wanted[name]) for name in missing], chunksize=1)
        pool.close()
        pool.join()
    project(state)


def project(state: Path) -> None:
    """Build the projection from the student's vocabulary to that of the teacher that splits numbers."""
    from xtoken_core.projection import build_projection, write_projection
    from xtoken_services.common.tokenizers.loading import load_tokenizer

    file = state / "projection.safetensors"
    if not file.is_file() and (state / CROSS).is_dir() and (state / "student-0").is_dir():
        sides = load_tokenizer(state / "student-0", "student"), load_tokenizer(state / CROSS, "teacher")
        write_projection(build_projection(*sides), file)


def runs(
    state: Path,
    scale: Scale,
    *,
    side_by_side: int,
    until: float,
    only: tuple[str, ...],
    seeds: tuple[int, ...],
    gpus: int = 1,
    without: frozenset[tuple[str, int]] = frozenset(),
) -> bool:
    """Run the compared methods but `without`, each with every seed; return True if all are finished."""
    wanted = [(n, s) for n, s in planned(scale) if (not only or n in only) and (not seeds or s in seeds)]
    wanted = [run for run in wanted if run not in without]
    jobs = [Job(run_name(*run), run_file(scale, *run), custom_options(run[0])) for run in wanted]
    return run_all(state, jobs, side_by_side=side_by_side, until=until, gpus=gpus)


def recorded(scale: Scale, out: Path) -> frozenset[tuple[str, int]]:
    """Return method and seed of every run that the result file in `out` has."""
    file = out / f"{scale.name}.json"
    known = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []
    return frozenset((run["method"], run["seed"]) for run in known)


def measure(state: Path, scale: Scale, out: Path, *, side_by_side: int = 1) -> None:
    """Measure every model that there is and has not been measured, and write the result file.

    Args:
        state: Directory of models, text and runs.
        scale: The experiment's size.
        out: Directory of the result file.
        side_by_side: Number of processes that measure.
    """
    (state / "measured").mkdir(exist_ok=True)
    models = [name for name in (CROSS, SAME, *_students(scale)) if (state / name).is_dir()]
    made = [run_name(*run) for run in planned(scale) if finished(state, run_name(*run))]
    missing = [name for name in (_MASS, *models, *made) if not _measured(state, name).is_file()]
    context = multiprocessing.get_context("spawn")
    with context.Pool(max(1, min(side_by_side, len(missing))), _few_threads, (side_by_side,)) as pool:
        pool.starmap(_measure_one, [(state, scale, name) for name in missing], chunksize=1)
        pool.close()
        pool.join()
    collect(state, scale, out)


def _students(scale: Scale) -> list[str]:
    return [f"student-{seed}" for seed in range(scale.seeds)]


def _measured(state: Path, name: str) -> Path:
    return state / "measured" / f"{name}.json"


def _measure_one(state: Path, scale: Scale, name: str) -> None:
    """Measure a teacher, a first student or a run's model, or the teacher's mass."""
    from experiments.digits import measures

    began = time.monotonic()
    teacher = measures.load(state / CROSS)
    if name == _MASS:
        found = _mass(state, teacher)
    else:
        scratch = (state / name).is_dir()
        model = measures.load(state / name if scratch else state / "runs" / name / "model")
        found = measures.of_any_model(*model, scale, Texts(state / "text"))
        found |= {} if name in (CROSS, SAME) else measures.of_student(model, teacher, scale, state)
        found |= _scratch_record(state / name) if scratch else run_record(state / "runs" / name)
    _write_json(_measured(state, name), found)
    print(f"measured {name} in {time.monotonic() - began:.1f} s", flush=True)


def collect(state: Path, scale: Scale, out: Path) -> None:
    """Write one result file of all measurements; those of other machines that it already has stay.

    Args:
        state: Directory of the measurements.
        scale: The experiment's size.
        out: Directory of the result file.

    Raises:
        OtherStudentsError: The file's first students are others than those of `state`, so that rows do not compare.
    """
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (state / "measured").glob("*.json")}
    names = {(name, seed): run_name(name, seed) for name, seed in planned(scale)}
    file = out / f"{scale.name}.json"
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    students = {str(s): found[f"student-{s}"] for s in range(scale.seeds) if f"student-{s}" in found}
    _check_students(known.get("students", {}), students)
    rows = {(run["method"], run["seed"]): run for run in known.get("runs", [])}
    rows |= {(n, s): {"method": n, "seed": s, **found[run]} for (n, s), run in names.items() if run in found}
    result = {
        "settings": scale.plain(),
        "machine": joined_machines(known.get("machine", {}), machine() if found else {}),
        "teachers": {name: found[name] for name in (CROSS, SAME) if name in found} | known.get("teachers", {}),
        "mass": known.get("mass") or found.get(_MASS, {}).get("rows", []),
        "students": dict(sorted((students | known.get("students", {})).items())),
        "runs": [rows[key] for key in names if key in rows],
        "not_run": [{"method": n, "seed": s} for n, s in names if (n, s) not in rows],
    }
    out.mkdir(parents=True, exist_ok=True)
    _write_json(file, result)


def _check_students(known: dict[str, Any], found: dict[str, Any]) -> None:
    for seed in sorted(known.keys() & found.keys()):
        for name, path in (("bits per byte on sources", "bits_per_byte.code"), ("right answers", "exact_match.all")):
            before, now = (number(each[seed], path) or 0.0 for each in (known, found))
            if abs(before - now) > SAME_STUDENT[path]:
                raise OtherStudentsError(
                    f"first student {seed} has {now:.4f} {name} and that of the result file {before:.4f}, so that "
                    "their runs do not compare: nothing was written; give another directory with --out"
                )


def machine() -> dict[str, Any]:
    """Describe the machine and its versions."""
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _few_threads(side_by_side: int) -> None:
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // side_by_side))


def _train(state: Path, name: str, wanted: dict[str, Any]) -> None:
    from experiments.digits.scratch import train_from_scratch

    train_from_scratch(
        state / name,
        state / TOKENIZERS / wanted["tokenizer"],
        wanted["texts"],
        family=wanted["family"],
        shape=wanted["shape"],
        settings=wanted["settings"],
        seed=wanted["seed"],
    )


def _mass(state: Path, teacher: tuple[Any, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from experiments.digits import measures

    texts = Texts(state / "text")
    documents = read_texts(texts.arithmetic)[:48] + read_texts(texts.code)[:48]
    tokenizer = AutoTokenizer.from_pretrained(state / TOKENIZERS / "student")
    return {"rows": measures.teacher_mass(teacher, tokenizer, documents)}


def _scratch_record(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "scratch.json").read_text(encoding="utf-8"))
    return {"parameters": record["parameters"], "scratch_seconds": record["losses"][-1]["seconds"]}


def run_record(directory: Path) -> dict[str, Any]:
    """Return the run's own records."""
    steps = [json.loads(line) for line in (directory / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    evals = [json.loads(line) for line in (directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = sum(row["seconds"] for row in steps)
    numbers = ("kl_loss", "ce_loss", "chunk_mass_t0", "grad_norm", "kl_loss_scale")
    last = steps[-max(1, len(steps) // 10) :]
    return {
        "steps": len(steps),
        "tokens": sum(row["tokens"] for row in steps),
        "tokens_per_second": sum(row["tokens"] for row in steps) / seconds,
        "last": {n: sum(row[n] for row in last) / len(last) for n in numbers if all(n in row for row in last)},
        "curve": [{"step": row["step"], "bits_per_byte": row["bits_per_byte"]} for row in evals],
    }


def _write_json(file: Path, value: dict[str, Any]) -> None:
    partial = file.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
