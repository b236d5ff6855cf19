"""The hash of the kernels follows the computation, not the words around it."""

from benchmarks.kernel_hash import hash_of, kernel_files
from tests.support.cases import cases

KERNEL = '''
"""A kernel."""
import triton
import triton.language as tl
from xtoken_core.ops.numerics import upcast

BLOCK = 64
"""Columns of a tile."""

@triton.jit
def sum_kernel(x_ptr, out_ptr, n, WIDTH: tl.constexpr):
    """Sum a row."""
    at = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)  # a tile
    if n < 0:
        raise ValueError("n is negative")
    tl.store(out_ptr, tl.sum(tl.exp(x) / n))
'''


@cases(
    "old, new",
    ('"""Sum a row."""', '"""Add up the columns of a row."""'),
    ('"""Sum a row."""\n', "\n"),
    ("  # a tile", "  # another remark"),
    ('"""Columns of a tile."""', ""),
    ("x_ptr", "row_ptr"),
    ("sum_kernel", "row_sum_kernel"),
    ("xtoken_core.ops.numerics", "xtoken_core.ops.arithmetic"),
    ("(x_ptr, out_ptr, n, WIDTH: tl.constexpr)", "(\n    x_ptr, out_ptr, n,\n    WIDTH: tl.constexpr,\n)"),
    ("n is negative", "negative n"),
)
def test_words_do_not_change_the_hash(old: str, new: str) -> None:
    assert old in KERNEL
    assert hash_of([KERNEL.replace(old, new)]) == hash_of([KERNEL])


@cases(
    "old, new",
    ("tl.exp", "tl.log"),
    ("BLOCK = 64", "BLOCK = 32"),
    ("at < n", "at <= n"),
    ("/ n", "* n"),
    ("other=0.0", "other=1.0"),
    ("tl.sum(tl.exp(x) / n)", "tl.sum(tl.exp(x)) / n"),
    (": tl.constexpr", ""),
    ("triton.language as tl", "triton.math as tl"),
)
def test_a_change_of_the_computation_changes_the_hash(old: str, new: str) -> None:
    assert old in KERNEL
    assert hash_of([KERNEL.replace(old, new)]) != hash_of([KERNEL])


def test_the_order_of_files_does_not_matter() -> None:
    other = "X = 1"
    assert hash_of([KERNEL, other]) == hash_of([other, KERNEL])


def test_every_file_that_uses_triton_is_hashed() -> None:
    root = kernel_files()[0].parents[1]
    using = {path for path in root.rglob("*.py") if "\nimport triton" in path.read_text(encoding="utf-8")}
    assert using <= set(kernel_files())
