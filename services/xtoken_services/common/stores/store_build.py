"""A store's build: a run's settings and text, with one teacher and what else a build does not need left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.routing import Routes
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_core.teacher_store.files import is_address
from xtoken_services.common.text.measured_text import measure_pieces
from xtoken_services.common.text.training_text import open_text

SUFFIX = "-store"
BUILD = "build"
"""Directory within a store that holds the logs and the record of its build."""


def build_spec(spec: RunSpec, teacher: int | None, out: str) -> RunSpec:
    """Return the settings of a build.

    Text, order, tokenizers, lengths and the teacher's settings are the run's. Each record that the run reads is
    computed once, whatever its number of epochs.

    Args:
        spec: The run, with absolute paths.
        teacher: Number of the teacher; None: its only one.
        out: Directory or address of the store.

    Raises:
        ConfigError: There is no such teacher, it sends whole logits, or its run trains on completions.
    """
    if spec.rollout is not None:
        raise ConfigError(
            "this run has [rollout], and a store holds a teacher's output over given text: leave [rollout] out of the "
            "run file to build a store of the text"
        )
    number = teacher_number(spec, teacher)
    chosen = spec.teacher[number]
    if chosen.content == "logits":
        key = spec.teacher_key(number)
        raise ConfigError(f'{key}.content = "logits": whole logits are not stored: set it to "hidden" or "topk"')
    document: dict[str, Any] = spec.model_dump(exclude={"teacher", "loss", "eval", "report", "ray"})
    own = {"store": None, "store_missing": "fail", "content": chosen.content or "hidden", "weight": 1.0}
    document["teacher"] = [chosen.model_dump() | own]
    # Of the loss only its temperature reaches the teacher, and hidden states not even that. ALM reads no file about the
    # two tokenizers, but has no temperature.
    at_temperature = own["content"] == "topk" and spec.loss.temperature != 1.0
    loss = {"mode": "p_kl", "temperature": spec.loss.temperature} if at_temperature else {"mode": "alm"}
    document["loss"] = loss | {"vocab_topk": None}
    document["ray"] = spec.ray.model_dump()
    # No evaluation, but the same text to train on, and the teacher's own result on what is held out.
    document["eval"] = spec.eval and spec.eval.model_dump(include={"path", "field", "max_bytes"})
    document["data"]["epochs"] = 1
    for source in document["data"]["sources"]:
        source["teachers"] = None  # the names of teachers that a build does not have: `as_part_of` knows them
        if source["weight"] is not None:  # all records, each once: a mixture may repeat them
            source["weight"] = document["train"]["max_steps"] = None
    document["train"]["lora"] = None
    document["workers"]["nodes"] = 1
    document["name"] = spec.name[: 64 - len(SUFFIX)] + SUFFIX
    document["output"] = (
        spec.output.with_name(spec.output.name + SUFFIX) if is_address(out) else Path(out).absolute() / BUILD
    )
    return RunSpec.model_validate(document)


def as_part_of(build: ResolvedRun, run: RunSpec, progress: Callable[[int, int], None] | None = None) -> ResolvedRun:
    """Return a build with what its run's other teachers decide: the samples of its own, and pieces that fit all.

    Args:
        build: The build as its own settings say.
        run: The run that the store is for.
        progress: As of `DataIndex.build`.
    """
    # Teachers without a name compare the same samples.
    number = next(n for n, teacher in enumerate(run.teacher) if teacher.name == build.spec.teacher[0].name)
    build = build.model_copy(update={"routes": Routes.of(run, number)})
    if run.data.long != "split" or len(run.teacher) == 1:
        return build
    student = tokenizer_fingerprint(run.student.tokenizer_dir)
    same = [
        each.projection is None and each.prompt is None and tokenizer_fingerprint(each.tokenizer_dir) == student
        for each in run.teacher
    ]
    limit = measure_pieces(run.model_copy(update={"output": build.spec.output}), same, progress)
    index, steps = open_text(build.spec, limit, progress), build.spec.train.max_steps
    most = len(index) if steps is None else min(len(index), steps * build.spec.train.samples_per_step)
    text = {"data_fingerprint": index.fingerprint, "records": len(index), "positions": most}
    return build.model_copy(update={"piece_bytes": limit, "bos_in_pieces": limit > 0, **text})


def teacher_number(spec: RunSpec, teacher: int | None) -> int:
    """Return the number of the teacher whose output is stored.

    Raises:
        ConfigError: There is none of this number, or several and no number.
    """
    count = len(spec.teacher)
    if not count:
        raise ConfigError("this run has no teacher, and so nothing to store: name a [teacher]")
    if teacher is None and count > 1:
        raise ConfigError(f"this run has {count} teachers, and a store holds one's output: choose it by --teacher")
    number = teacher or 0
    if number >= count:
        raise ConfigError(f"--teacher {number}: the run has {count} teachers, numbered from 0")
    return number
