"""Runs that are started in a directory with files named as modules that they import: none of those is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.integration.test_control import run_file
from tests.support.control_token import bearer
from tests.support.tiny_run import TinyAssets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_services.supervisor.run_record import RunState

PROGRAM = (sys.executable, "-P", "-m", "xtoken_services.cli")
"""As the installed command starts: without the working directory among the places of modules."""
PLANTED = ("json", "numpy", "safetensors", "sentencepiece", "tokenizers", "torch", "transformers", "xtoken_core")
DEADLINE_S = 180.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory whose modules leave their names in the file `executed`."""
    directory = tmp_path / "place"
    directory.mkdir()
    for name in PLANTED:
        (directory / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name + ' '!r})\n")
    return directory


def spec_of(assets: TinyAssets, tmp_path: Path, output: Path) -> RunSpec:
    """A run of two steps that builds its own chain tables."""
    teacher = {"model": assets.teacher, "context_length": 96}
    loss = {"mode": "chain", "vocab_topk": None}
    return tiny_spec(assets, tmp_path, records=16, output=output, teacher=[teacher], loss=loss)


@pytest.mark.parametrize("by", ["command", "control plane"])
def test_no_module_of_the_working_directory_is_executed(
    place: Path, assets: TinyAssets, tmp_path: Path, by: str
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    spec = spec_of(assets, tmp_path, tmp_path / "runs" / "one")
    said = tmp_path / "output"
    file = run_file(spec, tmp_path)
    arguments = ["run", str(file)]
    if by == "control plane":
        roots = ["--root", str(assets.student.parent), "--root", str(tmp_path)]
        arguments = ["control", "--port", "0", "--runs-dir", str(tmp_path / "runs"), *roots]
    with said.open("w") as log:
        process = subprocess.Popen([*PROGRAM, *arguments], cwd=place, env=environment, stdout=log, stderr=log)
    try:
        if by == "command":
            assert process.wait(DEADLINE_S) == 0, said.read_text()
        else:
            complete_by_control_plane(spec, said)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    assert len(steps_of(spec.output)) == 2


def complete_by_control_plane(spec: RunSpec, said: Path) -> None:
    """Start the run over HTTP and wait for its end."""
    deadline = time.monotonic() + DEADLINE_S

    def wait(done: Callable[[], bool]) -> None:
        while not done():
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)

    wait(lambda: "serving at" in said.read_text())
    (url,) = re.findall(r"http://\S+:\d+", said.read_text())[-1:]
    with httpx.Client(base_url=url, timeout=60, headers=bearer()) as http:
        answer = http.post("/v1/runs", json=spec.model_dump(mode="json") | {"eval": "none"})
        assert answer.status_code == 201, answer.text
        wait(lambda: RunState(http.get(answer.headers["location"]).json()["state"]).over)
        assert http.get(answer.headers["location"]).json()["state"] == "completed", said.read_text()
