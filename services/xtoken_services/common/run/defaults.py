"""Defaults of a run file that depend on models, text and machine; stored, and read back on resume. No torch."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtoken_core.config.base import NONE, absolute_path
from xtoken_core.config.eval import HELD_OUT_PERCENT, NOT_IN_A_NAME, EvalSpec
from xtoken_core.config.self_teacher import with_teachers
from xtoken_core.config.spec import RunSpec, padded_length, parse_run_spec, read_run_file
from xtoken_core.config.train import TrainSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.regular_files import json_object_or_empty
from xtoken_services.common.models.hub import fetch_inputs
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.run.memory_fit import CPU_TOKENS, LARGEST, fit_memory

MOST_CONTEXT = 1024
TEACHER_CONTEXT = 1.25
"""Tokens of the teacher's context per token of the student's: its tokenizer may need more for the same text."""
SPEC = "spec.json"
AUTO = "auto"
FLOPS_PER_CORE = 1e10
EVALUATION_S = 30.0
BYTES_PER_TOKEN = 4
FIRST_BYTES = 64 << 10
"""Bytes of a text by which the length of its records is estimated."""
LEAST_EVALUATION, MOST_EVALUATION = 4 << 10, 1 << 20
OF_TRAINED = 0.5
"""Bytes of an evaluation per byte trained since the one before: training reads a byte for three times the work or more,
so that evaluations take about a quarter of a run at most, with the one before its first step."""
EVALUATIONS, LEAST_EVERY = 10, 5
"""Evaluations of a run, and the fewest steps between two: on a CPU one may take as long as some steps."""
_DTYPE = "bfloat16 on a GPU, float32 on a CPU"
FILLED = {
    "output": "runs/NAME",
    "student.context_length": f"{MOST_CONTEXT}, or the model's if less",
    "student.dtype": _DTYPE,
    "teacher.context_length": f"{TEACHER_CONTEXT:g} times the student's, or the model's if less",
    "teacher.dtype": _DTYPE,
    "eval.max_bytes": f"on a CPU about {EVALUATION_S:.0f} s, at most a quarter of the run; else 1 MiB",
    "eval.every": f"a tenth of train.max_steps, at least {LEAST_EVERY}, or {EvalSpec.model_fields['every'].default}",
    "train.micro_batch_tokens": f"what fits, at most {LARGEST}, on a CPU {CPU_TOKENS}",
    "train.learning_rate": "1e-4; 3e-5 with completions from the first step on",
    "rollout.teacher_temperature": "0.5; 1 where a teacher is on servers, which give no other, or is the student",
}
"""Settings that models, text, machine or other settings decide where a run file leaves them out, and how. Further ones
change with them only to fit the memory (`xtoken_services.common.run.memory_fit`)."""


@dataclass
class RunDefaults:
    """A run file's document while its defaults are filled in.

    Attributes:
        document: The document, with absolute paths.
        stored: The settings of an earlier start in the same output; empty without one.
        machine: The machine.
        notes: One line for every default, in order.
    """

    document: dict[str, Any]
    stored: Mapping[str, Any]
    machine: Machine
    notes: list[str] = field(default_factory=list)

    def fill(self, name: str, value: Any, why: str = "") -> None:
        """Set a setting that is missing or `auto`: to its stored value, or else to `value`; None leaves it out.

        Args:
            name: Dotted path of the setting.
            value: Its default.
            why: Reason that is printed beside it.
        """
        *path, key = name.split(".")
        table: Any = self.document
        for part in path:
            table = table[int(part)] if isinstance(table, list) else table.setdefault(part, {})
        if not isinstance(table, dict) or table.get(key, AUTO) != AUTO:
            return
        if (earlier := self.stored_value(name)) is not None:
            value, why = earlier, "as at the first start"
        table.pop(key, None)
        if value is not None:
            table[key] = value
            shown = name if len(self.document.get("teacher", ())) > 1 else name.replace("teacher.0.", "teacher.", 1)
            self.notes.append(f"{shown} = {json.dumps(value, default=str)}" + (f" ({why})" if why else ""))

    def given(self, name: str) -> bool:
        """Return True if the run file names a setting of a table."""
        table, _, key = name.partition(".")
        return _part(self.document.get(table), key) not in (None, AUTO)

    def stored_value(self, name: str) -> Any:
        """Return a setting of the earlier start by its dotted path; None without one."""
        value: Any = self.stored
        for part in name.split("."):
            value = _part(value, part)
        return value


def load_run(path: Path, settings: Sequence[str] = (), *, machine: Machine | None = None) -> tuple[RunSpec, list[str]]:
    """Read a run file and fill in what it leaves out.

    Args:
        path: The run file.
        settings: `table.key=value` pairs that replace settings of the file.
        machine: The machine; None: this one.

    Returns:
        The specification, and a line for every default that was filled in.

    Raises:
        InputError: The file cannot be read, or names something of the Hub that cannot be fetched.
        ConfigError: A setting is wrong.
    """
    base = path.resolve().parent
    name = NOT_IN_A_NAME.sub("-", path.stem).lstrip("._-")[:64]
    source = " --set ".join([str(path), *settings])
    return fill_run_defaults(read_run_file(path), base, source=source, settings=settings, name=name, machine=machine)


def fill_run_defaults(
    document: Mapping[str, Any],
    base: Path,
    *,
    source: str,
    settings: Sequence[str] = (),
    name: str = "",
    machine: Machine | None = None,
) -> tuple[RunSpec, list[str]]:
    """Fill in what the document of a run file leaves out.

    Args:
        document: The document.
        base: Directory of its relative paths.
        source: Name of the document for errors.
        settings: As for `load_run`.
        name: The run's name if the document has none.
        machine: As for `load_run`.

    Returns:
        As `load_run`.

    Raises:
        InputError: It names something of the Hub that cannot be fetched.
        ConfigError: A setting is wrong.
    """
    try:
        document = expanded(deepcopy(dict(document)))
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply") from error
    for setting in settings:
        _override(document, setting)
    document = expanded(document)
    document.setdefault("name", name or "run")
    named = "output" in document
    document.setdefault("output", f"runs/{document['name']}")
    output = absolute_path(str(document["output"]), base)
    stored = json_object_or_empty(output / SPEC)  # of an earlier start that has written there
    fetched = fetch_inputs(document, base, _part(stored, "hub") or {})
    defaults = RunDefaults(document, stored, machine or Machine.of_this(), fetched)
    if not named:
        defaults.notes.append(f'output = "{output}"')
    _fill_defaults(defaults, base)
    spec = parse_run_spec(defaults.document, source=source).with_base(base)
    if spec.teacher and not _needs_teacher(spec):
        defaults.notes.append("teacher: none, since loss.kl_loss_weight is 0 to the end")
        loss = {"kl_loss_weight": 0.0, "ce_loss_scale": spec.loss.ce_loss_scale}
        spec = parse_run_spec({**spec.model_dump(exclude={"teacher"}), "loss": loss}, source=source)
    return spec, defaults.notes


def _needs_teacher(spec: RunSpec) -> bool:
    """Return whether a run reads what its teachers say: for its loss, completions or evaluation."""
    return spec.loss.weighs_kd or "custom" in spec.loss.modes or spec.rollout is not None


def _override(document: dict[str, Any], setting: str) -> None:
    """Apply one `table.key=value`; the value is TOML, or else a string.

    Raises:
        ConfigError: It has no `=`, or names a part of what is no table.
    """
    name, equals, text = setting.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {setting}: it takes table.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError as error:
        raise ConfigError(f"--set {name.strip()}: its value is nested too deeply") from error
    *path, key = name.strip().split(".")
    table: Any = document
    for part in path:
        if isinstance(table, list) and part.isdigit():
            table = table[int(part)] if int(part) < len(table) else None
            continue
        table = _only(table)
        table = table.setdefault(part, {}) if isinstance(table, dict) else None
    table = _only(table)
    if not isinstance(table, dict):
        raise ConfigError(f"--set {setting}: {'.'.join(path)} is no table of the run file")
    table[key] = value


def _only(table: Any) -> Any:
    """Return the one table of a list, as of `teacher.weight` where there is one teacher; anything else as it is."""
    return table[0] if isinstance(table, list) and len(table) == 1 else table


def expanded(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the short forms of models and text as tables, and teachers as a list."""
    expanded = dict(document)
    for name, key in (("student", "model"), ("data", "path")):
        if isinstance(expanded.get(name), (str, list)):
            expanded[name] = {key: expanded[name]}
    if "teacher" in expanded:
        teachers = expanded["teacher"]
        teachers = teachers if isinstance(teachers, list) else [teachers]
        expanded["teacher"] = [{"model": each} if isinstance(each, str) else each for each in teachers]
        return with_teachers(expanded)
    return expanded


