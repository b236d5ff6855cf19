"""Who is told of a run's figures beside its files: the log, TensorBoard, Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from services.trainer.jsonl import replace_file
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError

log = logging.getLogger("xtoken.trainer")

FLUSH_S = 10
WANDB_ID = "wandb-id"
LOSSES = ("loss", "kl_loss", "ce_loss")

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
    """Event files in a directory; those of steps that are repeated after a restart are hidden.

    Args:
        run: The run.
        step: Where it begins or goes on. The evaluation of that very step is hidden with the rest but not repeated, so
            it is written again.
    """

    def __init__(self, run: ResolvedRun, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "report.tensorboard needs tensorboard: install it by pip install 'xtoken[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(run.spec.output / "tensorboard"), purge_step=step, flush_secs=FLUSH_S)
        kept = last_row(run.spec.output / "eval.jsonl")
        if kept.get("step") == step:
            self.tell("eval", step, kept)

    def tell(self, kind: str, step: int, row: Row) -> None:
        """As `Report`."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """As `Report`."""
        self._writer.close()


class WandbReport:
    """A run of Weights & Biases, the same one after a restart; steps that are repeated are told again."""

    def __init__(self, run: ResolvedRun) -> None:
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]  # an extra
        except ImportError as error:
            raise ConfigError("report.wandb needs wandb: install it by pip install 'xtoken[wandb]'") from error
        spec = run.spec
        self._run = wandb.init(
            project=spec.report.wandb_project,
            name=spec.name,
            id=wandb_id(run),
            resume="allow",
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


def last_row(path: Path) -> Row:
    """The last of a file's JSON lines; empty without one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    row: Row = json.loads(lines[-1]) if lines else {}
    return row


def wandb_id(run: ResolvedRun) -> str:
    """Under which id Weights & Biases knows a run: kept in its output, made anew there for a run of another identity.

    Raises:
        OutputError: It cannot be written down.
    """
    path = run.spec.output / WANDB_ID
    values = run.identity().model_dump(mode="json", exclude_defaults=True)  # a new field at its default changes nothing
    identity = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    known = path.read_bytes().decode("ascii", "replace").strip() if path.exists() else ""
    if re.fullmatch(identity + "-[0-9a-f]{8}", known):
        return known
    made = f"{identity}-{secrets.token_hex(4)}"
    replace_file(path, made + "\n")
    return made


def line_of(row: Row) -> str:
    """A step for the reader of a log.

    >>> line_of({"loss": 2.5, "kl_loss": 2.25, "chunk_mass_t0": 0.98125, "tokens_per_second": 30000.4, "mfu": 0.41})
    'loss 2.5000, kl_loss 2.2500, chunk_mass 0.981, 30,000 tokens/s, mfu 41.0%'
    """
    parts = [f"{name} {row[name]:.4f}{_by_teacher(row, name)}" for name in LOSSES if _known(row, name)]
    parts += _chunk_mass(row)
    if _known(row, "grad_norm"):
        parts.append(f"grad_norm {row['grad_norm']:.4f}")
    if _known(row, "tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts += [f"{name} {row[name]:.1%}" for name in ("data_wait", "teacher_wait", "mfu") if _known(row, name)]
    if _known(row, "memory_peak_bytes"):
        parts.append(f"{row['memory_peak_bytes'] / 2**30:.2f} GiB")
    return ", ".join(parts)


def held_out_line(row: Row) -> str:
    """A line of `eval.jsonl` for the reader of a log.

    >>> held_out_line({"bits_per_byte": 1.25, "loss": 3.0, "held_out_kl_loss": 0.5, "next_token_accuracy": 0.3125})
    '1.2500 bits per byte on held-out text, loss 3.0000, kl_loss 0.5000, next-token accuracy 31.2%'
    """
    parts = [f"{row['bits_per_byte']:.4f} bits per byte on held-out text"]
    if _known(row, "loss"):
        parts.append(f"loss {row['loss']:.4f}")
    if _known(row, "held_out_kl_loss"):
        parts.append(f"kl_loss {row['held_out_kl_loss']:.4f}{_by_teacher(row, 'held_out_kl_loss')}")
    if _known(row, "next_token_accuracy"):
        parts.append(f"next-token accuracy {row['next_token_accuracy']:.1%}")
    return ", ".join(parts)


def _by_teacher(row: Row, name: str) -> str:
    """What follows a figure that several teachers have a part in."""
    places = _teachers(row, name)
    named = ", ".join(f"t{place} {row[f'{name}_t{place}']:.4f}" for place in places)
    return f" ({named})" if len(places) > 1 else ""


def _chunk_mass(row: Row) -> list[str]:
    """The teachers' mean mass per chunk; averaged logits have one in common."""
    if _known(row, "chunk_mass"):
        return [f"chunk_mass {row['chunk_mass']:.3f}"]
    places = _teachers(row, "chunk_mass")
    if places == [0]:
        return [f"chunk_mass {row['chunk_mass_t0']:.3f}"]
    named = ", ".join(f"t{place} {row[f'chunk_mass_t{place}']:.3f}" for place in places)
    return [f"chunk_mass ({named})"] if places else []


def _teachers(row: Row, name: str) -> list[int]:
    """The places of the teachers that a row has a figure of."""
    found = (re.fullmatch(rf"{name}_t(\d+)", key) for key in row)
    return sorted(int(match[1]) for match in found if match and _known(row, match[0]))


def _known(row: Row, name: str) -> bool:
    return row.get(name) is not None
