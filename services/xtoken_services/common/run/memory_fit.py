"""Micro-batch and memory settings that fit a run to its GPU or host, where the run file leaves them out. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtoken_core.config.spec import DEFAULT_TOPK, padded_length
from xtoken_core.config.train import TrainSpec
from xtoken_core.config.workers import WorkersSpec
from xtoken_core.regular_files import read_json_object
from xtoken_core.transports.ring import TOPK_SCALARS
from xtoken_core.wire.columns import ITEM_SIZES
from xtoken_services.common.run.memory_values import BLOCK_ROWS, COPIES, FLOAT32, GIB, state_bytes

if TYPE_CHECKING:
    from xtoken_services.common.run.defaults import RunDefaults
    from xtoken_services.common.run.machine import Machine

USABLE = 0.9
"""Fraction of the memory that is planned for: the rest is the driver's, the libraries' and fragmentation."""
LARGEST = 16384
"""Tokens of a micro-batch at most: larger ones are hardly faster."""
CPU_TOKENS: int = TrainSpec.model_fields["micro_batch_tokens"].default
"""The same on a CPU."""
ACTIVATIONS = 34
"""Values that a layer keeps per token and hidden unit for its backward (Korthikanti et al. 2022, arXiv 2205.05198)."""
LOGITS_COPIES = 3
"""Logits, their gradient, and a float32 intermediate of half-precision logits."""
HIDDEN: dict[str, Any] = {
    "teacher.content": "hidden",
    "student.blockwise_head": True,
    "student.checkpoint_activations": True,
}
"""What saves memory without a change of the result, beyond rounding."""
NO_MASTERS: dict[str, Any] = {"train.master_weights": False}
"""What saves more, with changes lost that are smaller than a weight's last bit."""


class _Side:
    """Sizes of one model, from its files."""

    def __init__(self, settings: dict[str, Any], base: Path) -> None:
        from xtoken_services.common.models.weights import weight_count

        directory = base / Path(str(settings["model"])).expanduser()
        config = read_json_object(directory / "config.json")
        text = config.get("text_config", config)
        stored = settings.get("store") is not None  # then only its head is loaded, if that
        served = bool(settings.get("url"))
        self.weights = 0 if stored or served else weight_count(directory)
        self.item = ITEM_SIZES[settings["dtype"]]
        self.vocabulary = int(text["vocab_size"])
        self.hidden = int(text.get("hidden_size", text.get("n_embd", 0)))
        self.layers = int(text.get("num_hidden_layers", text.get("n_layer", 1)))
        self.context = padded_length(int(settings["context_length"]))
        self.content = settings.get("content") or ("topk" if served else "hidden" if stored else None)
        self.topk = int(settings.get("topk", DEFAULT_TOPK))