def _fill_defaults(defaults: RunDefaults, base: Path) -> None:
    document, machine = defaults.document, defaults.machine
    tables = ("data", *(name for name in ("train", "workers", "loss", "queue") if name in document))
    fill_model_defaults(defaults, base)
    if not all(isinstance(document.get(name), dict) for name in ("student", *tables)):
        return  # the specification names what is missing
    _fill_evaluation(defaults, base)
    on_gpu = bool(machine.gpu_bytes) and not _on_cpu(document)
    if on_gpu or machine.memory_bytes:
        fit_memory(defaults, base, on_gpu=on_gpu)


def fill_model_defaults(defaults: RunDefaults, base: Path) -> None:
    """Fill in context length and dtype of the student and the teachers that are tables."""
    document = defaults.document
    teachers = ((f"teacher.{number}", each) for number, each in enumerate(document.get("teacher", ())))
    for name, model in (("student", document.get("student")), *teachers):
        if isinstance(model, dict):
            _fill_model(defaults, name, model, base)


def _fill_model(defaults: RunDefaults, name: str, model: dict[str, Any], base: Path) -> None:
    """Fill in context length and dtype of a model."""
    student = _part(defaults.document.get("student"), "context_length")
    longest = _max_length(base / str(model.get("model", "")))
    wanted = MOST_CONTEXT
    if name != "student" and isinstance(student, int):
        wanted = padded_length(int(student * TEACHER_CONTEXT))
    length = min(wanted, longest) if longest else wanted
    defaults.fill(f"{name}.context_length", length, f"the model was made for {longest}" if longest else "")
    on_gpu = bool(defaults.machine.gpu_bytes) and not _on_cpu(defaults.document)
    defaults.fill(f"{name}.dtype", "bfloat16" if on_gpu else "float32", "on a GPU" if on_gpu else "on a CPU")


