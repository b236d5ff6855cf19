"""Who is told of a run's figures beside its files: the log, TensorBoard, Weights & Biases."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Protocol

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError

log = logging.getLogger("xtoken.trainer")

Row = Mapping[str, Any]


class Report(Protocol):
    """Somebody who is told."""

    def tell(self, kind: str, step: int, row: Row) -> None:
        """A line of `steps.jsonl` (kind `train`) or of `eval.jsonl` (`eval`)."""

    def close(self) -> None:
        """The run has ended, or stopped."""


class ConsoleReport:
    """One line in the log, every so many steps."""

    def __init__(self, every: int, steps: int) -> None:
        self.every, self.steps = every, steps

    def tell(self, kind: str, step: int, row: Row) -> None:
        """As `Report`."""
        if kind == "train" and (step + 1) % self.every == 0 and "loss" in row:
            log.info("step %d of %d: %s", step + 1, self.steps, line_of(row))

    def close(self) -> None:
        """As `Report`."""


class TensorBoardReport:
    """Event files in a directory; those of steps that are repeated after a restart are hidden."""

    def __init__(self, run: ResolvedRun, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "report.tensorboard needs tensorboard: install it by pip install 'xtoken[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(run.spec.output / "tensorboard"), purge_step=step)

    def tell(self, kind: str, step: int, row: Row) -> None:
        """As `Report`."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """As `Report`."""
        self._writer.close()


class WandbReport:
    """A run of Weights & Biases, the same one after a restart."""

    def __init__(self, run: ResolvedRun) -> None:
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]  # an extra
        except ImportError as error:
            raise ConfigError("report.wandb needs wandb: install it by pip install 'xtoken[wandb]'") from error
        spec = run.spec
        self._run = wandb.init(
            project=spec.report.wandb_project,
            name=spec.name,
            dir=str(spec.output),
            mode=spec.report.wandb,
            config=spec.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric="step")

    def tell(self, kind: str, step: int, row: Row) -> None:
        """As `Report`."""
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in numbers(row).items()}})

    def close(self) -> None:
        """As `Report`."""
        self._run.finish()


def make_reports(run: ResolvedRun, step: int) -> list[Report]:
    """Everybody whom a run wants to tell, from a step on.

    Raises:
        ConfigError: What one of them needs is not installed.
    """
    spec = run.spec.report
    reports: list[Report] = [ConsoleReport(spec.console_every, run.steps)]
    if spec.tensorboard:
        reports.append(TensorBoardReport(run, step))
    if spec.wandb != "off":
        reports.append(WandbReport(run))
    return reports


def numbers(row: Row) -> dict[str, float]:
    """What of a line can be drawn: finite numbers, without its step."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
    }


def line_of(row: Row) -> str:
    """A step for the reader of a log.

    >>> line_of({"loss": 2.5, "kl_loss": 2.25, "grad_norm": 1.0, "tokens_per_second": 30000.4, "teacher_wait": 0.021})
    'loss 2.5000, kl_loss 2.2500, grad_norm 1.0000, 30,000 tokens/s, teacher_wait 2.1%'
    """
    parts = [f"{name} {row[name]:.4f}" for name in ("loss", "kl_loss", "ce_loss", "grad_norm") if _known(row, name)]
    if _known(row, "tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts += [f"{name} {row[name]:.1%}" for name in ("data_wait", "teacher_wait", "mfu") if _known(row, name)]
    if _known(row, "memory_peak_bytes"):
        parts.append(f"{row['memory_peak_bytes'] / 2**30:.2f} GiB")
    return ", ".join(parts)


def _known(row: Row, name: str) -> bool:
    return row.get(name) is not None
