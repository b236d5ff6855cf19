"""First use: five commands with pretrained models, and the demo from a wheel outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.architecture.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

STATE = Path(os.environ.get("XTOKEN_REAL_STATE", ROOT / "runs" / "real"))
STUDENT, TEACHER = (STATE / "models" / name for name in ("smollm2-135m-instruct", "gemma3-270m"))
SMALL = (
    "student.context_length=64", "train.max_steps=2", "train.samples_per_step=2", "train.micro_batch_tokens=128",
    "eval.max_bytes=2000", "eval.every=2", "workers.collators=1", "workers.device=cpu",
)  # fmt: skip
DEMO = """
import sys, services
from pathlib import Path
from services.demo.run import run_demo
from services.demo.specs import StudentTraining
from services.demo.teacher import TeacherTraining
assert Path(services.__file__).is_relative_to(sys.prefix), services.__file__
run_demo(Path("demo-out"), teacher=TeacherTraining(steps=4), student=StudentTraining(steps=2, eval_every=2))
"""


def xtoken(directory: Path, *arguments: str) -> str:
    """Run a command in a directory; return what it prints."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "services.cli", *arguments], cwd=directory, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(directory / "cache")},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.skipif(
    not (STUDENT.is_dir() and TEACHER.is_dir()),
    reason="no models: prepare them by python -m experiments.real, or name their directory by XTOKEN_REAL_STATE",
)
def test_first_run_in_five_commands(tmp_path: Path) -> None:
    paragraphs = [part for part in (ROOT / "README.md").read_text("utf-8").split("\n\n") if len(part) > 80]
    lines = [json.dumps({"text": f"{number}. {part}"}) for number in range(20) for part in paragraphs]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pair = ("--student", str(STUDENT), "--teacher", str(TEACHER))

    shown = xtoken(tmp_path, "align", "show", *pair, "naïve 2024")
    assert "student:" in shown and "teacher:" in shown
    assert "wrote run.toml" in xtoken(tmp_path, "init", *pair, "--data", "train.jsonl")
    settings = [part for setting in SMALL for part in ("--set", setting)]
    assert "max_steps = 2" in xtoken(tmp_path, "run", "run.toml", "--dry-run", *settings)
    assert "by cross-entropy only" in xtoken(tmp_path, "run", "run.toml", "--baseline", *settings)
    for output in ("runs/run", "runs/run-baseline"):
        summary = json.loads((tmp_path / output / "summary.json").read_text("utf-8"))
        assert summary["trained"] == 4 and (tmp_path / output / "model" / "model.safetensors").is_file()
    checked = xtoken(tmp_path, "align", "show", "--student", "runs/run/model", "--teacher", str(TEACHER), "naïve 2024")
    assert checked == shown


def test_demo_from_a_wheel(tmp_path: Path) -> None:
    tree, dist, home = tmp_path / "tree", tmp_path / "dist", tmp_path / "venv"
    tree.mkdir()
    for name in ("xtoken", "xtoken_core", "services"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(dist), str(tree)]
    subprocess.run([*pip, *build], check=True)
    venv.create(home)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    # What xtoken depends on is taken from this environment, but not xtoken: the links in it are not followed.
    (own / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    [wheel] = dist.glob("*.whl")
    subprocess.run([*pip, "--python", str(home / "bin" / "python"), "install", "--no-deps", str(wheel)], check=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run([home / "bin" / "xtoken", "demo", "--help"], cwd=outside, env=clean, capture_output=True)
    assert shown.returncode == 0, shown.stderr.decode()[-2000:]
    demo = subprocess.run([home / "bin" / "python", "-c", DEMO], cwd=outside, env=clean, capture_output=True, text=True)
    assert demo.returncode == 0, (demo.stdout + demo.stderr)[-4000:]
    assert (outside / "demo-out" / "report.html").is_file()
    assert (outside / "demo-out" / "runs" / "distilled" / "model" / "model.safetensors").is_file()
