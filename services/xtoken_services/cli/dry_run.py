"""The checks of `xtoken run --dry-run`: those of a start, without writing below the run's output."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.files.input_files import check_input_files
from xtoken_services.common.processes.progress import spinner
from xtoken_services.common.run.custom_loss import check_custom_loss, check_importable
from xtoken_services.common.run.defaults import load_run
from xtoken_services.common.run.resume import CHECKPOINTS, check_output, newest_checkpoint
from xtoken_services.common.text.held_out import is_split, split_directory, split_text
from xtoken_services.supervisor.launch_check import check_launch


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
    from xtoken_services.common.run.resolve import file_warnings, resolve_run  # after the checks that cost nothing

    with tempfile.TemporaryDirectory(prefix="xtoken-") as directory, spinner("checking the run's files"):
        output = Path(directory) / "output"
        resolved = resolve_run(_readable(run_file, spec, settings, output).model_copy(update={"output": output}))
    check_output(resolved.model_copy(update={"spec": spec}))
    return list(file_warnings(resolved))


def _readable(run_file: Path, spec: RunSpec, settings: Sequence[str], elsewhere: Path) -> RunSpec:
    """Return the specification with text that is there, if the start would hold back a part of it first.

    The whole text stands for both sides; if there is a checkpoint to compare the text with, it is split elsewhere.
    """
    if spec.eval is None or split_directory(spec.output) not in (path.parent for path in spec.data.paths):
        return spec
    whole, _ = load_run(run_file, [*settings, 'eval="none"'], writes=False)
    if is_split(whole.data.paths, spec.output):
        return spec
    train = held_out = whole.data.path
    if newest_checkpoint(spec.output / CHECKPOINTS) is not None:
        split = split_text(whole.data.paths, elsewhere, writes=True)
        train, held_out = split[:2] if split is not None else (train, held_out)
    data, evaluation = spec.data.model_copy(update={"path": train}), spec.eval.model_copy(update={"path": held_out})
    return spec.model_copy(update={"data": data, "eval": evaluation})
