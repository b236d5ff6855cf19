"""The mutants of a package: one small change of one expression or statement each, drawn by seed.

Left out is what no test should pin: docstrings and other strings, annotations, the arguments of a raised error, log
calls, and blocks under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import builtins
import copy
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.MatMult: ast.Mult,
}  # fmt: skip
LOGGERS = ("log", "logger", "warnings")


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: The file, relative to the root of the tree.
        line: Where the change is.
        before: The first line of the changed statement as it stands.
        after: The same line in the mutant.
        source: The whole mutated file.
    """

    path: str
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """A name that survives changes elsewhere in the file."""
        return f"{self.path}: {self.before} => {self.after}"


def draw(
    root: Path, paths: Sequence[str], count: int, seed: int, lines: Mapping[str, Collection[int]] | None = None
) -> list[Mutant]:
    """Draw mutants without replacement.

    Args:
        root: The root of the tree.
        paths: Files and folders of the package, relative to it.
        count: How many; fewer if the package has fewer.
        seed: Of the draw.
        lines: By file, relative to the root, the lines to change; None for all.
    """
    files = sorted(file for path in paths for file in _files(root / path))
    sites = [
        (file, number)
        for file in files
        for number, line in enumerate(_lines(file.read_text(encoding="utf-8")))
        if lines is None or line in lines[file.relative_to(root).as_posix()]
    ]
    chosen = random.Random(seed).sample(sites, min(count, len(sites)))
    return [_mutant(root, file, number) for file, number in sorted(chosen)]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))


def _lines(source: str) -> list[int]:
    """Return the line of every change of a module."""
    return [node.lineno for node, _, _ in _changes(ast.parse(source))]  # type: ignore[attr-defined]  # see `_mutant`


def _mutant(root: Path, file: Path, number: int) -> Mutant:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for at, (node, field, replacement) in enumerate(_changes(tree)):
        if at == number:
            line: int = node.lineno  # type: ignore[attr-defined]  # only nodes with a position are visited
            statement = _statement(tree, node)
            before = _first_line(statement)
            _replace(tree, node, field, replacement)
            after = _first_line(replacement if statement is node and not field else statement)
            source = ast.unparse(ast.fix_missing_locations(tree))
            return Mutant(file.relative_to(root).as_posix(), line, before, after, source)
    raise IndexError(number)


def _statement(tree: ast.Module, node: ast.AST) -> ast.AST:
    """The innermost statement around a node."""
    around = [each for each in ast.walk(tree) if isinstance(each, ast.stmt) and any(x is node for x in ast.walk(each))]
    return around[-1]  # `walk` goes from the outside in


def _first_line(statement: ast.AST) -> str:
    lines = ast.unparse(ast.fix_missing_locations(statement)).splitlines()
    return next(line for line in lines if not line.startswith("@"))


def _replace(tree: ast.Module, node: ast.AST, field: str, value: ast.AST) -> None:
    """Set a field of a node; without a field, replace the node itself in its parent."""
    if field:
        name, _, index = field.partition(":")
        if index:
            getattr(node, name)[int(index)] = value
        else:
            setattr(node, name, value)
        return
    for parent in ast.walk(tree):
        for name, child in ast.iter_fields(parent):
            if child is node:
                setattr(parent, name, value)
                return
            if isinstance(child, list) and any(entry is node for entry in child):
                child[:] = [value if entry is node else entry for entry in child]
                return


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Every change of a module, in a fixed order: the node, its field (empty: itself), what replaces it."""
    for node in _visited(tree):
        yield from _expression_changes(node)
        yield from _statement_changes(node)


def _expression_changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    if isinstance(node, ast.Compare):
        for at, operator in enumerate(node.ops):
            yield node, f"ops:{at}", COMPARISONS[type(operator)]()
    elif isinstance(node, ast.BoolOp):
        yield node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS and not _is_union(node):
        yield node, "op", OPERATORS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield node, "", copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, "", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, "", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield node, "", ast.Constant(node.value * 2 + 1.0)
    elif isinstance(node, ast.IfExp):
        yield node, "test", ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))


def _statement_changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    if isinstance(node, (ast.If, ast.While)):
        yield node.test, "", ast.UnaryOp(ast.Not(), copy.deepcopy(node.test))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node, "value", ast.Constant(None)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield node, "", ast.Pass()
    elif isinstance(node, ast.Continue):
        yield node, "", ast.Break()


def _visited(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node that may be changed, in source order."""
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for entry in child if isinstance(child, list) else [child]:
            if isinstance(entry, ast.AST) and not _left_out(entry):
                yield entry
                yield from _visited(entry)


def _left_out(node: ast.AST) -> bool:
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _logs(node.value.func)


def _is_union(node: ast.AST) -> bool:
    """A union of types, as in a type alias: its last member is a type's name or None."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)):
        return False
    name = ast.unparse(node.right).rpartition(".")[2].partition("[")[0]
    return name == "None" or name in dir(builtins) or (name[:1].isupper() and not name.isupper())


def _logs(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) in LOGGERS


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
