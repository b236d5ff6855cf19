"""One description of the machines of a result file's rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


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
