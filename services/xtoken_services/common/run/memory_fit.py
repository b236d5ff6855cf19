"""Micro-batch and memory settings that fit a run to its GPU or host, where the run file leaves them out. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtoken_core.config.resolved import ResolvedModel, ResolvedRun
from xtoken_core.config.spec import ModelSpec, RunSpec, padded_length
from xtoken_core.config.train import TrainSpec
from xtoken_core.wire.columns import ITEM_SIZES

if TYPE_CHECKING:
    from xtoken_services.common.run.defaults import RunDefaults
    from xtoken_services.common.run.machine import Machine

USABLE = 0.9
"""Fraction of the memory that is planned for: the rest is the driver's, the libraries' and fragmentation."""
LARGEST = 16384
"""Tokens of a micro-batch at most: larger ones are hardly faster."""
CPU_TOKENS: int = TrainSpec.model_fields["micro_batch_tokens"].default
"""The same on a CPU."""
HIDDEN: dict[str, Any] = {
    "teacher.content": "hidden",
    "student.blockwise_head": True,
    "student.checkpoint_activations": True,
}
"""What saves memory without a change of the result, beyond rounding."""
NO_MASTERS: dict[str, Any] = {"train.master_weights": False}
"""What saves more, with changes lost that are smaller than a weight's last bit."""


