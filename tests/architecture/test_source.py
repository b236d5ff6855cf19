"""What every source file keeps to: its size, no code that runs what it reads, true examples in docstrings."""

import ast
import doctest
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.conftest import ROOT

MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60

OBJECT_COLLECTIVES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
}  # fmt: skip
CHECKPOINT_PACKAGE = "torch.distributed.checkpoint"
PICKLERS = {"dill", "cloudpickle", "joblib", "jsonpickle", "marshal", "shelve"}
PICKLE_ERRORS = {"PickleError", "PicklingError", "UnpicklingError"}
PICKLED = {"services/xtoken_services/rollout/served.py: pickle.dumps"}
"""What is sent in this form, to a program that takes no other; nothing is unpickled."""
LONG_KERNELS = {
    "chain/class_kernels.py": "chain_class_kernel",
    "chain/gradient_kernels.py": "chain_row_bwd_kernel",
    "chain/live_kernels.py": "chain_clear_kernel",
    "chain/node_gradient_kernels.py": "chain_node_bwd_kernel",
    "chain/node_kernels.py": "chain_node_kernel",
    "chain/start_kernels.py": "chain_student_kernel",
    "chain_topk/entry_kernels.py": "chain_entry_kernel",
    "chain_topk/gradient_kernels.py": ("chain_listed_class_bwd_kernel chain_listed_node_bwd_kernel"),
    "chain_topk/node_kernels.py": "chain_listed_beside_kernel chain_listed_inside_kernel",
    "chain_topk/student_kernels.py": "chain_listed_student_kernel",
    "gold/kernels.py": "gold_bwd_kernel",
    "largest_logits/kernels.py": "choose_groups_kernel",
    "p_kl/chunk_kernels.py": "p_kl_chunk_kernel",
    "p_kl/kernels.py": "p_kl_student_bwd_kernel",
    "token_kl/kernels.py": "token_kl_kernel",
}
"""Kernels over the limit, by file in `xtoken_core/ops`: their many arguments stand one a line."""

HOUSE = ("xtoken", "xtoken_core", "services/xtoken_services")
PACKAGES = tuple(Path(folder).name for folder in HOUSE)
BESIDE = ("docs", "proto", "benchmarks", "experiments")


def source_files(*folders: str) -> list[Path]:
    """The Python files in these folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    """A file's path in the tree."""
    return path.relative_to(ROOT).as_posix()


def too_long_files() -> set[str]:
    """Files over the limit."""
    found = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files(*HOUSE)}
    return {name for name, lines in found.items() if lines > MOST_LINES_OF_A_FILE}


def too_long_functions() -> set[str]:
    """`file:function` over the limit; decorators do not count, docstrings do."""
    found = set()
    for path in source_files(*HOUSE):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION:
                    found.add(f"{name_of(path)}:{node.name}")
    return found


def test_no_file_is_longer_than_one_can_read_in_a_sitting() -> None:
    assert too_long_files() == set()


def test_no_function_is_longer_than_a_screen() -> None:
    known = {f"xtoken_core/ops/{file}:{name}" for file, names in LONG_KERNELS.items() for name in names.split()}
    assert too_long_functions() == known, "split the new one; strike out one that is short by now"


def test_a_package_says_what_its_folder_knows() -> None:
    packages = [path for path in source_files(*HOUSE) if path.name == "__init__.py"]
    assert packages
    assert [name_of(path) for path in packages if not ast.get_docstring(tree_of(path))] == []


def findings_of_pickle(tree: ast.Module) -> Iterator[str]:
    """Uses of pickle other than naming its errors, and of its relatives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.partition(".")[0] in PICKLERS)
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            if module in PICKLERS or (module == "pickle" and {a.name for a in node.names} - PICKLE_ERRORS):
                yield f"from {node.module} import"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle" and node.attr not in PICKLE_ERRORS:
            yield f"pickle.{node.attr}"


def findings_of_loading(tree: ast.Module) -> Iterator[str]:
    """`torch.load` without `weights_only=True`, and flags that allow pickles or foreign code."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if ast.unparse(node.func) == "torch.load" and given.get("weights_only") is not True:
            yield "torch.load without weights_only=True"
        yield from (f"{flag}=True" for flag in ("allow_pickle", "trust_remote_code") if given.get(flag) is True)


