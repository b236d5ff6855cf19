"""`xtoken collator`, `teacher` and `trainer`: one worker of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import set_up_logging

if TYPE_CHECKING:
    from services.common.worker import QueueLink

QueueOption = Annotated[
    str, typer.Option("--queue", metavar="ADDR", help="The queue's address: ipc://PATH or tcp://127.0.0.1:PORT.")
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help="The file with the queue's token, for a tcp address.", show_default=False),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="DIR", help="The directory of keys, for a tcp address beyond loopback.", show_default=False
    ),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="The worker's name in the queue.", show_default="by its kind and place")
]
IncarnationOption = Annotated[
    int | None,
    typer.Option(
        "--incarnation",
        help="Which start of this worker it is; a higher one replaces a lower.",
        show_default="the time",
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", min=0.1, metavar="SECONDS", help="How long the queue may leave it unanswered.")
]
RankOption = Annotated[int, typer.Option("--rank", min=0, help="The rank of the trainer that it is, or works for.")]


def collator(
    queue: QueueOption,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: TokenFileOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Tokenize and align a run's text."""
    set_up_logging()
    link = _link(queue, token_file, keys, incarnation, patience)
    from services.collator.main import work

    work(link, name=name or "collator-0")


def teacher(
    queue: QueueOption,
    teacher: Annotated[int, typer.Option("--teacher", min=0, help="Which of the run's teachers it is.")] = 0,
    rank: RankOption = 0,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: TokenFileOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Serve a teacher's logits to one trainer."""
    set_up_logging()
    link = _link(queue, token_file, keys, incarnation, patience)
    from services.teacher.main import work

    work(link, teacher=teacher, rank=rank, name=name)


def trainer(
    queue: QueueOption,
    rank: RankOption = 0,
    name: NameOption = None,
    incarnation: IncarnationOption = None,
    token_file: TokenFileOption = None,
    keys: KeysOption = None,
    patience: PatienceOption = 30.0,
) -> None:
    """Train the student.

    It goes on from the run's newest checkpoint if there is one.
    """
    set_up_logging()
    link = _link(queue, token_file, keys, incarnation, patience)
    from services.trainer.main import work

    work(link, rank=rank, name=name)


def _link(
    queue: str, token_file: Path | None, keys: Path | None, incarnation: int | None, patience: float
) -> QueueLink:
    """The way to a queue; an address that cannot be right is refused before anything heavy is loaded."""
    from services.common.worker import QueueLink
    from xtoken_core.data_plane.address import Address, read_token

    address = Address.parse(queue, token_file, keys)
    if address.token_file is not None and address.token_file.exists():  # a queue that starts later makes it
        read_token(address.token_file)
    return QueueLink(queue, token_file, keys, incarnation, patience)
