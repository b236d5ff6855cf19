"""The machine of a run, and one description of those of a result file's rows."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Any


def machine() -> dict[str, Any]:
    """Describe the machine and its versions."""
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def joined_machines(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return one description of two machines: a range of cores, and every version that either has.

    Args:
        known: A description as a result file has it; empty if there is none.
        found: Another one.
    """
    if not known or not found:
        return dict(known or found)
    both = {key: (known[key], found[key]) for key in known if key in found}
    return {key: _joined(key, *values) for key, values in both.items()}


def _joined(key: str, known: Any, found: Any) -> Any:
    if isinstance(known, list):
        return known if set(found) <= set(known) else [*known, *(name for name in found if name not in known)]
    if key == "cpus":
        cores = sorted({int(number) for value in (known, found) for number in re.findall(r"\d+", str(value))})
        return cores[0] if len(cores) == 1 else f"{cores[0]} to {cores[-1]}"
    versions = dict.fromkeys(name for value in (known, found) for name in str(value).split(" or "))
    return " or ".join(versions)