def _fill_evaluation(defaults: RunDefaults, base: Path) -> None:
    """Hold text back if no evaluation is named, and scale the evaluation to the machine."""
    document = defaults.document
    if document.get("eval") == NONE:
        del document["eval"]
        return
    given = document.get("eval", {})
    if isinstance(given, dict) and not given.get("path") and not _hold_back(defaults, given, base):
        return
    if isinstance(document["eval"], dict):
        steps = document.get("train", {}).get("max_steps")
        if isinstance(steps, int):
            every = max(LEAST_EVERY, -(-steps // EVALUATIONS))
            defaults.fill("eval.every", every, f"{-(-steps // every) + 1} times in the run")
        defaults.fill("eval.max_bytes", _evaluation_bytes(defaults, base), FILLED["eval.max_bytes"])


def _hold_back(defaults: RunDefaults, given: Mapping[str, Any], base: Path) -> bool:
    """Complete an evaluation that names no text; return False if there is none.

    Raises:
        ConfigError: No text can be held back, and the run file sets something of the evaluation.
    """
    document, earlier = defaults.document, defaults.stored_value("eval")
    data = document["data"]
    if earlier and earlier.get("path"):
        document["eval"] = {**earlier, **given}
        defaults.notes.append("eval: as at the first start")
        return True
    if not given and defaults.stored and not earlier:
        return False
    several = bool(data.get("sources"))
    possible = False if several else _can_hold_back(data, base)
    if possible is None:
        document.pop("eval", None)
        return False
    if not possible:
        why = (
            "text is only held back of a single data.path"
            if several
            else f"no record is in the {HELD_OUT_PERCENT}% held back by their content: it takes some hundred"
        )
        if given:
            raise ConfigError(f"eval.{next(iter(given))} is set without eval.path, and {why}: name a text in eval.path")
        defaults.notes.append(f"eval: none, since {why}: name a text in eval.path, or the teacher is not compared")
        return False
    document["eval"] = {"field": data["field"], **given} if "field" in data else dict(given)
    defaults.notes.append(f"eval: {HELD_OUT_PERCENT}% of the records of data.path, chosen by a hash of their content")
    return True


def _can_hold_back(data: Mapping[str, Any], base: Path) -> bool | None:
    """Return True if a part of the text can be held back; None if it cannot be read, which later checks report."""
    paths = _text_paths(data, base)
    try:
        if not paths or not all(path.exists() for path in paths):
            return None
        from xtoken_core.dataset.index import can_hold_out  # numpy

        return can_hold_out(paths, str(data.get("field", "text")))
    except (InputError, OSError):  # OSError: a name that is too long
        return None


def _text_paths(data: Mapping[str, Any], base: Path) -> list[Path]:
    """Return the paths of a text; none if one is no path."""
    named = data["path"] if isinstance(data.get("path"), list) else [data.get("path")]
    paths = [absolute_path(each, base) for each in named if isinstance(each, str)]
    return paths if len(paths) == len(named) else []


def _evaluation_bytes(defaults: RunDefaults, base: Path) -> int:
    """Return how much text a student is evaluated on: on a CPU what `EVALUATION_S` and `OF_TRAINED` allow."""
    document = defaults.document
    if defaults.machine.gpu_bytes and not _on_cpu(document):
        return MOST_EVALUATION
    from xtoken_services.common.models.weights import weight_count

    try:
        weights = weight_count(base / str(document["student"].get("model", "")))
        steps = document["eval"].get("every", EvalSpec.model_fields["every"].default)
        samples = steps * document.get("train", {}).get(
            "samples_per_step", TrainSpec.model_fields["samples_per_step"].default
        )
        trained = _trained_bytes(document["data"], base, samples, document["student"]["context_length"])
    except Exception:  # the checks of the files and settings report what is wrong with them
        return LEAST_EVALUATION
    tokens = EVALUATION_S * defaults.machine.cores * FLOPS_PER_CORE / max(2 * weights, 1)
    whole = int(min(tokens * BYTES_PER_TOKEN, OF_TRAINED * trained, MOST_EVALUATION)) >> 10 << 10
    return max(LEAST_EVALUATION, whole)


def _trained_bytes(data: Mapping[str, Any], base: Path, samples: int, context: int) -> float:
    """Return about how many bytes so many samples of a text have, by the length of its first records."""
    from xtoken_core.dataset.sources import LINES, find_sources  # numpy

    each, text = float(context * BYTES_PER_TOKEN), math.inf
    if paths := _text_paths(data, base):
        sources = find_sources(paths)
        text = sum(source.size for source in sources) * data.get("epochs", 1)
        if sources[0].kind in LINES:
            with sources[0].path.open("rb") as file:
                begin = file.read(FIRST_BYTES)
            each = min(each, len(begin) / max(begin.count(b"\n"), 1))
    return min(samples * each, text)


def _max_length(directory: Path) -> int:
    """Return the longest text that a model was made for; 0 if that is not known."""
    config = json_object_or_empty(directory / "config.json")
    text = config.get("text_config", config)
    longest = text.get("n_positions", text.get("max_position_embeddings")) if isinstance(text, dict) else None
    return longest // 8 * 8 if isinstance(longest, int) and longest >= 8 else 0


def _on_cpu(document: Mapping[str, Any]) -> bool:
    return bool(_part(document.get("workers"), "device") == "cpu")


def _part(value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple)):
        return value[int(name)] if name.isdigit() and int(name) < len(value) else None
    return value.get(name) if isinstance(value, Mapping) else None
