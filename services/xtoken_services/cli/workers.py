"""`xtoken collator`, `xtoken rollout`, `xtoken teacher` and `xtoken trainer`: one worker of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from xtoken_services.cli.options import (
    IncarnationOption,
    KeysOption,
    LossOption,
    NameOption,
    PatienceOption,
    QueueOption,
    QueueTokenOption,
    RankOption,
    queue_link,
    set_up_logging,
)


def collator(
    queue: QueueOption,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: QueueTokenOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Tokenize and align a run's text."""
    set_up_logging()
    link = queue_link(queue, token_file, keys, incarnation, patience)
    from xtoken_services.collator.main import work

    work(link, name=name or "collator-0")


def rollout(
    queue: QueueOption,
    rank: RankOption = 0,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: QueueTokenOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Complete a run's prompts with the student's current weights."""
    set_up_logging()
    link = queue_link(queue, token_file, keys, incarnation, patience)
    from xtoken_services.rollout.main import work

    work(link, rank=rank, name=name)


def teacher(
    queue: QueueOption,
    teacher: Annotated[int, typer.Option("--teacher", min=0, help="The teacher's number in the run.")] = 0,
    rank: RankOption = 0,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: QueueTokenOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Compute a teacher's logits for the trainer of one rank."""
    set_up_logging()
    link = queue_link(queue, token_file, keys, incarnation, patience)
    from xtoken_services.teacher.main import work

    work(link, teacher=teacher, rank=rank, name=name)


def trainer(
    queue: QueueOption,
    rank: RankOption = 0,
    loss: LossOption = None,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: QueueTokenOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Train the student, resuming from the run's newest checkpoint if there is one."""
    set_up_logging()
    link = queue_link(queue, token_file, keys, incarnation, patience)
    from xtoken_services.trainer.main import work

    work(link, rank=rank, name=name, custom_loss=loss)
