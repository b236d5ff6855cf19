"""Import levels: no cycles, no upward imports, and packages that stay shallow."""

from __future__ import annotations

import pytest

from tests.architecture.levels import cycle, imported_names, longest_chain, module_graph, rooms

LIMITS = {"services.control": 12, "xtoken_core.losses": 7}
"""Longest chain of imports among the modules of a package."""
LAYERS = (
    ("collate", "evaluation", "teacher"),
    ("losses",),
    ("transports", "projection", "tokenizing"),
    ("data_plane", "dataset", "ops", "alignment"),
    ("queue",),
    ("config", "plan", "schema", "wire", "atomic"),
    ("errors",),
)
"""Parts of `xtoken_core` from top to bottom: a part imports only from the layers below its own."""


@pytest.mark.parametrize("package", ["xtoken_core", "services"])
def test_no_cycle_among_modules(package: str) -> None:
    assert cycle(module_graph(package)) == []


@pytest.mark.parametrize("package", ["xtoken_core", "services", "services.control", "services.supervisor"])
def test_no_cycle_among_subpackages(package: str) -> None:
    assert cycle(rooms(module_graph(package), package)) == []


@pytest.mark.parametrize(("package", "limit"), LIMITS.items())
def test_levels(package: str, limit: int) -> None:
    chain = longest_chain(module_graph(package))
    assert len(chain) <= limit, " > ".join(chain)


def test_no_upward_import() -> None:
    layer = {f"xtoken_core.{part}": number for number, parts in enumerate(LAYERS) for part in parts}
    graph = rooms(module_graph("xtoken_core"), "xtoken_core")
    assert graph.keys() - {"xtoken_core"} == layer.keys(), "every part has a layer"
    upward = {(part, other) for part in layer for other in graph[part] if layer[other] <= layer[part]}
    assert upward == set()


def test_imports_of_a_module() -> None:
    source = """
import a.b as c, d
from typing import TYPE_CHECKING
from e import f, g
if TYPE_CHECKING:
    from h import i
else:
    import j
def later():
    from k.l import m
"""
    assert imported_names(source) == {"a.b", "d", "typing.TYPE_CHECKING", "e.f", "e.g", "j", "k.l.m"}


def test_longest_chain_and_cycle() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}
    assert longest_chain(graph) == ["a", "b", "c"]
    assert cycle(graph) == []
    assert {"a", "c"} <= set(cycle(graph | {"c": {"a"}}))
