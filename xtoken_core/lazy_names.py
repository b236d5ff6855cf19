"""Names of a module that are loaded from elsewhere at their first use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(module: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`.

    Args:
        module: The module's name.
        names: By the module that defines them, the names.
    """
    homes = {name: home for home, some in names.items() for name in some}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load


def attach_stub(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a module's `__getattr__`, `__dir__` and `__all__` of the names that the stub beside its file imports.

    `lazy_loader.attach_stub` takes relative imports only; here the names may be defined in any package.

    Args:
        module: The module's name.
        file: The module's file.
    """
    names: dict[str, list[str]] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names.setdefault(str(node.module), []).extend(alias.name for alias in node.names)
    every = sorted(name for some in names.values() for name in some)
    return lazy_names(module, names), lambda: every, every
