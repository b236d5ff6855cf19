"""Metric loggers: console, TensorBoard, Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.errors import ConfigError
from xtoken_services.common.files.jsonl import last_line, replace_file
from xtoken_services.common.run.metric_lines import BITS, ERROR, TASK, TEACHER_BITS, finite, with_error

log = logging.getLogger("xtoken.trainer")

FLUSH_S = 10
CONSOLE_EVERY = 10
"""Steps between two lines in the trainer's log."""
WANDB_ID = "wandb-id"
OTHER_TEXT = "bits_per_byte_"
LOSSES = ("loss", "kl_loss", "ce_loss")

Row = Mapping[str, Any]


class MetricLogger(Protocol):
    """A destination of metrics beside `steps.jsonl` and `eval.jsonl`."""

    def log(self, kind: str, step: int, row: Row) -> None:
        """Log a line of `steps.jsonl` (kind `train`) or of `eval.jsonl` (`eval`)."""

    def close(self) -> None:
        """Flush and close."""


class ConsoleLogger:
    """One line in the process's log, every so many steps."""

    def __init__(self, every: int, steps: int) -> None:
        self.every, self.steps = every, steps

    def log(self, kind: str, step: int, row: Row) -> None:
        """See `MetricLogger`."""
        if kind == "train" and (step + 1) % self.every == 0 and "loss" in row:
            log.info("step %d of %d: %s", step + 1, self.steps, train_line(row))

    def close(self) -> None:
        """See `MetricLogger`."""


class TensorBoardLogger:
    """TensorBoard event files; events of steps that are repeated after a resume are purged.

    Args:
        run: The run.
        step: Step at which it starts or resumes. The evaluation of that very step is purged with the rest but not
            repeated, so it is written again.
    """

    def __init__(self, run: ResolvedRun, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("report.tensorboard needs tensorboard: install it by pip install tensorboard") from error
        self._writer = SummaryWriter(str(run.spec.output / "tensorboard"), purge_step=step, flush_secs=FLUSH_S)
        kept = last_line(run.spec.output / "eval.jsonl")
        if kept.get("step") == step:
            self.log("eval", step, kept)

    def log(self, kind: str, step: int, row: Row) -> None:
        """See `MetricLogger`."""
        for name, value in numbers(row).items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """See `MetricLogger`."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run, the same one after a resume; steps that are repeated are logged again."""

    def __init__(self, run: ResolvedRun) -> None:
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]  # an extra
        except ImportError as error:
            raise ConfigError("report.wandb needs wandb: install it by pip install wandb") from error
        spec = run.spec
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "xtoken"),
            name=spec.name,
            id=wandb_id(run),
            resume="allow",
            dir=str(spec.output),
            mode=spec.report.wandb,
            config=spec.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, kind: str, step: int, row: Row) -> None:
        """See `MetricLogger`."""
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in numbers(row).items()}})

    def close(self) -> None:
        """See `MetricLogger`."""
        self._run.finish()


def make_loggers(run: ResolvedRun, step: int) -> list[MetricLogger]:
    """Return the loggers that a run configures.

    Args:
        run: The run.
        step: Step at which it starts or resumes.

    Raises:
        ConfigError: A package that one of them needs is not installed.
    """
    spec = run.spec.report
    loggers: list[MetricLogger] = [ConsoleLogger(CONSOLE_EVERY, run.steps)]
    if spec.tensorboard:
        loggers.append(TensorBoardLogger(run, step))
    if spec.wandb != "off":
        loggers.append(WandbLogger(run))
    return loggers


def numbers(row: Row) -> dict[str, float]:
    """Return the finite numbers of a line, without its step."""
    return {name: float(value) for name, value in finite(row).items() if name != "step"}


def wandb_id(run: ResolvedRun) -> str:
    """Return the Weights & Biases id of a run: kept in its output, and replaced there for a run of another identity.

    Raises:
        OutputError: It cannot be stored.
    """
    path = run.spec.output / WANDB_ID
    values = run.identity().model_dump(mode="json", exclude_defaults=True)  # a new field at its default changes nothing
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    stored = path.read_bytes().decode("ascii", "replace").strip() if path.exists() else ""
    if re.fullmatch(digest + "-[0-9a-f]{8}", stored):
        return stored
    new = f"{digest}-{secrets.token_hex(4)}"
    replace_file(path, new + "\n")
    return new


