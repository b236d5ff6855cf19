"""Resolution of a RunSpec to a ResolvedRun: checks every file before a process starts. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xtoken_core.config.eval import EvalSpec
from xtoken_core.config.loss import DENSE_ONLY, PAIR_KINDS, PAIR_NAMES, READ_BY, LossConfig, LossMode
from xtoken_core.config.resolved import ResolvedModel, ResolvedRun, same_tokenizer_of
from xtoken_core.config.routing import Routes
from xtoken_core.config.spec import PAD_MULTIPLE, ModelSpec, RunSpec, TeacherSpec, padded_length
from xtoken_core.dataset import JoinedIndex, TextIndex
from xtoken_core.errors import ConfigError, InputError, XtokenError, os_errors_as
from xtoken_core.projection.fingerprint import file_fingerprint, is_sparse, tokenizer_fingerprint
from xtoken_core.regular_files import read_regular
from xtoken_core.tasks import read_prompts
from xtoken_services.common.batches.step_plan import ring_shape
from xtoken_services.common.files.allowed_paths import check_allowed, readable_roots
from xtoken_services.common.files.input_files import check_input_files, read_model_config
from xtoken_services.common.models.packable import why_not_packed
from xtoken_services.common.models.tensor_parallel import check_divided
from xtoken_services.common.models.weights import check_weights, served_fingerprint, weights_fingerprint
from xtoken_services.common.processes.run_code import check_isolation
from xtoken_services.common.run.metric_lines import finite
from xtoken_services.common.stores.store_records import check_stores
from xtoken_services.common.tables.pair_files import cache_of, check_projection_pair, check_special_tokens, pair_file
from xtoken_services.common.text.measured_text import measure_pieces
from xtoken_services.common.text.training_text import documents_of, open_index, open_scored, open_text
from xtoken_services.common.tokenizers.chat_templates import TEMPLATE_LIMIT, read_chat_template
from xtoken_services.common.tokenizers.vocabulary import has_chat_template, vocabulary_size

STUDENT_TOKEN_BYTES = 25  # id and mask int64, exact bool, chunk id int64
TEACHER_TOKEN_BYTES = 25
PAIR_BYTES = 2
ROW_BYTES = 128  # scalars and offsets
MOST_TOKENS = 1 << 30
"""Longest context that is believed of a configuration."""
MOST_PASSES = 4
"""Passes over a text up to which repeated records are about as good as new ones (Muennighoff et al., 2023,
https://arxiv.org/abs/2305.16264)."""
LEARNED_POSITIONS = ("opt", "gpt_neo", "xglm", "biogpt", "ctrl", "openai-gpt")
"""Model types with a learned table of `max_position_embeddings` positions, and none beyond."""
Progress = Callable[[str, float], None]
"""Takes what takes long, in words, and the part (0 to 1) of it that is done."""
READING = "reading the text"
WITHOUT_TEMPLATE = (
    " holds messages, but the {0}'s tokenizer has no chat template: it cannot take messages ({1}, perhaps a base "
    "model): set {0}.chat_template to a chat model's directory or a .jinja file, take a chat model, or write the "
    "records as text"
)


def resolve_run(spec: RunSpec, progress: Progress | None = None) -> ResolvedRun:
    """Check every file of a run, index its data and count its positions.

    Args:
        spec: The run.
        progress: Called several times a second while the training text is indexed for the first time, or a file about
            two tokenizers is built. It may raise to stop.

    Raises:
        InputError: A file is missing, unreadable or does not fit the others.
        ConfigError: Settings that only the files show to be impossible.
    """
    check_input_files(spec)
    student = _model("student", spec.student)
    teachers = tuple(_model(spec.teacher_name(i), teacher) for i, teacher in enumerate(spec.teacher))
    for number, teacher in enumerate(spec.teacher):
        if teacher.projection is not None:
            check_projection_pair(teacher.projection, spec.student.tokenizer_dir, teacher.tokenizer_dir)
            _check_projection_form(spec.teacher_key(number), teacher.projection, spec.loss.mode_of(number))
    same_tokenizer = same_tokenizer_of(spec, student, teachers)
    _check_teachers(spec, same_tokenizer)
    for number, teacher in enumerate(spec.teacher):
        if teacher.loads_model:
            name = spec.teacher_name(number)
            config = read_model_config(name, teacher.model)
            check_divided(name, teacher.model, config, teacher.gpus, quantized=teacher.quantized)
    obstacle = _obstacle_to_packing(spec)
    _writable(spec.output)
    index, piece_bytes = _training_text(spec, same_tokenizer, progress)
    records = len(index)
    held_out = _held_out(spec)
    mixture = _mixture_of(spec, index)
    pair_files = tuple(
        _pair_file(spec, number, student, files, progress, same_tokenizer=same)
        for number, (files, same) in enumerate(zip(teachers, same_tokenizer, strict=True))
    )
    resolved = ResolvedRun(
        spec=spec,
        student=student,
        teachers=teachers,
        pair_files=pair_files,
        projection_fingerprints=tuple(file_fingerprint(path) if path else "" for path in pair_files),
        data_fingerprint=index.fingerprint,
        held_out_fingerprint=held_out,
        records=records,
        positions=_positions(spec, sum(samples for _, samples in mixture) or records),
        mixture=mixture,
        piece_bytes=piece_bytes,
        packed=spec.train.packing != "off" and not obstacle,
        packing_obstacle=obstacle,
        routes=Routes.of(spec),
    )
    _check_signal(resolved)
    _check_memory(resolved)
    check_stores(resolved)
    return resolved


def _positions(spec: RunSpec, epoch: int) -> int:
    """Return the positions of a run whose epochs have so many.

    Raises:
        ConfigError: Its cold start leaves no step for completions.
    """
    positions, per_step = spec.data.epochs * epoch, spec.train.samples_per_step
    if spec.train.max_steps is not None:
        positions = min(positions, spec.train.max_steps * per_step)
    steps = -(-positions // per_step)
    if spec.rollout is not None and spec.rollout.steps_before(steps) >= steps:
        raise ConfigError(
            f"rollout.after = {spec.rollout.after:g} of {steps} steps leaves none for completions: lower it"
        )
    return positions


def _training_text(spec: RunSpec, same_tokenizer: Sequence[bool], progress: Progress | None) -> tuple[TextIndex, int]:
    """Return the records of a run, and the bytes of a piece at most; arguments as of `resolve_run`.

    Raises:
        InputError: There are no records, or a tokenizer cannot take them.
    """
    piece_bytes = measure_pieces(spec, same_tokenizer, reading(progress))
    index = open_text(spec, piece_bytes, reading(progress))
    if len(index) == 0:
        raise InputError(f"the training data is empty: {', '.join(map(str, spec.data.paths))}")
    _check_messages(spec, index, same_tokenizer)
    return index, piece_bytes


def _check_tasks(evaluation: EvalSpec, student: ModelSpec) -> None:
    """Refuse tasks that cannot be read, asked or judged.

    Raises:
        ConfigError: Code is not to be run, or cannot be isolated.
        InputError: A file is missing, a record in it is no prompt, or one has messages and the student no template.
    """
    if (tasks := evaluation.tasks) is None:
        return
    if tasks.run_code:
        check_isolation()
    for path in tasks.by_name.values():
        allowed = check_allowed(path, "eval.tasks.path")
        prompts = read_prompts(allowed, tasks.match, tasks.max_prompts, within=readable_roots())
        if any(prompt.messages for prompt in prompts) and not _takes_messages(student):
            raise InputError(f"{path}{WITHOUT_TEMPLATE.format('student', student.tokenizer_dir)}")
        if not tasks.run_code and any(prompt.match == "code" for prompt in prompts):
            raise ConfigError(
                f"{path} has programs to run (match = code): set eval.tasks.run_code = true if you trust this student "
                "and these tests with a process that can read your files"
            )


def _pair_file(
    spec: RunSpec,
    number: int,
    student: ResolvedModel,
    files: ResolvedModel,
    progress: Progress | None,
    *,
    same_tokenizer: bool,
) -> Path | None:
    """Return the file that a teacher's loss reads about the two tokenizers, built first if need be; None: none."""
    teacher, kind = spec.teacher[number], PAIR_KINDS.get(spec.loss.mode_of(number))
    if teacher.projection is not None and kind != "chain":
        check_special_tokens(spec.teacher_key(number), teacher)
        return teacher.projection
    fingerprints = student.tokenizer_fingerprint, files.tokenizer_fingerprint
    if kind is None or same_tokenizer:
        return None
    directories = spec.student.tokenizer_dir, teacher.tokenizer_dir
    name = spec.teacher_name(number)

    def report(done: float) -> None:
        if progress is not None:
            progress(f"building the {PAIR_NAMES[kind]} of the student's and {name}'s tokenizer", done)

    pairs = teacher.special_tokens
    return pair_file(cache_of(spec), kind, *directories, fingerprints, name, special_tokens=pairs, progress=report)


def _obstacle_to_packing(spec: RunSpec) -> str:
    """Return the first model that cannot be packed, with the reason; empty if all can, or none need be.

    Raises:
        ConfigError: It has to be.
    """
    if spec.train.packing == "off":
        return ""
    sides: list[tuple[str, ModelSpec]] = [("student", spec.student)]
    sides += [(spec.teacher_name(number), each) for number, each in enumerate(spec.teacher) if each.loads_model]
    for what, model in sides:
        reason = why_not_packed(read_model_config(what, model.model), model.context_length)
        if reason is None:
            continue
        obstacle = f"the {what} ({model.model}) cannot be packed: {reason}"
        if spec.train.packing == "on":
            raise ConfigError(f'train.packing = "on": {obstacle}: set it to "auto" or "off", which pad every row')
        return obstacle
    return ""


def _check_projection_form(table: str, file: Path, mode: LossMode) -> None:
    """Refuse a sparse projection for a loss that reads rows of weights.

    Raises:
        ConfigError: It is sparse.
    """
    if mode in DENSE_ONLY and is_sparse(file):
        raise ConfigError(
            f'{table}.projection: {file} is sparse, loss.mode = "{mode}" takes a dense top-k file: build one '
            "with xtoken projection build"
        )


def _held_out(spec: RunSpec) -> str:
    """Check what evaluations read; return the fingerprint of the held-out text, empty without an evaluation."""
    if spec.eval is None:
        return ""
    fingerprint = open_scored(spec).fingerprint
    for path in spec.eval.also_by_name.values():
        open_index(spec, [path], spec.eval.field)
    _check_tasks(spec.eval, spec.student)
    return fingerprint


def file_warnings(run: ResolvedRun) -> Iterator[str]:
    """Yield warnings that follow from the run's files, one line each."""
    train, data = run.spec.train, run.spec.data
    if train.max_steps is not None and run.steps < train.max_steps:
        yield (
            f"the run has {run.steps} steps, not train.max_steps = {train.max_steps}: its text has {run.records} "
            f"records (data.epochs = {data.epochs})"
        )
    several = run.spec.rollout.completions if run.spec.rollout is not None else 1
    again = run.prompts.before(run.steps) * (several - 1) // several  # further completions of a prompt
    for number, (records, samples) in enumerate(run.mixture):
        passes = (run.positions - again) * samples / (run.epoch * records)
        if passes > MOST_PASSES:
            yield f"data.sources.{number}: its {records} records are read {passes:.0f} times"
    if run.spec.eval is not None and not run.spec.holds_back and (same := _trained_on(run.spec)):
        yield f"{same} is also training text: bits per byte of it say nothing about other text"
    if data.long == "split" and not run.piece_bytes:
        yield 'data.long = "split" does nothing: no record of the text is plain text'
    if run.packing_obstacle:
        yield f"rows are padded, which costs time: {run.packing_obstacle}"
    yield from _without_effect(run)
    cold = run.restart[0] if run.restart is not None else 0
    what, steps = ("run", run.steps) if not cold else ("shorter schedule of rollout.after", min(cold, run.steps - cold))
    if train.warmup_steps > steps:
        yield f"the {what} ends after {steps} steps, its warm-up would after train.warmup_steps = {train.warmup_steps}"


def _trained_on(spec: RunSpec) -> str:
    """Return the name of an evaluation's text that a run trains on, as a file or as the same content; or nothing."""
    assert spec.eval is not None
    trained = list(documents_of(spec))
    digests = {index.fingerprint for index in trained}
    files = {path for text in spec.data.texts for path in text.paths}
    texts = {"eval.path": spec.eval.paths, **{f"eval.also {name}": (p,) for name, p in spec.eval.also_by_name.items()}}
    for name, paths in texts.items():
        same = open_index(spec, paths, spec.eval.field).fingerprint in digests
        if same or not files.isdisjoint(paths):
            return name
    return ""


def _without_effect(run: ResolvedRun) -> Iterator[str]:
    """Yield settings that have no effect beside others."""
    train = run.spec.train
    for number, teacher in enumerate(run.spec.teacher):
        if teacher.projection is not None and run.pair_file(number) != teacher.projection:
            key, mode = run.spec.teacher_key(number), run.spec.loss.mode_of(number)
            yield f'{key}.projection is not read by loss.mode = "{mode}"'
    yield from _unread_loss_settings(run)
    if train.parallel == "fsdp" and run.world == 1:
        yield 'train.parallel = "fsdp" does nothing for a single rank (workers.ranks, workers.nodes)'
    if train.parallel != "fsdp" and (not train.reshard_after_forward or train.reduce_dtype != "float32"):
        yield 'train.reshard_after_forward and train.reduce_dtype do nothing without train.parallel = "fsdp"'
    if train.min_learning_rate > train.learning_rate:
        yield f"train.min_learning_rate = {train.min_learning_rate:g} is above train.learning_rate: it stays there"


def _unread_loss_settings(run: ResolvedRun) -> Iterator[str]:
    """Yield settings of the loss that differ from their defaults and that no teacher's mode reads."""
    loss = run.spec.loss
    modes = {loss.mode_of(number) for number in range(len(run.teachers)) if not run.same_tokenizer[number]}
    if not run.teachers or "custom" in modes:
        return
    compared: list[str] = sorted(modes) or ["a teacher with the student's tokenizer"]
    for name, readers in READ_BY.items():
        by_token = name == "vocab_topk" and any(run.same_tokenizer)
        is_read = by_token or not modes.isdisjoint(readers)
        if not is_read and getattr(loss, name) != LossConfig.model_fields[name].default:
            yield f"loss.{name} is not read by {' and '.join(compared)}"


def reading(progress: Progress | None) -> Callable[[int, int], None] | None:
    """Return the callback to which an index reports bytes read and bytes in all; None: none."""
    return None if progress is None else lambda done, total: progress(READING, done / max(total, 1))


def largest_row(spec: RunSpec) -> int:
    """Return the bytes of the largest row that a collator can put."""
    student = spec.student.context_length
    sides = sum(t.context_length * TEACHER_TOKEN_BYTES + student * PAIR_BYTES + student * 9 for t in spec.teacher)
    return student * STUDENT_TOKEN_BYTES + sides + ROW_BYTES


def _check_messages(spec: RunSpec, index: TextIndex, same_tokenizer: Sequence[bool]) -> None:
    """Refuse a file that begins with messages where a tokenizer cannot take them: each of its records would be bad."""
    sides: list[tuple[str, ModelSpec]] = [("student", spec.student)]
    sides += [(spec.teacher_key(n), each) for n, each in enumerate(spec.teacher) if not same_tokenizer[n]]
    without = [(key, side.tokenizer_dir) for key, side in sides if not _takes_messages(side)]
    if without and (location := index.first_conversation()) is not None:
        key, directory = without[0]
        raise InputError(f"{location}{WITHOUT_TEMPLATE.format(key, directory)}")


def _takes_messages(side: ModelSpec) -> bool:
    return side.chat_template is not None or has_chat_template(side.tokenizer_dir)


def _template_fingerprint(what: str, spec: ModelSpec) -> str:
    """Return the SHA-256 of the chat template that a model's settings name; empty without one."""
    if spec.chat_template is None:
        return ""
    template = read_chat_template(check_allowed(spec.chat_template, f"the {what}'s chat template"))
    return hashlib.sha256(template.encode()).hexdigest()


def prompt_of(what: str, spec: ModelSpec) -> str:
    """Return the text that a teacher reads before every other; empty without it.

    Raises:
        InputError: The file cannot be read.
    """
    prompt = spec.prompt if isinstance(spec, TeacherSpec) else None
    if not isinstance(prompt, dict):
        return prompt or ""
    path = check_allowed(prompt["file"], f"the {what}'s prompt")
    try:
        return read_regular(path, TEMPLATE_LIMIT).decode("utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the {what}'s prompt {path}: {error}") from error


def _check_signal(resolved: ResolvedRun) -> None:
    spec = resolved.spec
    for number, teacher in enumerate(resolved.teachers):
        if spec.content_of(number) == "hidden" and not teacher.hidden_size:
            raise ConfigError(
                f'{spec.teacher_key(number)}.content = "hidden": {spec.teacher[number].model / "config.json"} names no '
                'hidden_size: let the teacher send logits (teacher.content = "logits" or "topk")'
            )


def _check_memory(resolved: ResolvedRun) -> None:
    spec = resolved.spec
    rows, signals = resolved.span // spec.workers.nodes * largest_row(spec), 0
    if spec.workers.transport == "queue":
        shapes = [ring_shape(resolved, number) for number in range(len(spec.teacher))]
        signals = spec.workers.ranks * sum(shape.slots * shape.slot_bytes for shape in shapes)
    if rows + signals > spec.queue.memory_limit:
        slots = f"workers.slots = {spec.workers.slots}"
        if spec.ring_slots > spec.workers.slots:
            slots = f"{spec.ring_slots} slots: select_teacher holds a step's signals at once"
        through = f" and {signals} bytes of signals ({slots})" if signals else ""
        raise ConfigError(
            f"queue.memory_limit = {spec.queue.memory_limit} bytes cannot hold queue.span_steps = "
            f"{spec.queue.span_steps} steps of {spec.train.samples_per_step} samples{through}: {rows + signals} bytes "
            "are needed"
        )


def _model(what: str, spec: ModelSpec) -> ResolvedModel:
    config = read_model_config(what, spec.model)
    text = config.get("text_config", config)
    width = text.get("vocab_size") if isinstance(text, dict) else None
    if not isinstance(width, int):
        raise InputError(f"{spec.model / 'config.json'} of the {what} names no vocab_size")
    served = spec if isinstance(spec, TeacherSpec) and spec.url else None
    if served is None:
        check_weights(what, spec.model)
    vocabulary = vocabulary_size(spec.tokenizer_dir)
    if width < vocabulary:
        raise InputError(
            f"the {what}'s head has {width} rows, its tokenizer {spec.tokenizer_dir} has {vocabulary} ids: "
            "they do not belong together"
        )
    _check_context(what, spec, text)
    fingerprint = tokenizer_fingerprint(spec.tokenizer_dir)
    hidden = text.get("hidden_size", text.get("n_embd"))
    return ResolvedModel(
        vocab_size=vocabulary,
        head_width=width,
        tokenizer_fingerprint=fingerprint,
        hidden_size=hidden if isinstance(hidden, int) else 0,
        weights_fingerprint=served_fingerprint(served) if served else weights_fingerprint(spec.model),
        template_fingerprint=_template_fingerprint(what, spec),
        prompt=prompt_of(what, spec),
    )


def _check_context(what: str, spec: ModelSpec, config: dict[str, Any]) -> None:
    """Refuse a context longer than what a model was made for, as far as its configuration says that.

    Raises:
        ConfigError: It is, or the model has no positions for the padding.
    """
    learned = config.get("n_positions")
    longest = learned if learned is not None else config.get("max_position_embeddings")
    if not isinstance(longest, int):
        return
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(scaling, dict):  # YaRN and others: a factor of the length before
        numbers = finite(scaling)
        before = numbers.get("original_max_position_embeddings", longest)
        longest = max(longest, min(MOST_TOKENS, int(numbers.get("factor", 1) * before)))
    has_no_more = learned is not None or config.get("model_type") in LEARNED_POSITIONS
    if has_no_more and padded_length(spec.context_length) > longest:
        most = longest // PAD_MULTIPLE * PAD_MULTIPLE
        raise ConfigError(
            f"the {what}'s context_length = {spec.context_length}: {spec.model} has {longest} positions, and rows are "
            f"padded to a multiple of {PAD_MULTIPLE}: lower it to {most}"
        )
    if spec.context_length > longest:
        raise ConfigError(
            f"the {what}'s context_length = {spec.context_length}: {spec.model} was made for {longest} tokens: lower it"
        )


def _writable(output: Path) -> None:
    with os_errors_as(XtokenError, f"cannot make the output directory {output}"):
        output.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(output, os.W_OK | os.X_OK):
        raise XtokenError(f"cannot write into the output directory {output}")


def _check_teachers(spec: RunSpec, same_tokenizer: Sequence[bool]) -> None:
    """Refuse settings of the loss that these teachers' tokenizers make impossible.

    Raises:
        ConfigError: With the reason and what to change.
    """
    try:
        spec.loss.check_teachers([t.weight for t in spec.teacher], same_tokenizer)
        for number, same in enumerate(same_tokenizer):
            if same:
                _check_same_tokenizer(spec, number)
        spec.loss.check_topk([t.content == "topk" for t in spec.teacher], same_tokenizer)
    except ValueError as error:
        raise ConfigError(f"loss: {error}") from error


def _check_same_tokenizer(spec: RunSpec, number: int) -> None:
    """Refuse settings that a teacher with the student's tokenizer cannot have, as it reads the student's tokens.

    Raises:
        ValueError: With the setting.
    """
    teacher, length = spec.teacher[number], spec.student.context_length
    if teacher.special_tokens:
        raise ValueError(
            f"{spec.teacher_key(number)}.special_tokens: this teacher has the student's tokenizer: unset it"
        )
    if teacher.context_length < length:
        raise ValueError(
            f"{spec.teacher_key(number)}.context_length = {teacher.context_length}: this teacher has the student's "
            f"tokenizer and reads the student's tokens, up to {length} (student.context_length): make it at least as "
            "long, or lower student.context_length"
        )


def _mixture_of(spec: RunSpec, index: TextIndex) -> tuple[tuple[int, int], ...]:
    """Return per source of weighted texts its records and its samples in an epoch; empty without weights."""
    if not isinstance(index, JoinedIndex):
        return ()
    records = tuple(map(len, index.parts))
    return tuple(zip(records, spec.data.samples_per_epoch(records), strict=False))
