"""Child processes that read foreign texts and files: deadline, memory, output; TOML from another user."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.unit.control.stored_runs import spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.processes.child_process import ChildError, lines_of
from xtoken_services.control.isolated import toml_text
from xtoken_services.control.isolated.inspection import inspect_run
from xtoken_services.control.isolated.toml_text import parse_toml

LIMITED = "from xtoken_services.common.processes.child_process import limit_memory; limit_memory(); "


def run(program: str, **limits: float) -> list[bytes]:
    return list(lines_of(["-c", LIMITED + program], b"text\n", **{"silence_s": 60.0, **limits}))  # type: ignore[arg-type]


def test_lines() -> None:
    assert run("import sys; print(sys.stdin.read()); print('x' * 200_000)") == [b"text", b"", b"x" * 200_000]


def test_deadline_ends_the_child_and_its_children() -> None:
    began = time.monotonic()
    program = "import os, subprocess; print(os.getpid(), subprocess.Popen(['sleep', '60']).pid, flush=True); os.wait()"
    pids: list[int] = []
    with pytest.raises(ChildError, match="it took longer than 3 s"):
        for line in lines_of(["-c", LIMITED + program], b"", silence_s=3.0):
            pids += map(int, line.split())
    assert time.monotonic() - began < 30 and len(pids) == 2
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    until = time.monotonic() + 10
    while any(f.exists() and f.read_text().split()[2] not in "ZX" for f in states) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(f.exists() and f.read_text().split()[2] not in "ZX" for f in states)


def test_memory() -> None:
    with pytest.raises(ChildError, match="ran out of memory: it may need more than 256 MiB"):
        run("b'x' * (1 << 29)", memory=256 << 20)


@pytest.mark.parametrize(("program", "reason"), [
    ("import os; os.kill(os.getpid(), 11)", "was killed by signal 11"), ("raise ValueError('of a kind')", "of a kind"),
    ("raise SystemExit(3)", "exited with status 3"),
])  # fmt: skip
def test_failure(program: str, reason: str) -> None:
    with pytest.raises(ChildError, match=reason):
        run(program)


@pytest.mark.parametrize(("text", "reason"), [
    ("[" * 5000, "Invalid TOML"), ("a = " + "[" * 3000, "nested too deeply"), ("a" + ".a" * 40 + "=1", "nested deeper"),
    ("a = " + "9" * 5000, "4300 digits"), ("a = 0x" + "f" * 6000, "does not fit 64 bits"),
    ("a = [" + "1," * 20_000 + "]", "more than 4096 values"), ("a = '" + "x" * 70_000 + "'", "larger than 65536"),
])  # fmt: skip
def test_hostile_toml(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_toml(text)


def test_toml_that_takes_the_parser_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toml_text, "DEADLINE_S", 1.0)
    with pytest.raises(ConfigError, match="cannot be parsed: it took longer than 1 s"):
        parse_toml("a." * 30_000 + "a = 1")


def test_toml() -> None:
    assert parse_toml('name = "ü"\n[train]\nlearning_rate = 1e-4') == {"name": "ü", "train": {"learning_rate": 1e-4}}


def test_errors_of_a_run_come_from_the_child(tmp_path: Path) -> None:
    (tmp_path / "data" / "model").mkdir(parents=True)
    checked = RunSpec.model_validate(spec(tmp_path, output=str(tmp_path / "out")))
    roots = Roots.of([tmp_path / "data"], [tmp_path])
    with pytest.raises(InputError, match=r"cannot read the student's model: .*config\.json: No such file"):
        inspect_run(checked, lambda done, total: None, roots.environment)
    config = tmp_path / "data" / "model" / "config.json"
    config.write_text(json.dumps({"vocab_size": 10**30}))
    (tmp_path / "data" / "projection.pt").touch()
    os.mkfifo(tmp_path / "data" / "model" / "model.safetensors")
    with pytest.raises(InputError, match=r"cannot read the student's weights .*: not a regular file"):
        inspect_run(checked, lambda done, total: None, roots.environment)
