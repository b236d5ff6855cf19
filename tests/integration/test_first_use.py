"""First use: five commands with pretrained models, and the demo from a wheel outside the repository."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

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
import sys, xtoken_services, services
assert services.OWN
from pathlib import Path
from xtoken_services.demo.run import run_demo
from xtoken_services.demo.run import Training
assert Path(xtoken_services.__file__).is_relative_to(sys.prefix), xtoken_services.__file__
run_demo(Path("demo-out"), teacher=Training(steps=4), student=Training(steps=2, eval_every=2))
"""
DISTILL = """
import services, xtoken
assert services.OWN
pair = {"student": "demo-out/student", "teacher": "demo-out/teacher", "data": "demo-out/corpus/train.jsonl"}
result = xtoken.distill(**pair, output="small", eval="none", train={"max_steps": 2}, workers={"device": "cpu"})
assert result.summary["steps"] == 2 and (result.model / "model.safetensors").is_file()
"""

TYPED = """
from pathlib import Path
import services
import xtoken
from xtoken_core.config.spec import RunSpec
from xtoken_services.cli import main

assert services.OWN
result: xtoken.DistillResult = xtoken.distill(student=Path("s"), teacher=Path("t"), data="train.jsonl")
xtoken.distill(show="yes")  # type: ignore[arg-type]
spec: type[RunSpec] = RunSpec
RunSpec.absent  # type: ignore[attr-defined]
main.absent  # type: ignore[attr-defined]
"""


def xtoken(directory: Path, *arguments: str) -> str:
    """Run a command in a directory; return what it prints."""
    result = subprocess.run(
        [sys.executable, "-P", "-m", "xtoken_services.cli", *arguments], cwd=directory, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/services", "XDG_CACHE_HOME": str(directory / "cache")},
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


class Installed(NamedTuple):
    """The wheel in an environment of its own, and a user's project outside the tree with a package `services`."""

    scripts: Path
    project: Path
    env: dict[str, str]

    def run(self, *command: str | Path) -> None:
        """Run a command in the project."""
        done = subprocess.run(command, cwd=self.project, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build the wheel from a copy of the tree and install it."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    tree, dist, home = tmp_path / "tree", tmp_path / "dist", tmp_path / "venv"
    tree.mkdir()
    for name in ("xtoken", "xtoken_core", "services", "docs"):
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
    project = tmp_path / "project"
    (project / "services").mkdir(parents=True)
    (project / "services" / "__init__.py").write_text("OWN = True\n")
    (project / "typed.py").write_text(TYPED)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return Installed(home / "bin", project, env)


def test_demo_and_a_run_from_a_wheel(installed: Installed) -> None:
    installed.run(installed.scripts / "xtoken", "demo", "--help")
    installed.run(installed.scripts / "python", "-c", DEMO)
    installed.run(installed.scripts / "python", "-c", DISTILL)
    assert (installed.project / "demo-out" / "report.html").is_file()
    shown = "from xtoken_services.control.web.documents import documents; documents()['docs/quickstart.md']"
    installed.run(installed.scripts / "python", "-c", shown)
    assert (installed.project / "demo-out" / "runs" / "distilled" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_mypy_sees_the_types(installed: Installed, editable: bool) -> None:
    python = sys.executable if editable else str(installed.scripts / "python")
    installed.run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "typed.py")
