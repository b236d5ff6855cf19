"""A run's teacher, ready to fill slots: its model, perhaps divided, its servers, or its store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext

import torch

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.batches.step_plan import topk_settings
from xtoken_services.common.http_engine.factory import open_engine
from xtoken_services.common.run.memory_estimate import check_room
from xtoken_services.common.tokenizers.loading import pad_id, tokenizer_of
from xtoken_services.teacher.base import Teacher
from xtoken_services.teacher.prepare import devices_of, prepared_model
from xtoken_services.teacher.served import ServedTeacher, check_servers
from xtoken_services.teacher.shards import send_tokens, started_shards
from xtoken_services.teacher.stored import StoredTeacher

log = logging.getLogger("xtoken.teacher")


@contextmanager
def opened_teacher(
    run: ResolvedRun, teacher: int, rank: int, report: Callable[[str], None], transport: str = ""
) -> Iterator[Teacher]:
    """Open a teacher for one rank, and close it with the context.

    Args:
        run: The run.
        teacher: Number of the teacher.
        rank: The rank.
        report: Called with what the teacher waits for, or an empty text; what it raises ends the wait.
        transport: Transport of its signal; empty without a ring.

    Raises:
        ConfigError: It does not fit its device, or a setting needs what is not there.
        InputError: A model, a tokenizer or a store cannot be read, or its head is not as wide as its settings say.
        EngineError: No server answers in time.
        EngineRefusalError: A server runs another model, or cannot give what the loss needs.
    """
    settings, files = run.spec.teacher[teacher], run.teachers[teacher]
    devices = devices_of(run.spec, teacher, rank)
    divided = len(devices) > 1 and settings.loads_model
    with started_shards(run, teacher, devices) if divided else nullcontext():
        made: Teacher
        if settings.store is not None:
            report("opening the store")
            made, source = StoredTeacher(run, teacher, devices[0]), f"the store {settings.store}"
        elif settings.url:
            report("checking the servers")
            made, source = _served(run, teacher, rank), f"the servers {', '.join(settings.url)}"
        else:
            report("loading the model")
            made = model = prepared_model(run, teacher, devices[0], transport)
            model.before_forward = send_tokens if divided else None
            made.tokenizer = tokenizer_of(settings, run.spec.teacher_name(teacher))
            made.pad_id = pad_id(made.tokenizer)
            source = str(settings.model)
        made.name, made.report = run.spec.teacher_name(teacher), report
        with closing(made), torch.inference_mode():
            if made.head_width != files.head_width:
                raise InputError(
                    f"{made.name}: the head of {settings.model} has {made.head_width} rows, its config.json says "
                    f"{files.head_width}"
                )
            if run.spec.content_of(teacher) == "hidden" and not made.plain_head:
                raise ConfigError(
                    f'{run.spec.teacher_key(teacher)}.content = "hidden": the logits of {settings.model} are not just '
                    'hidden states times head: let it send logits (teacher.content = "logits" or "topk")'
                )
            report("")
            log.info("%s loaded from %s on %s", made.name, source, " and ".join(map(str, devices)))
            yield made


def _served(run: ResolvedRun, teacher: int, rank: int) -> ServedTeacher:
    """Return a teacher that another program computes, once its servers have been checked."""
    spec, settings = run.spec, run.spec.teacher[teacher]
    (device,) = devices_of(spec, teacher, rank)
    check_room(run, device)
    tokenizer = tokenizer_of(settings, spec.teacher_name(teacher))
    text = TextTokenizer(tokenizer, spec.teacher_name(teacher))
    engine = open_engine(settings, spec.teacher_key(teacher), run.teachers[teacher].vocab_size)
    model = ServedTeacher(engine, device, topk_settings(run, teacher), run.teachers[teacher].head_width)
    model.tokenizer, model.pad_id = tokenizer, pad_id(tokenizer)
    try:
        needs_own = spec.loss.mode_of(teacher) == "alm" and not run.same_tokenizer[teacher]
        own_suffices = needs_own and spec.loss.dynamic_teacher_weights in (None, "ce")
        side = spec.student if run.same_tokenizer[teacher] else settings
        check_servers(engine, text, k=model.settings.k, longest=side.context_length, own_suffices=own_suffices)
    except BaseException:
        model.close()
        raise
    return model
