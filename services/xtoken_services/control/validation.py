"""Validation of submitted specifications: paths under the allowed roots, bounded sizes, no addresses.

A specification has no field for a command or an environment; the values it does have are bounded here.
"""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.files.allowed_paths import RefusedError, Roots, paths_of, values_of

MAX_NUMBER = 2**53
MAX_TEXT = 4096
MAX_ITEMS = 1024
MAX_NAME_BYTES = 255
"""Longest name of a file on Linux."""
MAX_PARTS = 64
"""Deepest path: directories are made and removed by code that recurses."""
BOUNDS = {
    "workers.collators": 256,
    "rollout.workers": 64,
    "workers.ranks": 64,
    "workers.nodes": 256,
    "train.samples_per_step": 1 << 20,
    "train.micro_batch_tokens": 1 << 24,
    "train.keep_checkpoints": 10_000,
    "student.context_length": 1 << 22,
    "teacher.*.context_length": 1 << 22,
    "queue.span_steps": 10_000,
    "queue.memory_limit": 1 << 44,
}
MAX_TEACHERS = 16
ADDRESS = re.compile("[a-z][a-z0-9+.-]*:")
"""First part of a path that is an address, such as `https:`."""
RUN_CODE = "XTOKEN_RUN_CODE"
"""Variable by which the operator lets runs execute the programs of tasks: 1."""


@dataclass(frozen=True)
class SpecValidator:
    """Rules for the specifications that a control plane accepts.

    Attributes:
        roots: Directories that runs may read and write; None for no restriction.
        base: Directory that a relative `output` is resolved against.
    """

    roots: Roots | None
    base: Path

    @property
    def inputs(self) -> Path:
        """Directory of relative paths that are read: the first root, if there is one."""
        return self.roots.read[0] if self.roots is not None and self.roots.read else Path()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass the roots to a process; empty for no restriction."""
        return self.roots.environment if self.roots is not None else {}

    def validate(self, spec: RunSpec) -> RunSpec:
        """Return the specification with absolute paths.

        Raises:
            RefusedError: A path is relative to nothing, unusable or outside the roots, or a value is out of bounds.
        """
        if "custom" in spec.loss.modes:
            raise RefusedError("loss.mode", "a control plane runs no custom loss: run it by xtoken run --loss")
        for number, teacher in enumerate(spec.teacher):
            if teacher.store_missing == "compute":
                raise RefusedError(
                    f"teacher.{number}.store_missing", "a control plane builds no store: build it by xtoken store build"
                )
        tasks = spec.eval.tasks if spec.eval is not None else None
        if tasks is not None and tasks.run_code and os.environ.get(RUN_CODE) != "1":
            raise RefusedError(
                "eval.tasks.run_code",
                f"this control plane runs no code: its operator may set {RUN_CODE}=1, or run it by xtoken run",
            )
        if self.roots is not None and spec.push_to is not None:
            raise RefusedError("push_to", "a control plane pushes nothing, since its token would be used: unset it")
        if self.roots is not None:
            _check_sizes(spec.model_dump())
            if spec.ray.address != "auto":
                raise RefusedError("ray.address", "the control plane uses the cluster of its own machine: unset it")
        output = self._resolved(spec.output)
        for name, path in paths_of(spec.model_dump(exclude={"output"})):
            if path.parts and ADDRESS.fullmatch(path.parts[0]):  # a path has one of the slashes only
                raise RefusedError(name, f"{path} is an address: a control plane reads files of its machine alone")
        if self.inputs.is_absolute():
            spec = spec.with_base(self.inputs)
        for name, path in paths_of(spec.model_dump(exclude={"output"})):
            if not path.is_absolute():
                raise RefusedError(name, f"{path} is relative: a control plane without --root needs absolute paths")
        spec = spec.model_copy(update={"output": output})
        if self.roots is not None:
            self.roots.check_run(spec)
        return spec

    def _resolved(self, output: Path) -> Path:
        if ".." in output.parts:
            raise RefusedError("output", f"{output} contains '..': name the directory itself")
        try:
            # Without symbolic links, so that two runs cannot have the same directory under two names.
            resolved = (self.base / output).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise RefusedError("output", f"{str(output)!r} cannot be resolved: {error}") from error
        for root in self.roots.write if self.roots else ():
            inside = resolved.relative_to(root).parts if resolved.is_relative_to(root) else ()
            if resolved == root or any(part.startswith(".") for part in inside):
                raise RefusedError("output", f"{output} must be a directory below {root}, not a hidden one")
        return resolved


def _check_sizes(document: dict[str, Any]) -> None:
    if len(document["teacher"]) > MAX_TEACHERS:
        raise RefusedError("teacher", f"at most {MAX_TEACHERS} teachers")
    for name, value in values_of(document):
        if isinstance(value, (list, tuple)) and len(value) > MAX_ITEMS:
            raise RefusedError(name, f"longer than {MAX_ITEMS} items")
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if isinstance(value, int) and not isinstance(value, bool):
            largest = BOUNDS.get(pattern, MAX_NUMBER if name != "seed" else 2**63)
            if value > largest:
                raise RefusedError(name, f"{str(value)[:40]} is larger than {largest}")
        elif isinstance(value, (str, Path)):
            _check_text(name, str(value))
            if isinstance(value, Path):
                _check_path(name, value)


def _check_text(name: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise RefusedError(name, f"longer than {MAX_TEXT} characters")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        raise RefusedError(name, "contains control characters")


def _check_path(name: str, path: Path) -> None:
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts):
        raise RefusedError(name, f"a file's name is longer than {MAX_NAME_BYTES} bytes")
    if len(path.parts) > MAX_PARTS:
        raise RefusedError(name, f"more than {MAX_PARTS} directories deep")
