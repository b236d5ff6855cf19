"""Run a module as a program while some packages cannot be imported: `without.py torch,numpy MODULE ARGUMENT...`."""

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


class Blocked(MetaPathFinder):
    """A finder that refuses packages and everything in them."""

    def __init__(self, packages: set[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in self.packages:
            raise ImportError(f"{fullname} is blocked here")
        return None


if __name__ == "__main__":
    packages, module, *arguments = sys.argv[1:]
    blocked = set(packages.split(","))
    assert not blocked & {name.partition(".")[0] for name in sys.modules}, "loaded before it could be blocked"
    sys.meta_path.insert(0, Blocked(blocked))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