def fit_memory(defaults: RunDefaults, base: Path, *, on_gpu: bool) -> None:
    """Fill in the micro-batch, and what saves memory as far as it is needed for one sample.

    Args:
        defaults: The run file's document, complete but for these settings.
        base: Directory of relative paths.
        on_gpu: The models are on GPUs; on CPUs nothing is filled in if the settings' own defaults fit.
    """
    document, machine = defaults.document, defaults.machine
    if defaults.given("train.micro_batch_tokens"):
        return  # a user who names it has chosen the settings beside it too
    try:
        spec = _with_paths(document, base)
        if not all((side.model / "config.json").is_file() for side in (spec.student, *spec.teacher)):
            return  # the check of the models' files reports it, before imports that take longer than starting Python
        document = _without_heads(document, spec)
        longest = max(padded_length(side.context_length) for side in (spec.student, *spec.teacher))
        savers: dict[str, Any] = {}
        tokens = 0
        halves = [HIDDEN | NO_MASTERS] if ITEM_SIZES[spec.student.dtype] < ITEM_SIZES["float32"] else []
        for savers in [_stored_savers(defaults)] if defaults.stored else [{}, HIDDEN, *halves]:
            tokens = tokens_that_fit(_with(spec, document, savers), machine)
            if tokens >= longest:
                break
    except Exception:  # the checks of the settings and the models' files report what is wrong with them
        return
    # A rank's part of a step has no more, whatever fits.
    ranks = spec.workers.ranks * spec.workers.nodes
    tokens = min(tokens, -(-spec.train.samples_per_step // ranks) * longest)
    if not on_gpu and not defaults.stored and tokens >= CPU_TOKENS:
        return
    for name, value in savers.items():
        for setting in _settings_named(name, document):
            defaults.fill(setting, value, "to fit the GPU" if on_gpu else "to fit the memory")
    fits = max(longest, min(tokens, LARGEST if on_gpu else CPU_TOKENS) // longest * longest)
    gib = 1 << 30
    why = f"for a GPU of {machine.gpu_bytes / gib:.0f} GiB"
    if not on_gpu:
        why = f"for {machine.memory_bytes / gib:.1f} GiB of memory"
    if "custom" in _modes(document):
        why += ", without the custom loss's own memory"
    defaults.fill("train.micro_batch_tokens", fits, why)


def _without_heads(document: dict[str, Any], spec: RunSpec) -> dict[str, Any]:
    """Return a document that names whole logits for models that cap or scale them, of which no saver takes the head."""
    from xtoken_services.common.run.memory_estimate import ModelSizes

    student, *teachers = (ModelSizes.of(side.model).adjusted for side in (spec.student, *spec.teacher))
    named = [
        {"content": "logits", **own} if adjusted else own
        for own, adjusted in zip(document.get("teacher", ()), teachers, strict=True)
    ]
    head = {"blockwise_head": False} if student else {}
    return document | {"student": head | document["student"], "teacher": named}


def _with_paths(document: dict[str, Any], base: Path) -> RunSpec:
    """Return a document as settings, its models' directories relative to a base."""

    def placed(model: dict[str, Any]) -> dict[str, Any]:
        return model | {"model": base / Path(str(model["model"])).expanduser()}

    teachers = [placed(teacher) for teacher in document.get("teacher", ())]
    return RunSpec.model_validate(document | {"student": placed(document["student"]), "teacher": teachers})


def tokens_that_fit(spec: RunSpec, machine: Machine) -> int:
    """Return the tokens of the largest micro-batch that fits; 0 if not even the models do.

    The estimate is affine in them, once they are more than a block of the head.

    Args:
        spec: The run, with any micro-batch.
        machine: The machine.
    """
    from xtoken_services.common.run.memory_estimate import BLOCK_ROWS
    from xtoken_services.common.run.memory_places import places_of

    few, many = (places_of(unresolved(spec, tokens), machine) for tokens in (BLOCK_ROWS, 2 * BLOCK_ROWS))
    fits = [LARGEST * 1.0]
    for less, more in zip(few, many, strict=True):
        if less.total and (each := (more.needed - less.needed) / BLOCK_ROWS):
            fits.append(BLOCK_ROWS + (less.total * USABLE - less.needed) / each)
    return max(0, int(min(fits)))


def unresolved(spec: RunSpec, tokens: int) -> ResolvedRun:
    """Return a run as far as it is known before its text is read, with a micro-batch of so many tokens."""
    from xtoken_services.common.run.memory_estimate import ModelSizes

    def model(side: ModelSpec, name: str) -> ResolvedModel:
        sizes = ModelSizes.of(side.model)
        width = sizes.vocabulary
        return ResolvedModel(vocab_size=width, head_width=width, tokenizer_fingerprint=name, hidden_size=sizes.hidden)

    train = spec.train.model_copy(update={"micro_batch_tokens": tokens})
    return ResolvedRun(
        spec=spec.model_copy(update={"train": train}),
        student=model(spec.student, "student"),
        teachers=tuple(model(teacher, f"teacher {number}") for number, teacher in enumerate(spec.teacher)),
        projection_fingerprints=("",) * len(spec.teacher),
        data_fingerprint="",
        records=0,
        positions=0,
        packed=spec.train.packing != "off",
    )


def _modes(document: dict[str, Any]) -> list[Any]:
    """Return the modes of the loss that a run file names."""
    loss = document.get("loss")
    own = loss.get("teacher_modes") if isinstance(loss, dict) else None
    return [loss.get("mode"), *(own if isinstance(own, list) else ())] if isinstance(loss, dict) else []


def _settings_named(name: str, document: dict[str, Any]) -> list[str]:
    """Return the settings that a saver means: `teacher.content` is that of every teacher whose output is its own."""
    table, _, key = name.partition(".")
    if table != "teacher":
        return [] if key in document.get(table, {}) else [name]
    teachers = enumerate(document.get("teacher", ()))
    return [f"teacher.{number}.content" for number, teacher in teachers if _has_no_content(teacher)]


def _stored_savers(defaults: RunDefaults) -> dict[str, Any]:
    """Return the savers that the first start has used."""
    teachers = range(len(defaults.document.get("teacher", ())))
    contents = [defaults.stored_value(f"teacher.{number}.content") for number in teachers]
    stored = {name: defaults.stored_value(name) for name in (*HIDDEN, *NO_MASTERS)}
    stored["teacher.content"] = "hidden" if "hidden" in contents else None
    return {name: value for name, value in (HIDDEN | NO_MASTERS).items() if stored[name] == value}


def _with(spec: RunSpec, document: dict[str, Any], savers: dict[str, Any]) -> RunSpec:
    """Return a run with the values of savers where its document has none of its own."""
    tables: dict[str, dict[str, Any]] = {"student": {}, "train": {}, "teacher": {}}
    for name, value in savers.items():
        table, _, key = name.partition(".")
        if table == "teacher" or key not in document.get(table, {}):
            tables[table][key] = value
    return spec.model_copy(
        update={
            "student": spec.student.model_copy(update=tables["student"]),
            "train": spec.train.model_copy(update=tables["train"]),
            "teacher": tuple(
                teacher.model_copy(update=tables["teacher"] if _has_no_content(own) else {})
                for teacher, own in zip(spec.teacher, document.get("teacher", ()), strict=True)
            ),
        }
    )


def _has_no_content(teacher: dict[str, Any]) -> bool:
    """Return whether it is open what a teacher sends: that of a server or a store is not."""
    return not (teacher.get("content") or teacher.get("url") or teacher.get("store"))
