"""The class of a custom loss, named on a command line: checked before anything starts. No torch."""

from __future__ import annotations

import re

from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


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
