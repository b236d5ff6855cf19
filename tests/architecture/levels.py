"""Import levels of a package: the longest chain of imports among its modules, read from their syntax trees.

Imports under `if TYPE_CHECKING:` are left out, as they never run; imports inside functions count.

    python -m tests.architecture.levels xtoken_services.control [--rooms]

prints the longest chain.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]

Graph = dict[str, set[str]]
"""What each module imports."""


def module_graph(package: str, root: Path = ROOT) -> Graph:
    """Return the imports among the modules of a package, by full name.

    `import a.b` counts as an import of `a.b` alone, although it also runs `a/__init__.py`.
    """
    files = {_name(path, root): path for path in sorted((root / package.replace(".", "/")).rglob("*.py"))}
    graph: Graph = {}
    for name, path in files.items():
        targets = {_longest_known(target, files) for target in imported_names(path.read_text(encoding="utf-8"))}
        graph[name] = {target for target in targets if target is not None and target != name}
    return graph


def rooms(graph: Graph, package: str) -> Graph:
    """Return the graph in which every direct subpackage of `package` is a single node."""
    depth = package.count(".") + 2

    def room(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    joined: Graph = {}
    for name, targets in graph.items():
        joined.setdefault(room(name), set()).update(room(target) for target in targets if room(target) != room(name))
    return joined


def longest_chain(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the longest chain of imports, importer first.

    Raises:
        CycleError: The graph has a cycle.
    """
    best: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():  # what a module imports comes before it
        below = max((best[target] for target in graph.get(name, ())), key=len, default=[])
        best[name] = [name, *below]
    return max(best.values(), key=len, default=[])


def cycle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Return one cycle of imports, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imported_names(source: str) -> set[str]:
    """Return the absolute dotted names that a module's source imports; `from a import b` yields `a.b`."""
    return set(_imports(ast.parse(source)))


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for other in node.orelse:
            yield from _imports(other)
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _longest_known(target: str, known: Mapping[str, Path]) -> str | None:
    """Return the module that an imported name belongs to: itself, or what it is a member of."""
    while target:
        if target in known:
            return target
        target = target.rpartition(".")[0]
    return None


def _name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    found = module_graph(sys.argv[1])
    if "--rooms" in sys.argv:
        found = rooms(found, sys.argv[1])
    chain = longest_chain(found)
    print(len(chain), *chain, sep="\n")
