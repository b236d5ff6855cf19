"""`xtoken collator`, `xtoken rollout`, `xtoken teacher` and `xtoken trainer`: one worker of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from xtoken_services.cli.options import LossOption, RankOption, worker_command

if TYPE_CHECKING:
    from xtoken_services.common.processes.worker import QueueLink


@worker_command
def collator(link: QueueLink, name: str | None) -> None:
    """Tokenize and align a run's text."""
    from xtoken_services.collator.main import work

    work(link, name=name or "collator-0")


@worker_command
def rollout(link: QueueLink, name: str | None, rank: RankOption = 0) -> None:
    """Complete a run's prompts with the student's current weights."""
    from xtoken_services.rollout.main import work

    work(link, rank=rank, name=name)


@worker_command
def teacher(
    link: QueueLink,
    name: str | None,
    teacher: Annotated[int, typer.Option("--teacher", min=0, help="The teacher's number in the run.")] = 0,
    rank: RankOption = 0,
) -> None:
    """Compute a teacher's logits for the trainer of one rank."""
    from xtoken_services.teacher.main import work

    work(link, teacher=teacher, rank=rank, name=name)


@worker_command
def trainer(link: QueueLink, name: str | None, rank: RankOption = 0, loss: LossOption = None) -> None:
    """Train the student, resuming from the run's newest checkpoint if there is one."""
    from xtoken_services.trainer.main import work

    work(link, rank=rank, name=name, custom_loss=loss)