def fit_memory(defaults: RunDefaults, base: Path, *, on_gpu: bool) -> None:
    """Fill in the micro-batch, and what saves memory as far as it is needed for one sample.

    Args:
        defaults: The run file's document, complete but for these settings.
        base: Directory of relative paths.
        on_gpu: The models are on GPUs; on CPUs nothing is filled in if the settings' own defaults fit.
    """
    document = defaults.document
    if defaults.given("train.micro_batch_tokens"):
        return  # a user who names it has chosen the settings beside it too
    try:
        student = _Side(document["student"], base)
        teachers = [_Side(teacher, base) for teacher in document.get("teacher", ())]
        workers = WorkersSpec.model_validate(document.get("workers", {}))
    except Exception:  # the checks of the settings and the models' files report what is wrong with them
        return
    longest = max(side.context for side in (student, *teachers))
    savers: dict[str, Any] = {}
    tokens = 0
    halves = [HIDDEN | NO_MASTERS] if student.item < FLOAT32 else []
    for savers in [_stored_savers(defaults)] if defaults.stored else [{}, HIDDEN, *halves]:
        settings = _with(document, savers)
        tokens = _tokens_that_fit(defaults.machine, workers, student, teachers, settings, on_gpu=on_gpu)
        if tokens >= longest:
            break
    if not on_gpu and not defaults.stored and tokens >= CPU_TOKENS:
        return
    for name, value in savers.items():
        for setting in _settings_named(name, teachers):
            defaults.fill(setting, value, "to fit the GPU" if on_gpu else "to fit the memory")
    fits = max(longest, min(tokens, LARGEST if on_gpu else CPU_TOKENS) // longest * longest)
    why = f"for a GPU of {defaults.machine.gpu_bytes / GIB:.0f} GiB"
    if not on_gpu:
        why = f"for {defaults.machine.memory_bytes / GIB:.1f} GiB of memory"
    if "custom" in _modes(document):
        why += ", without the custom loss's own memory"
    defaults.fill("train.micro_batch_tokens", fits, why)


def _tokens_that_fit(
    machine: Machine,
    workers: WorkersSpec,
    student: _Side,
    teachers: list[_Side],
    settings: dict[str, Any],
    *,
    on_gpu: bool,
) -> int:
    """Return the tokens of the largest micro-batch that fits; 0 if not even the models do."""
    kept = _kept(student, teachers, settings)
    signal = workers.slots * sum(_sent(teacher, settings) for teacher in teachers)
    each = signal + _per_token(student, teachers, settings)
    if on_gpu:
        return max(0, int((machine.gpu_bytes * USABLE - kept) / each))
    # Every rank has its models here, and a copy of the student's state, which checkpoints are written from.
    ranks = workers.ranks * workers.nodes
    kept += _state(student, settings, fewer=1)
    fits = (machine.memory_bytes * USABLE / ranks - kept) / each
    if signal and workers.transport != "queue":
        fits = min(fits, machine.shared_bytes * USABLE / ranks / signal)
    return max(0, int(fits))


def _modes(document: dict[str, Any]) -> list[Any]:
    """Return the modes of the loss that a run file names."""
    loss = document.get("loss")
    own = loss.get("teacher_modes") if isinstance(loss, dict) else None
    return [loss.get("mode"), *(own if isinstance(own, list) else ())] if isinstance(loss, dict) else []


def _settings_named(name: str, teachers: list[_Side]) -> list[str]:
    """Return the settings that a saver means: `teacher.content` is that of every teacher whose output is its own."""
    if name != "teacher.content":
        return [name]
    return [f"teacher.{number}.content" for number, teacher in enumerate(teachers) if teacher.content is None]


def _stored_savers(defaults: RunDefaults) -> dict[str, Any]:
    """Return the savers that the first start has used."""
    teachers = range(len(defaults.document.get("teacher", ())))
    contents = [defaults.stored_value(f"teacher.{number}.content") for number in teachers]
    stored = {name: defaults.stored_value(name) for name in (*HIDDEN, *NO_MASTERS)}
    stored["teacher.content"] = "hidden" if "hidden" in contents else None
    return {name: value for name, value in (HIDDEN | NO_MASTERS).items() if stored[name] == value}


def _with(document: dict[str, Any], savers: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that matter here, a saver's value where the document has none of its own."""
    unset = {"teacher.content": "logits", "train.master_weights": True, "train.optimizer": "adamw"}

    def value_of(name: str) -> Any:
        table, _, key = name.partition(".")
        own = document.get(table, {}) if table != "teacher" else {}  # a teacher's own content is in its `_Side`
        return own.get(key, savers.get(name, unset.get(name, False)))

    return {name: value_of(name) for name in (*HIDDEN, *NO_MASTERS, "train.optimizer")}


def _kept(student: _Side, teachers: list[_Side], settings: dict[str, Any]) -> float:
    """Return the bytes that stay between micro-batches, and the block of logits of a head that is multiplied so."""
    block = 0
    if settings["student.blockwise_head"]:
        widths = student.vocabulary * LOGITS_COPIES + sum(2 * teacher.vocabulary for teacher in teachers)
        block = BLOCK_ROWS * widths * student.item
    return _state(student, settings) + block + sum(teacher.weights * teacher.item for teacher in teachers)


def _state(student: _Side, settings: dict[str, Any], *, fewer: int = 0) -> int:
    """Return the bytes of weights, gradients and moments; of `fewer` of them for each weight."""
    optimizer, masters = settings["train.optimizer"], settings["train.master_weights"]
    return state_bytes(student.weights, student.item, optimizer, masters=masters, copies=COPIES - fewer)


def _sent(teacher: _Side, settings: dict[str, Any]) -> int:
    """Return the bytes of one token in a slot."""
    content = teacher.content or settings["teacher.content"]
    if content == "topk":
        return (2 * teacher.topk + TOPK_SCALARS) * FLOAT32
    return (teacher.hidden if content == "hidden" else teacher.vocabulary) * teacher.item


def _per_token(student: _Side, teachers: list[_Side], settings: dict[str, Any]) -> float:
    """Return the bytes that one more token of a micro-batch takes on both sides, without the slots."""
    per_teacher = sum(t.hidden * t.item * 8 for t in teachers)
    logits = 0 if settings["student.blockwise_head"] else student.vocabulary * student.item * LOGITS_COPIES
    layers = 1 if settings["student.checkpoint_activations"] else ACTIVATIONS
    activations = student.hidden * student.item * (student.layers * layers + ACTIVATIONS)
    return per_teacher + logits + activations
