"""A run on a Ray cluster of three nodes, all on this machine, where there is no network but loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOOPBACK_ONLY = ROOT / "tests" / "support" / "loopback.sh"
LIMIT_S = 1500

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT_S + 60),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray"),
]


def play(scenario: str, directory: Path) -> dict[str, Any]:
    """What has come of a scenario of `ray_cluster.py`, which may use nothing outside its directory and namespace."""
    if subprocess.run([LOOPBACK_ONLY, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a network namespace, and Ray binds more than loopback outside one")
    command = [LOOPBACK_ONLY, sys.executable, "-m", "tests.integration.ray_cluster", scenario]
    env = {**os.environ, "TMPDIR": str(directory), "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["over"], done.stderr[-4000:]
    assert result["left"] == []
    assert result["private"] == []
    return result


def test_a_run_over_three_nodes_completes(tmp_path: Path) -> None:
    result = play("completes", tmp_path)
    assert (result["state"], result["error"]) == ("completed", "")
    assert result["ids"] == list(range(60))
    assert len(set(result["where"].values())) == 3
    for node in range(3):
        assert len({place for name, place in result["where"].items() if name.startswith(f"node{node}-")}) == 1


def test_a_node_removed_in_mid_run_is_replaced(tmp_path: Path) -> None:
    result = play("replaced", tmp_path)
    assert (result["state"], result["error"]) == ("completed", "")
    assert sorted(result["ids"]) == list(range(600))
    assert result["removed"] not in " ".join(result["where"].values())
    assert result["restarts"]["node0-trainer-0"] >= 1


def test_the_next_control_plane_finds_a_run_on_its_nodes(tmp_path: Path) -> None:
    result = play("adopted", tmp_path)
    assert (result["state"], result["error"]) == ("completed", "")
    assert result["ids"] == list(range(240))
    assert set(result["restarts"].values()) == {0}


def test_a_node_removed_in_mid_run_that_nothing_can_replace_is_reported(tmp_path: Path) -> None:
    result = play("reported", tmp_path)
    assert result["state"] == "failed"
    assert result["removed"] in result["error"]
    assert "was lost and nothing in the Ray cluster took its place within 30 s" in result["error"]
    assert len(set(result["ids"])) == len(result["ids"])
