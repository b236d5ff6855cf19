"""Every public function and class of the product has a caller in it, or belongs to a public interface.

Names of other data planes and loss utilities that the product itself does not call are the compatibility surface: the
modules named `compat`, each of which calls the product's own functions.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.conftest import ROOT
from tests.architecture.test_source import HOUSE, PACKAGES, name_of, source_files, tree_of
from xtoken_core.ops import op_names

PLACE = re.compile(r"[\w.]+:(\w+)")
"""A name as a string: `module:name`."""

WITHOUT_CALLER = {
    "xtoken_core/projection/build.py:similarity": "the formula of one pair, by which tests define the entries"
}
"""Public names that only tests and measurements use, with the reason to have them."""

OPERATORS_OF_MODELS = {"embedding", "indices_to_multihot"}
"""Operators for models, which no loss reads: contracts of their own (`docs/operators`)."""

OWN_CODE = {
    "xtoken_core/losses/compat.py:dp_all_reduce_sum": "over any process group; a run's own can be interrupted",
    "xtoken_core/compat/indices_to_multihot/compat.py:null_decorator": "there is nothing to call",
    "xtoken_core/compat/meta.py:KVBatchMeta": "plain data",
    "xtoken_core/transports/compat.py:SampleSlotRef": "plain data",
}
"""Functions and classes of the surface that call none of the product's."""


INTERFACES = ("xtoken/__init__.pyi", "xtoken_core/data_plane/codec.pyi", "xtoken_core/losses/__init__.pyi")
"""Stubs that list the names of the Python interface and of documented import paths."""


def is_surface(path: Path) -> bool:
    """True for a module of the compatibility surface; task queue and TensorDicts there are code of their own."""
    named = path.parent.name == "compat" and path.stem not in ("__init__", "task_client", "layout")
    return named or path.stem == "compat"


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The functions and classes at the top of a module."""
    for node in tree_of(path).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def names_read(tree: ast.AST) -> set[str]:
    """The names that code reads: variables, attributes and strings such as `module:name`; not those it imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (place := PLACE.fullmatch(node.value)):
            names.add(place[1])
    return names


def imported(path: Path) -> dict[str, str]:
    """The product's names that a module imports, with the module of each."""
    return {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES
        for alias in node.names
    }


def offered() -> set[str]:
    """The names of the Python interface and of the compatibility surface, those it passes on among them."""
    stubs = [tree_of(ROOT / name) for name in INTERFACES]
    imports = [node for stub in stubs for node in ast.walk(stub) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {node.name for node in definitions(ROOT / "xtoken/integrations.py")}
    for path in filter(is_surface, source_files(*HOUSE)):
        names |= {node.name for node in definitions(path)}
    return names


def without_caller() -> set[str]:
    """`file:name` of public functions and classes that no module of the product uses and no interface offers."""
    users = defaultdict(set)
    for path in source_files(*HOUSE):
        if not is_surface(path):
            for name in names_read(tree_of(path)):
                users[name].add(path)
    commands = PLACE.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = {*users, *commands, *offered()}
    return {
        f"{name_of(path)}:{node.name}"
        for path in source_files(*HOUSE)
        for node in definitions(path)
        if not node.name.startswith("_")
        and node.name not in known
        # A decorator registers a command or a page.
        and (isinstance(node, ast.ClassDef) or not node.decorator_list)
    }


def test_public_names_have_a_caller() -> None:
    assert without_caller() == set(WITHOUT_CALLER)


def test_operators_have_a_caller() -> None:
    called = {
        node.args[0].value
        for path in source_files(*HOUSE)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_op" and isinstance(node.args[0], ast.Constant)
    }
    assert set(op_names()) - called == OPERATORS_OF_MODELS


@pytest.mark.parametrize("path", [path for path in source_files(*HOUSE) if is_surface(path)], ids=name_of)
def test_the_surface_calls_the_product(path: Path) -> None:
    functions = {node.name: names_read(node) for node in definitions(path)}
    own = {name for name, module in imported(path).items()}

    def reaches(name: str, seen: frozenset[str] = frozenset()) -> bool:
        inner = (functions[name] & functions.keys()) - seen - {name}
        return bool(functions[name] & own) or any(reaches(other, seen | {name}) for other in inner)

    alone = {f"{name_of(path)}:{name}" for name in functions if not name.startswith("_") and not reaches(name)}
    assert alone == {name for name in OWN_CODE if name.startswith(f"{name_of(path)}:")}
