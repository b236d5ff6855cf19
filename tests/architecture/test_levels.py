"""Depth and direction of imports: few levels within a folder, no cycle, no import upward in the library."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.conftest import ROOT

MOST_LEVELS = {"services/xtoken_services/control": 12, "xtoken_core/losses": 7}
"""Folders and the longest chain of imports among their modules."""


def is_for_types(node: ast.AST) -> bool:
    """Return whether a node is an `if TYPE_CHECKING:` block, which is no import at run time."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported_names(tree: ast.AST) -> set[str]:
    """Return every module that a file imports, also within functions, but not for types alone."""
    names: set[str] = set()
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if is_for_types(node):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        stack += ast.iter_child_nodes(node)
    return names


def module_of(path: Path) -> str:
    """Return a file's module name."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removeprefix("services.").removesuffix(".__init__")


@cache
def graph(folder: str) -> dict[str, set[str]]:
    """Return the imports among a folder's modules, without its packages' `__init__`."""
    files = {module_of(p): p for p in (ROOT / folder).rglob("*.py") if p.name != "__init__.py"}
    imports = {name: imported_names(ast.parse(path.read_text(encoding="utf-8"))) for name, path in files.items()}
    return {name: (found & files.keys()) - {name} for name, found in imports.items()}


def cycles_and_levels(edges: dict[str, set[str]]) -> tuple[list[str], int]:
    """Return the modules of the first cycle found, if any, and the number of levels."""
    levels: dict[str, int] = {}
    path: list[str] = []

    def level(name: str) -> int:
        if name in levels:
            return levels[name]
        if name in path:
            raise RecursionError(" -> ".join([*path[path.index(name) :], name]))
        path.append(name)
        levels[name] = 1 + max((level(other) for other in edges[name]), default=0)
        path.pop()
        return levels[name]

    try:
        return [], max(level(name) for name in edges)
    except RecursionError as cycle:
        return str(cycle).split(" -> "), 0


@pytest.mark.parametrize("folder", MOST_LEVELS)
def test_a_folder_has_few_levels(folder: str) -> None:
    assert cycles_and_levels(graph(folder))[1] <= MOST_LEVELS[folder]


@pytest.mark.parametrize("folder", ["xtoken_core", "services/xtoken_services"])
def test_modules_import_each_other_in_one_direction(folder: str) -> None:
    assert cycles_and_levels(graph(folder))[0] == []


def packages(folder: str) -> dict[str, set[str]]:
    """Return the imports among a folder's packages and single modules."""
    edges: dict[str, set[str]] = {}
    for name, others in graph(folder).items():
        package = name.split(".")[1]
        edges.setdefault(package, set()).update({other.split(".")[1] for other in others} - {package})
    return edges


@pytest.mark.parametrize("folder", ["xtoken_core", "services/xtoken_services"])
def test_packages_import_each_other_in_one_direction(folder: str) -> None:
    assert cycles_and_levels(packages(folder))[0] == []


def test_the_search_finds_cycles_and_levels() -> None:
    assert cycles_and_levels({"a": {"b"}, "b": {"c"}, "c": set()}) == ([], 3)
    assert cycles_and_levels({"a": {"b"}, "b": {"a"}})[0] == ["a", "b", "a"]
