"""RunSpec: the settings of a run, read from TOML."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from xtoken_core.config.base import ConfigModel, OrNone, absolute_path, teacher_name
from xtoken_core.config.data import DataSpec
from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.loss import LossConfig, Positive
from xtoken_core.config.rollout import LEARNING_RATE, TEACHER_TEMPERATURE, RolloutSpec, check_rollout, loss_defaults
from xtoken_core.config.routing import Routes, check_routes
from xtoken_core.config.self_teacher import check_sync, is_student, with_teachers
from xtoken_core.config.served import ServedSpec, check_served, check_waiting
from xtoken_core.config.train import ReportSpec, TrainSpec
from xtoken_core.config.validation_errors import describe
from xtoken_core.config.workers import Content, QueueSpec, RaySpec, WorkersSpec, check_content, check_placement
from xtoken_core.errors import ConfigError, InputError

Dtype = Literal["float32", "bfloat16", "float16"]
Quantized = Literal["fp8", "nf4"]
PromptFile = dict[Literal["file"], Path]
PAD_MULTIPLE = 8
"""Padded lengths are rounded up to a multiple of this."""
MAX_SLOTS = 1024
"""Maximum of slots of a ring in the queue's messages."""
DEFAULT_TOPK = 64
"""Tokens of a position that a teacher with `content = "topk"` sends."""
CROSS_ENTROPY_ONLY = {"kl_loss_weight": 0.0, "ce_loss_scale": 1.0}


def _student_teaches(run: Mapping[str, Any]) -> bool:
    """Return whether the student is one of the teachers of a run that is not parsed yet."""
    student = run.get("student")
    model = student.get("model") if isinstance(student, dict) else None
    return any(isinstance(teacher, dict) and is_student(teacher, model) for teacher in run.get("teacher") or ())


