"""Another commit's files, and the environment in which Python imports from them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Yield a directory with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="xc-") as name:
        tree = Path(name) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], cwd=ROOT, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def environment(tree: Path) -> dict[str, str]:
    """Return the environment in which Python imports from a tree, and packages from where they are now."""
    others = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and not Path(path).is_relative_to(ROOT)
    ]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), str(tree / "services"), *others])}
