"""Hash of the computation in the kernel files: the syntax tree without words.

    python -m benchmarks.kernel_hash

GPU results are valid only for the kernels they were measured with. The hash changes with the computation and stays the
same when comments, docstrings, formatting, error texts, file paths or names are changed, since those do not need a GPU
to be checked again.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPS = ROOT / "xtoken_core" / "ops"
KERNEL_FILES = ("kernels.py", "triton.py", "launch.py", "triton_support.py")
"""File name endings of kernels and their launches."""
SKIPPED = ("ctx", "type_comment", "kind", "type_params")
LIBRARIES = ("torch", "triton")
"""Packages whose names are part of the computation: `tl.exp` is not `tl.log`."""


def kernel_files() -> list[Path]:
    """Return every file that holds kernels or launches them."""
    return sorted(path for path in OPS.rglob("*.py") if path.name.endswith(KERNEL_FILES))


@cache
def kernel_hash() -> str:
    """Return the SHA-256 of the computation in all kernel files, independent of where each file lies."""
    return hash_of(path.read_text(encoding="utf-8") for path in kernel_files())


def hash_of(sources: Iterable[str]) -> str:
    """Return the SHA-256 of the computation in some sources, in any order."""
    trees = [ast.parse(source) for source in sources]
    own = {name for tree in trees for name in _defined_names(tree)}
    hashes = sorted(hashlib.sha256("\n".join(_Writer(own).lines(tree)).encode()).hexdigest() for tree in trees)
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _is_text(node: ast.AST) -> bool:
    """Return whether a node is a string that stands alone: a docstring or a remark on a name."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield functions, classes, parameters and variables of a file, and what it imports from this repository."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xtoken_core"):
            yield from (alias.asname or alias.name for alias in node.names)


class _Writer:
    """Writer of a syntax tree as lines, names of our own replaced by the order in which they appear.

    `ast.dump` and `ast.unparse` differ between Python versions (`type_params`, quotes in f-strings), so the lines are
    written here from fields that are the same in 3.11 to 3.13: empty fields, contexts and type comments are left out.
    """

    def __init__(self, own: set[str]) -> None:
        self._own = own
        self._numbers: dict[str, int] = {}

    def lines(self, node: object, depth: int = 0) -> Iterator[str]:
        """Yield one line per node and per value, indented by depth."""
        if isinstance(node, list):
            for item in node:
                yield from self.lines(item, depth)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from sorted(f"{' ' * depth}import {name}" for name in _library_names(node))
        elif isinstance(node, ast.Raise):
            yield f"{' ' * depth}Raise"  # the error's type and text are words, not computation
        elif isinstance(node, ast.AST):
            if _is_text(node):
                return
            yield f"{' ' * depth}{type(node).__name__}"
            for field, value in ast.iter_fields(node):
                if field in SKIPPED or value is None or value == [] or _is_shape(field, value):
                    continue
                yield f"{' ' * depth}.{field}"
                if isinstance(node, ast.Constant) or (field == "attr" and _is_of_a_library(node)):
                    yield f"{' ' * depth}{value!r}"
                else:
                    yield from self.lines(value, depth + 1)
        elif isinstance(node, str):
            yield f"{' ' * depth}{self._name(node)}"
        else:
            yield f"{' ' * depth}{node!r}"

    def _name(self, name: str) -> str:
        """Return a number for a name of our own and anything else as it is."""
        return f"#{self._numbers.setdefault(name, len(self._numbers))}" if name in self._own else repr(name)


def _library_names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield what is imported from torch and triton; only those names are part of the computation."""
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        whole = f"{module}.{alias.name}".lstrip(".")
        if whole.partition(".")[0] in LIBRARIES:
            yield f"{whole} as {alias.asname or alias.name}"


def _is_shape(field: str, value: object) -> bool:
    """Return whether a field is an annotation other than `tl.constexpr`."""
    return field in ("annotation", "returns") and not (isinstance(value, ast.AST) and _is_of_a_library(value))


def _is_of_a_library(node: ast.AST) -> bool:
    """Return whether a node is an attribute of torch, triton or `tl`, whose name must be kept."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in (*LIBRARIES, "tl")


if __name__ == "__main__":
    print(kernel_hash())