def padded_length(length: int) -> int:
    """Return the length rounded up to the padding's multiple."""
    return -(-length // PAD_MULTIPLE) * PAD_MULTIPLE


class ModelSpec(ConfigModel):
    """A causal language model: a Hugging Face directory."""

    model: Path
    """The model's directory: `config.json` and `.safetensors` weights. `xtoken run` also takes its id on the Hugging
    Face Hub, `org/name` or `org/name@revision`, and a `.gguf` file."""
    tokenizer: Path | None = None
    """The tokenizer's directory, or its id likewise; default: the model's."""
    chat_template: Path | None = None
    """Template that renders records with `messages`, in place of the tokenizer's own: a file with a Jinja template, or
    the directory of a chat model whose template this side borrows. A teacher with the student's tokenizer reads the
    student's rows."""
    dtype: Dtype = "float32"
    """Dtype of the forward pass."""
    context_length: Annotated[int, Field(ge=2)]
    """Maximum of tokens per document; longer ones are truncated."""

    @property
    def tokenizer_dir(self) -> Path:
        """Directory from which the tokenizer is read."""
        return self.tokenizer or self.model


class StudentSpec(ModelSpec):
    """The model that is trained."""

    export_dtype: Dtype | None = None
    """Dtype of the exported weights. Left out: `dtype`, or that of the model's own `config.json` if it is narrower."""
    compile: bool = False
    """Compile its layers with `torch.compile`: worth it for more than a few hundred steps."""
    checkpoint_activations: bool = False
    """Compute every layer's activations again in the backward pass instead of keeping them: less memory, a third more
    arithmetic."""
    blockwise_head: bool = False
    """Multiply the head for a block of positions at a time, loss and gradient included, instead of holding the logits
    of a whole micro-batch: less memory. For heads without a scale or cap behind them."""


class TeacherSpec(ModelSpec, ServedSpec):
    """A teacher. One with the student's tokenizer, by its fingerprint, is compared token by token."""

    model: Path
    """As of the student; or `"student"`: the student's own first weights."""
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = None
    """Name by which texts (`data.sources`, `teachers`) and records (field `teacher`) choose it. Samples that choose
    none are compared with all teachers."""
    prompt: Annotated[str | PromptFile, Field(min_length=1)] | None = None
    """What only this teacher reads before every text, such as solved examples: the text, or `{ file = "PATH" }`. A
    record's `teacher_prefix` follows it,
    or stands where the prompt has `{teacher_prefix}`. With `messages` it is a system message of the teacher's own. A
    teacher with a prompt is compared chunk by chunk, also with the student's tokenizer. It is measured on held-out text
    without it."""
    sync: Literal["ema"] | None = None
    """`model = "student"`: `ema` makes its weights an exponential moving average of the student's. Left out, they are
    the first ones."""
    sync_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """`ema`: the part of the average that a step keeps. Left out: 0.99."""
    projection: Path | None = None
    """Projection file for this student and teacher (`xtoken projection build`); default: modes that read one build it
    when the run starts, and keep it in the user's cache."""
    special_tokens: dict[str, str] = Field({})
    """Special tokens of the student with their partners of this teacher, such as `{"<|user|>" = "<start_of_turn>"}`;
    an empty name: none. Alignment, projection and chain tables pair them in place of tokens of the same name, or, in a
    projection, of the same meaning. Beginning and end of text pair by themselves."""
    weight: Positive = 1.0
    """Its weight in the sum over teachers."""
    gpu: Annotated[int | None, Field(ge=0)] = None
    """GPU index: rank r's teacher is on this index plus r, modulo the number of GPUs. Default: its student's GPU."""
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs over which its weights are divided, by transformers' tensor-parallel plan for its family: one process per
    GPU. Rank r's teacher takes this many GPUs from `gpu` (default: 0) plus r times this number on; there must be that
    many. On CPUs: as many processes."""
    compile: bool = False
    """Compile its layers with `torch.compile`: worth it for more than a few hundred steps."""
    quantized: Quantized | None = None
    """Format of the weights of its linear layers; the head keeps its dtype. `fp8`: they are stored and multiplied in
    float8, scaled by row; needs a GPU of the Ada or Hopper generation or newer. `nf4`: they are stored in NormalFloat
    4, scaled by blocks of 64, and multiplied in its dtype; needs the extra `bitsandbytes`, on a GPU or a CPU."""
    content: Content | None = None
    """What it sends of a micro-batch: `logits`; `hidden`, its hidden states, with the head once; `topk`, the largest
    logits of each position, its log-normaliser and the log-probability of the text's own token. Left out: `topk` with
    `url`, `hidden` with the transport `queue`, else `logits`."""
    topk: Annotated[int, Field(ge=1)] = DEFAULT_TOPK
    """`topk`: maximum of tokens that it sends of a position."""
    store: str | None = None
    """Directory, or `fsspec` address such as `s3://bucket/name`, of its stored output (`xtoken store build`), which its
    process reads instead of running it. `content` must be what the store holds; left out, it is `hidden`."""
    store_missing: Literal["fail", "skip", "compute"] = "fail"
    """A record that the store does not have, or that is damaged: `fail` ends the run, `skip` skips the sample and
    counts it, `compute` runs the teacher over such records before the run starts, and adds them to the store. A control
    plane does not take `compute`."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_file(cls, value: Any) -> Any:
        file = value.get("file") if isinstance(value, dict) and len(value) == 1 else value
        if value is not None and not isinstance(file, (str, Path)):
            raise ValueError('it takes a text, or { file = "PATH" }')
        return value

    @model_validator(mode="before")
    @classmethod
    def _content_of_url(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("url") and value.get("content") is None:
            return {**value, "content": "topk"}
        return value

    @model_validator(mode="after")
    def _refuse_impossible(self) -> TeacherSpec:
        if self.content != "topk" and self.topk != DEFAULT_TOPK:
            raise ValueError('topk belongs to content = "topk": set that or unset topk')
        if self.url and self.content not in (None, "topk"):
            raise ValueError(f'content = "{self.content}": a server (url) gives the likeliest tokens: set it to "topk"')
        for name in ("gpu", "gpus", "compile", "quantized"):
            if self.url and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to a model that the run loads, and url names a server: unset one")
        if self.gpus > 1 and self.compile:
            raise ValueError(f"compile = true is for a teacher on one GPU, and gpus = {self.gpus}: set it to false")
        if self.gpus > 1 and self.store is not None:
            raise ValueError("gpus belongs to a teacher that runs, and this one is read from a store: unset gpus")
        if self.store is None and self.store_missing != "fail":
            raise ValueError("store_missing belongs to a store: set store or unset store_missing")
        if self.store is not None and self.content == "logits":
            raise ValueError('store: whole logits are not stored: set content to "hidden" or "topk"')
        return self

    @property
    def loads_model(self) -> bool:
        """True if its process computes: no server does, and no store has its output."""
        return not self.url and self.store is None

    def gpu_index(self, rank: int, part: int = 0) -> int:
        """Return the number of the GPU of a part of a rank's teacher; it may be beyond the last one there is."""
        if self.gpus == 1:
            return rank if self.gpu is None else self.gpu + rank
        return (self.gpu or 0) + rank * self.gpus + part


class RunSpec(ConfigModel):
    """One distillation run. Paths are relative to the run file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "run"
    """Letters, digits, `.`, `_` and `-`; names the run's partition in the queue and the model card."""
    output: Path
    """The directory the run writes: checkpoints, logs, curves, the exported model."""
    push_to: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")] = None
    """Model repository on the Hugging Face Hub, `org/name`, to which the model is pushed when the run ends; a new one
    is private. The token is read from the environment, `HF_TOKEN`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the data order, dropout and everything else random."""
    student: StudentSpec
    teacher: tuple[TeacherSpec, ...] = ()
    """One or several teachers; without any, the student is trained on the text by cross-entropy alone."""
    data: DataSpec
    eval: OrNone[EvalSpec] = None
    rollout: RolloutSpec | None = None
    loss: LossConfig = LossConfig()
    train: TrainSpec = TrainSpec()
    report: ReportSpec = ReportSpec()
    queue: QueueSpec = QueueSpec()
    workers: WorkersSpec = WorkersSpec()
    ray: RaySpec = RaySpec()
    hub: dict[str, str] = Field({})
    """Commits of the Hub's models (`org/name`, `org/name@revision`) and texts (`datasets/org/name`) that the run uses;
    the first start fills it in, and later ones use the same."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_loss(cls, value: Any) -> Any:
        given = value.get("loss", {}) if isinstance(value, dict) else None
        if isinstance(given, LossConfig):  # one made in Python means what a run file with its settings does
            given = {name: getattr(given, name) for name in given.model_fields_set}
        if not isinstance(given, dict):
            return value
        defaults = {} if value.get("rollout") is None else loss_defaults(given)
        if _student_teaches(value):
            defaults = {"kl_loss_weight_end": None} | defaults  # it is not measured as it teaches
        return {**value, "loss": {**(defaults if value.get("teacher") else CROSS_ENTROPY_ONLY), **given}}

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_completions(cls, value: Any) -> Any:
        rollout, given = (value.get("rollout"), value.get("train", {})) if isinstance(value, dict) else (None, None)
        if isinstance(rollout, RolloutSpec):
            rollout = {name: getattr(rollout, name) for name in rollout.model_fields_set}
        if not isinstance(rollout, dict):
            return value
        teachers = [t if isinstance(t, dict) else getattr(t, "__dict__", {}) for t in value.get("teacher") or ()]
        if not any(teacher.get("url") for teacher in teachers) and not _student_teaches(value):
            rollout = {"teacher_temperature": TEACHER_TEMPERATURE} | rollout
        if not rollout.get("after") and isinstance(given, dict):
            value = {**value, "train": {"learning_rate": LEARNING_RATE} | given}
        return {**value, "rollout": rollout}

    @model_validator(mode="before")  # the last one is the first to run
    @classmethod
    def _list_of_teachers(cls, value: Any) -> Any:
        return with_teachers(value) if isinstance(value, dict) and "teacher" in value else value

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        if not self.teacher:
            check_without_teachers(self.loss)
        if self.train.micro_batch_tokens < self._longest:
            sides = [("student", self.student), *((self.teacher_key(n), side) for n, side in enumerate(self.teacher))]
            name, side = max(sides, key=lambda each: each[1].context_length)
            raise ValueError(
                f"train.micro_batch_tokens = {self.train.micro_batch_tokens} cannot hold one sample of "
                f"{name}.context_length = {side.context_length}, padded: lower this one, at most to what the model was "
                "made for, or raise the other"
            )
        block, step, nodes = self.queue.block_size, self.train.samples_per_step, self.workers.nodes
        if step % nodes:
            raise ValueError(f"workers.nodes = {nodes} must divide train.samples_per_step = {step}")
        if block is not None and step // nodes % block:
            share = f" / workers.nodes = {nodes}" if nodes > 1 else ""
            raise ValueError(f"queue.block_size = {block} must divide train.samples_per_step = {step}{share}")
        if self.ring_slots > MAX_SLOTS:
            raise ValueError(
                f'loss.teacher_aggregation = "select_teacher" holds a step\'s signals at once, here in '
                f"{self.ring_slots} slots of a ring, which may have {MAX_SLOTS}: raise train.micro_batch_tokens or "
                "lower train.samples_per_step"
            )
        check_placement(self.workers)
        check_content(self.workers, [teacher.content for teacher in self.teacher])
        if self.student.dtype == "float16":
            raise ValueError(
                "student.dtype: a student is not trained in float16, where gradients this small vanish: use bfloat16"
            )
        if self.holds_back and self.data.sources:
            raise ValueError("eval.path: text is held back of a single data.path only, not of data.sources: name one")
        check_served(self.loss, self.teacher)
        served = {f"teacher.{number}": teacher for number, teacher in enumerate(self.teacher)}
        check_waiting({**served, "rollout": self.rollout}, self.workers.hang_timeout_s)
        for n, teacher in enumerate(self.teacher):
            if teacher.quantized == "fp8" and self.workers.device == "cpu":
                raise ValueError(f'teacher.{n}.quantized = "fp8" needs a GPU, and workers.device is "cpu": unset it')
        self.loss.check_weights([t.weight for t in self.teacher])
        check_routes(self)
        check_sync(self)
        if self.rollout is not None and self.data.long == "split":
            raise ValueError('data.long = "split" divides texts, and [rollout] takes them as prompts: set it to "cut"')
        if self.rollout is not None:
            check_rollout(self.rollout, self)
        else:
            self.loss.check_given_text()
        return self

    def teacher_name(self, number: int) -> str:
        """Return a teacher as messages name it: with its number if there are several."""
        return teacher_name(number, len(self.teacher))

    def teacher_key(self, number: int) -> str:
        """Return a teacher's table as messages name it: with its number if there are several."""
        return f"teacher.{number}" if len(self.teacher) > 1 else "teacher"

    def content_of(self, teacher: int) -> Content:
        """Return the kind of signal that a teacher sends."""
        hidden = self.workers.transport == "queue" or self.teacher[teacher].store is not None
        return self.teacher[teacher].content or ("hidden" if hidden else "logits")

    @property
    def sync_decays(self) -> dict[int, float]:
        """Per teacher whose weights move the part of their average that a step keeps."""
        return {number: teacher.sync_decay or 0.99 for number, teacher in enumerate(self.teacher) if teacher.sync}

    @property
    def holds_back(self) -> bool:
        """True if the held-out text is a part of `data.path`, on which the run is not trained."""
        return self.eval is not None and self.eval.path == ()

    def fills_on_host(self, teacher: int) -> bool:
        """Return whether a teacher's ring is in memory of the host even on a GPU run: a store is read there."""
        return self.teacher[teacher].store is not None and self.workers.transport != "cuda_ipc"

    @property
    def teacher_processes(self) -> int:
        """Processes of a node group's teachers that take a part of the cores: one per GPU of each, for every rank.

        Readers of stores wait for the trainer most of the time, and take no part.
        """
        return self.workers.ranks * sum(teacher.gpus for teacher in self.teacher if teacher.store is None)

    @property
    def gpus_needed(self) -> int:
        """GPUs of a node group: one per rank, and those over which teachers are divided."""
        ranks = self.workers.ranks
        divided = (teacher for teacher in self.teacher if teacher.gpus > 1)
        return max([ranks, *(teacher.gpu_index(ranks - 1, teacher.gpus - 1) + 1 for teacher in divided)])

    def rollout_gpu(self, worker: int) -> int:
        """Return a rollout worker's GPU, before it is taken modulo their number: the students' come first."""
        return self.workers.ranks + worker

    @property
    def ring_slots(self) -> int:
        """Slots of every ring: as far as a teacher may be ahead, and what a trainer holds before it releases the first.

        That is one micro-batch; with `select_teacher` all of a step. A micro-batch is closed only where another row may
        not fit, so the number of rows that fit at full length bounds how many there are.
        """
        if self.loss.teacher_aggregation != "select_teacher":
            return self.workers.slots
        rows = self.train.samples_per_step // self.workers.nodes
        batches = math.ceil(rows / (self.train.micro_batch_tokens // self._longest))
        # Each route fills up its own micro-batches: a source's teachers, one that a record names, or all.
        routes = 1 if Routes.of(self) is None else min(rows, 1 + len(self.data.sources) + len(self.teacher))
        return self.workers.slots + math.ceil(batches / self.workers.ranks) - 2 + routes

    @property
    def _longest(self) -> int:
        return max(padded_length(model.context_length) for model in (self.student, *self.teacher))

    @property
    def block_size(self) -> int:
        """Positions that a collator or rollout worker leases at once."""
        share = self.train.samples_per_step // self.workers.nodes
        parts = math.gcd(share, *self.prompts_per_step)
        unit = 1 if self.rollout is None else self.rollout.completions
        sizes = range(unit, max(unit, 16) + 1, unit)
        return self.queue.block_size or max((size for size in sizes if parts % size == 0), default=1)

    @property
    def prompts_per_step(self) -> tuple[int, int]:
        """Prompts of the first step that has some and of the last one; zeros without `[rollout]`."""
        return (0, 0) if self.rollout is None else self.rollout.prompts_of(self.train.samples_per_step)

    @property
    def has_text(self) -> bool:
        """True if some samples of the run are ordinary text."""
        return self.rollout is None or self.rollout.has_text

    def with_base(self, base: Path) -> RunSpec:
        """Return the run with every relative path made absolute against `base`."""
        document = _absolute(self.model_dump(), base)
        for teacher in document["teacher"]:
            if teacher["store"] is not None and "://" not in teacher["store"]:
                teacher["store"] = str(_absolute(Path(teacher["store"]), base))
        return RunSpec.model_validate(document)


def _absolute(value: Any, base: Path) -> Any:
    if isinstance(value, Path):
        return absolute_path(value, base)
    if isinstance(value, dict):
        return {key: _absolute(item, base) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_absolute(item, base) for item in value)
    return value


def read_run_file(path: Path) -> dict[str, Any]:
    """Read a run file's tables as they are written.

    Raises:
        InputError: The file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the run file {path}: {error.strerror}") from error
    except RecursionError as error:
        raise InputError(f"{path} is not TOML: nested too deeply") from error
    except ValueError as error:  # not TOML, not UTF-8, a number of thousands of digits
        raise InputError(f"{path} is not TOML: {error}") from error


def load_run_spec(path: Path) -> RunSpec:
    """Read a RunSpec from TOML.

    Raises:
        InputError: The file is missing or is not TOML.
        ConfigError: A field is missing, unknown or impossible; the text names it and what it takes.
    """
    return parse_run_spec(read_run_file(path), source=str(path)).with_base(path.resolve().parent)


def parse_run_spec(raw: object, *, source: str) -> RunSpec:
    """Check a RunSpec given as plain values.

    Raises:
        ConfigError: as `load_run_spec`.
    """
    try:
        return RunSpec.model_validate(raw)
    except ValidationError as error:
        text, teachers = describe(error, RunSpec), raw.get("teacher") if isinstance(raw, dict) else None
        if not isinstance(teachers, (list, tuple)) or len(teachers) < 2:  # as `RunSpec.teacher_key`
            text = re.sub(r"(?<![\w./-])teacher\.0(?=[.: ])", "teacher", text)  # not in a path
        raise ConfigError(f"{source}: {text}") from error


def check_without_teachers(loss: LossConfig) -> None:
    """Refuse settings that compare with a teacher in a run that has none.

    Raises:
        ValueError: The first of them.
    """
    mode = loss.mode if loss.mode == "p_kl" else "chain"  # neither names anything about a teacher
    plain = LossConfig.model_validate({**CROSS_ENTROPY_ONLY, "mode": mode, "ce_loss_scale": loss.ce_loss_scale})
    given = {name: getattr(loss, name) for name in LossConfig.model_fields}
    if not given["kl_loss_weight_end"]:  # as much as the default, where nothing is weighed
        del given["kl_loss_weight_end"]
    other = next((name for name, value in given.items() if value != getattr(plain, name)), None)
    if other:
        raise ValueError(f"loss.{other} compares with a teacher, and this run has none: unset it, or name a [teacher]")
