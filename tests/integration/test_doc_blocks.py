"""README and quick start as typed: their shell blocks in a fresh shell, over small models of the demo."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.contract.processes import free_port
from tests.doc_blocks import ROOT, commands_of, fenced
from xtoken_services.demo.run import Training, run_demo

SMALL = {
    "context_length": 64, "samples_per_step": 4, "max_steps": 6, "micro_batch_tokens": 256, "warmup_steps": 1,
    "every": 3,
}  # fmt: skip
"""Settings of the documents' run files that are replaced, so that a run takes seconds."""
SERVERS = [("xtoken", name) for name in ("control", "queue", "collator", "teacher", "trainer")]
NOT_RUN = [("make",), ("xtoken", "demo")]
"""Commands that other tests run; their names are checked by the fast test of commands."""
DEADLINE_S = 300
WAIT = "waited=0; until {condition}; do sleep 1; waited=$((waited+1)); [ $waited -lt " + str(DEADLINE_S) + " ]; done\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and text of a demo with few steps."""
    out = tmp_path_factory.mktemp("demo") / "demo-out"
    with (out.parent / "printed.txt").open("w", encoding="utf-8") as file:
        few = Training(steps=2, eval_every=2)
        run_demo(out, console=Console(file=file), teacher=few, student=Training(steps=2, eval_every=2))
    return out


@pytest.fixture
def workspace(demo: Path, tmp_path: Path) -> Path:
    """A directory with the environment, models and text that the pages name."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "models").mkdir()
    for name in ("student", "teacher"):
        shutil.copytree(demo / name, tmp_path / "models" / name)
    for source, name, lines in (("train", "train.jsonl", 200), ("heldout", "heldout.jsonl", 10)):
        text = (demo / "corpus" / f"{source}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / name).write_text("".join(text[:lines]), encoding="utf-8")
    return tmp_path


def write_run_file(page: Path, directory: Path) -> None:
    """Write the page's run file, named by its first line, with small settings."""
    (block,) = fenced(page, "toml")
    name = re.match(r"# ([\w-]+\.toml)", block)
    assert name is not None, f"the run file in {page.name} must begin with a comment that names it"
    for key, value in SMALL.items():
        block = re.sub(rf"^{key} = \d+", f"{key} = {value}", block, flags=re.MULTILINE)
    (directory / name[1]).write_text(block, encoding="utf-8")


def steps_of(block: str) -> Iterator[str]:
    """Yield the commands of a block as typed, without those that are not run."""
    for line in block.splitlines():
        for part in re.split(r"\s&&\s", line):
            words = next(iter(commands_of(part)), [])
            if words and not any(tuple(words[: len(skipped)]) == skipped for skipped in NOT_RUN):
                yield part


def script_of(blocks: list[str]) -> str:
    """Return a script of the blocks' commands: servers in the background, ended by pid at the end."""
    lines = ["set -e -o pipefail", 'pids=""', "trap 'kill $pids 2>/dev/null || true; wait' EXIT"]
    for step in (step for block in blocks for step in steps_of(block)):
        words = commands_of(step)[0]
        lines.append(f"echo '$ {' '.join(words)[:60]}'")
        command = re.sub(r"\s#\s.*", "", step)
        if (tuple(words[:2]) in SERVERS and "keygen" not in words) or "--watch" in words:
            log = f"{words[1]}-{len(lines)}.log"
            lines.append(f'{command} > {log} 2>&1 & last=$!; pids="$pids $last"')
            if words[1] == "control":
                lines.append(WAIT.format(condition="xtoken runs ls > /dev/null 2>&1"))
            if words[1] == "trainer":
                lines.append("wait $last")
        else:
            if words[:3] == ["xtoken", "runs", "get"]:
                state = "xtoken runs show second --json | grep -q '\"completed\"'"
                lines.append(WAIT.format(condition=state))
            lines.append(command)
    return "\n".join(lines) + "\n"


def run(script: str, directory: Path) -> str:
    """Run a script in a fresh shell whose PATH has nothing of the environment; return its output."""
    port, control = free_port(), free_port()
    script = script.replace(":7711", f":{port}").replace("xtoken control", f"xtoken control --port {control}")
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(directory), "LANG": "C.UTF-8",
        "XTOKEN_CONTROL": f"http://127.0.0.1:{control}", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", script], cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=3 * DEADLINE_S, check=False,
    )  # fmt: skip
    logs = "".join(f"\n== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in directory.glob("*.log"))
    assert done.returncode == 0, done.stdout[-4000:] + logs
    return done.stdout


def completed(output: Path) -> bool:
    """Return whether a run is complete and has left a model."""
    summary = json.loads((output / "summary.json").read_text(encoding="utf-8"))
    return bool(summary) and (output / "model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(6 * DEADLINE_S)
def test_the_readme_s_commands_run_as_typed(workspace: Path) -> None:
    page = ROOT / "README.md"
    write_run_file(page, workspace)
    (overview,) = fenced(page, "sh")
    by_hand = next(b for b in fenced(ROOT / "docs/operations.md", "sh") if b.startswith("xtoken queue --bind"))
    activation = ". .venv/bin/activate"
    assert activation in overview
    run(script_of([overview]), workspace)
    assert completed(workspace / "runs" / "run")
    (workspace / "runs").rename(workspace / "earlier-runs")
    run(script_of([activation, by_hand]), workspace)
    assert completed(workspace / "runs" / "run")


@pytest.mark.slow
@pytest.mark.timeout(6 * DEADLINE_S)
def test_the_quick_start_s_commands_run_as_typed(workspace: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    write_run_file(page, workspace)
    out = run(script_of(fenced(page, "sh")), workspace)
    assert completed(workspace / "runs" / "first")
    assert completed(workspace / "runs" / "second")
    assert (workspace / "model" / "config.json").is_file()
    assert "second" in out.partition("$ xtoken runs ls")[2]
