"""The checks of `xtoken run --dry-run`: those of a start, without writing below the run's output."""

from __future__ import annotations

import tempfile
from pathlib import Path

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.processes.progress import spinner
from xtoken_services.common.run.custom_loss import check_custom_loss
from xtoken_services.common.run.inspection import check_as_workers
from xtoken_services.common.run.loss_import import check_importable
from xtoken_services.supervisor.launch_check import check_launch
from xtoken_services.supervisor.run import check_output


def check_run(spec: RunSpec, loss: str | None) -> list[str]:
    """Check a run as its start would: text is read and indexed, and what the loss needs about tokenizers is built.

    Args:
        spec: The run's specification, with defaults.
        loss: `module:Class` of a custom loss.

    Returns:
        An estimate of its memory, and warnings about its settings.

    Raises:
        XtokenError: The start would be refused; the text has the reason.
    """
    check_launch(spec)
    check_custom_loss(spec.loss, loss)
    if loss is not None:
        check_importable(loss)
    check_input_files(spec)
    from xtoken_services.common.run.start_checks import check_start  # after the checks that cost nothing

    with tempfile.TemporaryDirectory(prefix="xtoken-") as directory, spinner("checking the run's files"):
        elsewhere = spec.model_copy(update={"output": Path(directory) / "output"})
        resolved, lines = check_start(elsewhere, output=spec.output)
        lines += check_as_workers(resolved)
    check_output(resolved.model_copy(update={"spec": spec}))
    return lines
