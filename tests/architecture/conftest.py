"""Running a program of the project with some packages blocked."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("without.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "services")])}


def run_code(code: str, *arguments: str) -> str:
    """What a program given as text prints, in a fresh interpreter; fails with its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def command_without(packages: list[str], module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module` in which importing any of `packages` raises."""
    return [sys.executable, str(RUNNER), ",".join(packages), module, *arguments]


def run_without(packages: list[str], module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    command = command_without(packages, module, *arguments)
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)


@contextmanager
def started_without(packages: list[str], module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start it, and end it at the end."""
    process = subprocess.Popen(
        command_without(packages, module, *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.communicate()
