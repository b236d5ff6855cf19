"""The program that imports the class of a custom loss in a child process, before a run starts."""

from __future__ import annotations

import os
from typing import Any

from xtoken_core.config.loss import LossConfig
from xtoken_core.errors import ConfigError
from xtoken_services.common.processes.child_process import ChildError, Progress, answer_requests, ask_child
from xtoken_services.common.run.custom_loss import check_custom_loss

CHECK_S = 600.0
CHECK_MEMORY = 1 << 36


def check_importable(config: LossConfig, name: str | None) -> None:
    """Check the name as `check_custom_loss`; import a class in a process of its own, with the workers' module path.

    Raises:
        ConfigError: There is none where one is needed, it cannot be imported, or is no loss.
    """
    check_custom_loss(config, name)
    if name is None:
        return
    try:  # the user's own code: the whole environment of the workers, and only the limits of a mistake
        ask_child(__name__, {"name": name}, silence_s=CHECK_S, memory=CHECK_MEMORY, environment=os.environ)
    except ChildError as error:
        raise ConfigError(str(error)) from error


def _import(request: dict[str, Any], _: Progress) -> None:
    from xtoken_core.losses.custom import import_loss

    import_loss(request["name"])


if __name__ == "__main__":
    answer_requests(_import)
