"""The checks of `xtoken run --dry-run`: those of a start, without writing below the run's output."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.files.input_files import check_input_files
from services.common.processes.progress import spinner
from services.common.run.custom_loss import check_custom_loss, check_importable
from services.common.run.defaults import load_run
from services.common.run.resume import check_output
from services.supervisor.launch_check import check_launch
from xtoken_core.config.spec import RunSpec


def check_run(run_file: Path, spec: RunSpec, settings: Sequence[str], loss: str | None) -> list[str]:
    """Check a run as its start would: text is read and indexed, and what the loss needs about tokenizers is built.

    Args:
        run_file: The run file.
        spec: Its specification, with defaults.
        settings: Settings from the command line.
        loss: `module:Class` of a custom loss.

    Returns:
        Warnings about its settings.

    Raises:
        XtokenError: The start would be refused; the text has the reason.
    """
    check_launch(spec)
    check_custom_loss(spec.loss, loss)
    if loss is not None:
        check_importable(loss)
    check_input_files(spec)
    from services.common.run.resolve import file_warnings, resolve_run  # after the checks that cost nothing

    with tempfile.TemporaryDirectory(prefix="xtoken-") as directory, spinner("checking the run's files"):
        elsewhere = _unsplit(run_file, spec, settings).model_copy(update={"output": Path(directory) / "output"})
        resolved = resolve_run(elsewhere)
    check_output(resolved.model_copy(update={"spec": spec}))
    return list(file_warnings(resolved))


def _unsplit(run_file: Path, spec: RunSpec, settings: Sequence[str]) -> RunSpec:
    """Return the specification with the whole text on both sides, if text is to be held back by the first start."""
    split = spec.output / "cache" / "split"
    if (
        spec.eval is None
        or split not in (path.parent for path in spec.data.paths)
        or all(path.exists() for path in spec.data.paths)
    ):
        return spec
    whole, _ = load_run(run_file, [*settings, 'eval="none"'], writes=False)
    held_out = spec.eval.model_copy(update={"path": whole.data.path})
    return spec.model_copy(update={"data": whole.data, "eval": held_out})