def train_line(row: Row) -> str:
    """Return the log line of a step.

    >>> train_line({"loss": 2.5, "kl_loss": 2.25, "chunk_mass_t0": 0.98125, "tokens_per_second": 30000.4, "mfu": 0.41})
    'loss 2.5000, kl_loss 2.2500, chunk_mass 0.981, 30,000 tokens/s, mfu 41.0%'
    """
    parts = [f"{name} {row[name]:.4f}{_by_teacher(row, name)}" for name in LOSSES if _has(row, name)]
    if _has(row, "kl_fraction"):
        parts.append(f"kl_fraction {row['kl_fraction']:.1%}")
    parts += _chunk_mass(row)
    parts += [f"{name} {row[name]:.1%}" for name in row if name.startswith("unreachable_mass") and _has(row, name)]
    if _has(row, "grad_norm"):
        parts.append(f"grad_norm {row['grad_norm']:.4f}")
    if _has(row, "tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    parts += [f"{name} {row[name]:.1%}" for name in ("data_wait", "teacher_wait", "mfu") if _has(row, name)]
    if _has(row, "memory_peak_bytes"):
        parts.append(f"{row['memory_peak_bytes'] / 2**30:.2f} GiB")
    return ", ".join(parts)


def eval_line(row: Row) -> str:
    """Return the log line of an evaluation.

    >>> eval_line({"bits_per_byte": 1.25, "loss": 3.0, "next_token_accuracy": 0.3125})
    '1.2500 bits per byte on held-out text, loss 3.0000, next-token accuracy 31.2%'
    >>> eval_line({"bits_per_byte": 1.25, "bits_per_byte_test": 1.5})
    '1.2500 bits per byte on held-out text, 1.5000 on test'
    >>> eval_line({"bits_per_byte": 1.25, "teacher_bits_per_byte": 1.0})
    '1.2500 bits per byte on held-out text (teacher 1.0000)'
    >>> eval_line({"bits_per_byte": 1.25, "task_accuracy_sums": 0.5})
    '1.2500 bits per byte on held-out text, sums 50.0% right'
    """
    parts = [f"{with_error(row)} bits per byte on held-out text"]
    if _has(row, TEACHER_BITS):
        parts[0] += f" (teacher {row[TEACHER_BITS]:.4f})"
    others = [name.removeprefix(OTHER_TEXT) for name in row if name.startswith(OTHER_TEXT) and _has(row, name)]
    parts += [
        f"{with_error({BITS: row[OTHER_TEXT + name], ERROR: row.get(f'{ERROR}_{name}')})} on {name}" for name in others
    ]
    if _has(row, "loss"):
        parts.append(f"loss {row['loss']:.4f}")
    if _has(row, "next_token_accuracy"):
        parts.append(f"next-token accuracy {row['next_token_accuracy']:.1%}")
    tasks = [name.removeprefix(TASK) for name in row if name.startswith(TASK) and _has(row, name)]
    parts += [f"{name} {row[TASK + name]:.1%} right" for name in tasks]
    return ", ".join(parts)


def _by_teacher(row: Row, name: str) -> str:
    """Return a metric's values per teacher in brackets; empty for a single teacher."""
    teachers = _teachers(row, name)
    named = ", ".join(f"t{teacher} {row[f'{name}_t{teacher}']:.4f}" for teacher in teachers)
    return f" ({named})" if len(teachers) > 1 else ""


def _chunk_mass(row: Row) -> list[str]:
    """Return the teachers' mean mass per chunk; averaged logits have one in common."""
    if _has(row, "chunk_mass"):
        return [f"chunk_mass {row['chunk_mass']:.3f}"]
    teachers = _teachers(row, "chunk_mass")
    if teachers == [0]:
        return [f"chunk_mass {row['chunk_mass_t0']:.3f}"]
    named = ", ".join(f"t{teacher} {row[f'chunk_mass_t{teacher}']:.3f}" for teacher in teachers)
    return [f"chunk_mass ({named})"] if teachers else []


def _teachers(row: Row, name: str) -> list[int]:
    """Return the numbers of the teachers that a row has a metric of."""
    matches = (re.fullmatch(rf"{name}_t(\d+)", key) for key in row)
    return sorted(int(match[1]) for match in matches if match and _has(row, match[0]))


def _has(row: Row, name: str) -> bool:
    return row.get(name) is not None
