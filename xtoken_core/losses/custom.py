"""Custom losses: classes from outside the library, by a name that only a command line gives."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

from xtoken_core.errors import ConfigError
from xtoken_core.losses.base import ChunkLoss, Loss
from xtoken_core.losses.registry import LOSSES


def import_loss(name: str) -> type[ChunkLoss]:
    """Import the class of a custom loss. This runs the module's code.

    Args:
        name: `module:Class`.

    Raises:
        ConfigError: It cannot be imported, or is not a complete subclass of `ChunkLoss`.
    """
    module, _, attribute = name.partition(":")
    try:
        loss = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # whatever the module's own code raises
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"--loss {name}: cannot import {module}: {type(error).__name__}: {reason}: install it, or add its "
            "directory to PYTHONPATH"
        ) from error
    if loss is None:
        raise ConfigError(f"--loss {name}: the module {module} has no {attribute}")
    if not (inspect.isclass(loss) and issubclass(loss, ChunkLoss)):
        raise ConfigError(f"--loss {name}: not a subclass of xtoken_core.losses.base.ChunkLoss")
    # Said at the start: an abstract class would only fail when the trainers build it.
    if inspect.isabstract(loss):
        missing = ", ".join(sorted(loss.__abstractmethods__))
        raise ConfigError(f"--loss {name}: it does not define {missing}")
    if getattr(loss, "mode", None) != "custom":  # the collators count the chunks of this mode
        raise ConfigError(f'--loss {name}: set mode = "custom" in the class')
    return loss


def losses_with(custom: str | None) -> Mapping[str, type[Loss]]:
    """Return every loss by its mode.

    Args:
        custom: `module:Class` of the mode `custom`; None: there is none.
    """
    return LOSSES if custom is None else {**LOSSES, "custom": import_loss(custom)}