def findings_of_object_collectives(tree: ast.Module) -> Iterator[str]:
    """Collectives of torch.distributed that send pickled objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in OBJECT_COLLECTIVES:
                yield name


def findings_of_distributed_checkpoints(tree: ast.Module) -> Iterator[str]:
    """Readers of torch.distributed.checkpoint, which unpickle `.metadata`; helpers for state dicts are none."""
    for node in ast.walk(tree):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (
            module for module in modules
            if module.startswith(CHECKPOINT_PACKAGE) and module != f"{CHECKPOINT_PACKAGE}.state_dict"
        )  # fmt: skip


KINDS = [
    pytest.param(findings_of_pickle, id="pickle"),
    pytest.param(findings_of_loading, id="loading"),
    pytest.param(findings_of_object_collectives, id="object-collectives"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_is_read_or_received_can_run_code(kind) -> None:  # type: ignore[no-untyped-def]
    found = [f"{name_of(path)}: {what}" for path in source_files(*HOUSE, *BESIDE) for what in kind(tree_of(path))]
    assert set(found) <= PICKLED


def test_product_reads_no_distributed_checkpoint() -> None:
    """Benchmarks may, for a comparison."""
    found = [
        f"{name_of(path)}: {what}"
        for path in source_files(*HOUSE)
        for what in findings_of_distributed_checkpoints(tree_of(path))
    ]
    assert found == []


def findings_of_interpreters(tree: ast.Module) -> Iterator[str]:
    """Uses of `sys.executable`, and of modules that start Python without -P."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
            yield "sys.executable"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] == "multiprocessing")
            if isinstance(node, ast.ImportFrom) and node.module == "sys":
                yield "from sys import"


def test_one_place_names_the_interpreter() -> None:
    """A Python process without -P runs files of the working directory that are named as modules."""
    places = {name_of(p): list(findings_of_interpreters(tree_of(p))) for p in source_files(*HOUSE)}
    assert {name: found for name, found in places.items() if found} == {
        "services/xtoken_services/common/processes/supervised.py": ["sys.executable"]
    }, "take PYTHON from there, or ask_child beside it"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (findings_of_interpreters, "subprocess.run([sys.executable, '-c', ''])"),
        (findings_of_interpreters, "from sys import executable"),
        (findings_of_interpreters, "import multiprocessing"),
        (findings_of_pickle, "import pickle\npickle.loads(b'')"),
        (findings_of_pickle, "from pickle import load"),
        (findings_of_pickle, "import dill"),
        (findings_of_loading, "torch.load(path)"),
        (findings_of_loading, "torch.load(path, weights_only=False)"),
        (findings_of_loading, "np.load(path, allow_pickle=True)"),
        (findings_of_loading, "AutoModel.from_pretrained(path, trust_remote_code=True)"),
        (findings_of_object_collectives, "dist.broadcast_object_list(values)"),
        (findings_of_distributed_checkpoints, "from torch.distributed.checkpoint.filesystem import FileSystemReader"),
        (findings_of_distributed_checkpoints, "import torch.distributed.checkpoint as dcp"),
    ],
)
def test_the_search_finds_what_it_looks_for(kind, code: str) -> None:  # type: ignore[no-untyped-def]
    assert list(kind(ast.parse(code)))


def test_examples_of_docstrings_are_true() -> None:
    with_examples = [path for path in source_files(*HOUSE) if ">>> " in path.read_text(encoding="utf-8")]
    names = [name_of(path).removeprefix("services/").removesuffix(".py").replace("/", ".") for path in with_examples]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert {name: result for name, result in results.items() if result.failed or not result.attempted} == {}
    assert len(results) > 10
