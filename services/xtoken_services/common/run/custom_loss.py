"""The class of a custom loss, named on a command line: checked before anything starts. No torch."""

from __future__ import annotations

import os
import re
from typing import Any

from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_services.common.processes.child_process import ChildError, Progress, answer_requests, ask_child

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
CHECK_S = 600.0
CHECK_MEMORY = 1 << 36


def check_custom_loss(config: LossConfig, name: str | None) -> None:
    """Check that a name is given exactly if the loss is a custom one, and that it has the form `module:Class`.

    Args:
        config: The run's loss.
        name: The value of `--loss`; None: it is not given.

    Raises:
        ConfigError: With what to change.
    """
    if "custom" not in config.modes:
        if name is not None:
            raise ConfigError(f'--loss {name} has no effect on loss.mode = "{config.mode}": set loss.mode = "custom"')
        return
    if name is None:
        raise ConfigError('loss.mode = "custom" takes its class from the command line: add --loss module:Class')
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"--loss {name}: expected module:Class, such as my_losses:MyLoss")


def check_importable(name: str) -> None:
    """Import the class in a process of its own, with the module search path of the workers.

    Raises:
        ConfigError: It cannot be imported, or is no loss.
    """
    try:  # the user's own code: the whole environment of the workers, and only the limits of a mistake
        ask_child(__name__, {"name": name}, silence_s=CHECK_S, memory=CHECK_MEMORY, environment=os.environ)
    except ChildError as error:
        raise ConfigError(str(error)) from error


def _import(request: dict[str, Any], _: Progress) -> None:
    from xtoken_core.losses.custom import import_loss

    import_loss(request["name"])


if __name__ == "__main__":
    answer_requests(_import)
