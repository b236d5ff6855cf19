"""Which runs a control plane takes: paths under its roots, sizes that a machine can have, an address of its own choice.

The specification itself has no field that names a command, an environment or code; what it has is bounded here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.allowed_paths import OutsideError, Roots, paths_of
from services.supervisor.launch_check import RefusedError, check_launch
from xtoken_core.config.spec import RunSpec

LARGEST_NUMBER = 2**53
LONGEST_TEXT = 4096
MOST_ITEMS = 1024
BOUNDS = {
    "workers.collators": 256,
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
MOST_TEACHERS = 16


@dataclass(frozen=True)
class SpecValidator:
    """What is taken.

    Attributes:
        roots: Where runs may read and write; None for the user's own run, which may do what its user may.
        base: What a relative `output` is relative to; None if it must be absolute.
    """

    roots: Roots | None = None
    base: Path | None = None

    def validate(self, spec: RunSpec) -> RunSpec:
        """The run with its output's place filled in.

        Raises:
            RefusedError: A path is relative or unusable, or something is out of bounds.
            OutsideError: A path leads out of the roots.
        """
        if self.roots is not None:
            _check_sizes(spec.model_dump())
            if spec.queue.address is not None:
                raise RefusedError("queue.address", "a control plane gives every run an address of its own: unset it")
            if spec.ray.address != "auto":
                raise RefusedError(
                    "ray.address", "a control plane uses the cluster that its own machine is in: unset it"
                )
        output = self._placed(spec.output)
        for name, path in paths_of(spec.model_dump(exclude={"output"})):
            if not path.is_absolute():
                raise RefusedError(name, f"{path} is relative: a control plane takes absolute paths")
        spec = spec.model_copy(update={"output": output})
        if self.roots is not None:
            self.roots.check_run(spec)
        return spec

    def _placed(self, output: Path) -> Path:
        if self.base is None:
            if not output.is_absolute():
                raise RefusedError("output", f"{output} is relative: this control plane takes absolute paths")
            return output
        if ".." in output.parts:
            raise RefusedError("output", f"{output} climbs up by '..': name the directory itself")
        try:
            # The directory's real name, so that no run is known by two.
            place = (self.base / output).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise RefusedError("output", f"{str(output)!r} cannot be looked up: {error}") from error
        for root in self.roots.write if self.roots else ():
            inside = place.relative_to(root).parts if place.is_relative_to(root) else ()
            if place == root or any(part.startswith(".") for part in inside):
                raise RefusedError("output", f"{output} must name a directory of the run's own, not a hidden one")
        return place


def _check_sizes(document: dict[str, Any]) -> None:
    if len(document["teacher"]) > MOST_TEACHERS:
        raise RefusedError("teacher", f"at most {MOST_TEACHERS} of them")
    for name, value in _leaves(document):
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if isinstance(value, int) and not isinstance(value, bool):
            largest = BOUNDS.get(pattern, LARGEST_NUMBER if name != "seed" else 2**63)
            if value > largest:
                raise RefusedError(name, f"{str(value)[:40]} is more than {largest}")
        elif isinstance(value, (str, Path)):
            _check_text(name, str(value))


def _check_text(name: str, text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise RefusedError(name, f"longer than {LONGEST_TEXT} characters")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        raise RefusedError(name, "control characters are not taken")


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        if len(value) > MOST_ITEMS:
            raise RefusedError(name, f"a list of more than {MOST_ITEMS}")
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    else:
        yield name, value


__all__ = ["OutsideError", "RefusedError", "SpecValidator", "check_launch"]
