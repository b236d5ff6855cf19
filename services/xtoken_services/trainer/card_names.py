"""Names and licences of a run's models and texts, as its model card gives them: without paths of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.regular_files import MIB, read_json_object, read_regular

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SNAPSHOT = re.compile(r".*/(?:models|datasets)--(?P<repo>[^/]+)/snapshots/[0-9a-f]{40}(/.*)?")
LICENSE = re.compile(r"^license(?:_name)?:\s*[\"']?([\w.+-]{1,64})[\"']?\s*$", re.MULTILINE)
OTHER = "other"
"""Licence of a card that names it by `license_name`."""


def base_model(model: Path) -> str:
    """Return a model's name: its id on the Hub, as given or as the cache has it, or else its directory's name."""
    name = str(model)
    given = name if HUB_ID.fullmatch(name) and not model.exists() else None
    return given or hub_name(model) or model.absolute().name


def hub_name(path: Path) -> str | None:
    """Return the repository of a file or directory in the Hub's cache; None for any other path."""
    match = SNAPSHOT.fullmatch(str(path))
    return match["repo"].replace("--", "/", 1) if match else None


def text_names(paths: Sequence[Path]) -> str:
    """Return the names of files of text; of those of a data set on the Hub its id."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(hub_name(path) or path.name for path in paths))


def licence_of(model: Path) -> str | None:
    """Return the licence that a model's card or configuration names; None: neither does."""
    try:
        parts = read_regular(model / "README.md", MIB).decode("utf-8", "replace").split("---", 2)
        named = LICENSE.findall(parts[1]) if len(parts) == 3 and not parts[0].strip() else []
    except OSError:
        named = []
    if not named:
        try:
            configured = read_json_object(model / "config.json").get("license")
        except (OSError, ValueError):
            configured = None
        named = [configured] if isinstance(configured, str) else []
    return next((name for name in named if name != OTHER), named[0] if named else None)


def licences(run: ResolvedRun) -> tuple[str, str]:
    """Return the card's section on licences, and the line of its header.

    The line is empty if the licences differ or one is unknown.
    """
    models = {"student": run.spec.student.model}
    models |= {run.spec.teacher_name(number): teacher.model for number, teacher in enumerate(run.spec.teacher)}
    named = {what: licence_of(model) for what, model in models.items()}
    lines = [
        f"- {what} `{base_model(models[what])}`: {licence or 'its files name none'}" for what, licence in named.items()
    ]
    text = "\n".join([*lines, "", "All of them apply to this model, and so does the licence of the text."])
    (only,) = set(named.values()) if len(set(named.values())) == 1 else (None,)
    return text, f"license: {json.dumps(only)}\n" if only else ""
