"""Child processes that read foreign texts and files: deadline, memory, output; TOML from another user."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import cases
from tests.support.waiting import until
from tests.unit.control.stored_runs import spec
from xtoken_core import errors
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_core.projection.pair_cache import PairCache
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.models.gguf import gguf_model
from xtoken_services.common.processes.child_process import ChildError, ask_child
from xtoken_services.common.run.inspection import inspect_run
from xtoken_services.common.run.loss_import import check_importable
from xtoken_services.common.tables.pair_files import pair_file
from xtoken_services.common.tokenizers.vocabulary import vocabulary_size
from xtoken_services.control.isolated import toml_text
from xtoken_services.control.isolated.toml_text import parse_toml

slow = pytest.mark.slow
BEGIN = "from xtoken_services.common.processes.child_process import answer_requests, ask_child\n"


def module(directory: Path, monkeypatch: pytest.MonkeyPatch, program: str, name: str = "asked") -> str:
    """A module whose answer is what a function body returns; it has `request` and `progress`."""
    lines = "\n    ".join(["def answer(request, progress):", *program.splitlines()])
    (directory / f"{name}.py").write_text(f"{BEGIN}{lines}\nif __name__ == '__main__': answer_requests(answer)\n")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return name


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(program: str, request: dict[str, Any] | None = None, **limits: Any) -> Any:
        return ask_child(module(tmp_path, monkeypatch, program), request or {}, **{"silence_s": 60.0, **limits})

    return run


def test_results(run: Callable[..., Any]) -> None:
    printed = "import os; print('no answer'); os.system('echo nor this'); return request"
    assert run(printed, {"text": "\ud800" + "x" * 2_000_000}) == {"text": "\ud800" + "x" * 2_000_000}


@pytest.mark.parametrize("threads", [False, True])
def test_threads_are_few_whatever_the_machine_has(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(96))
    monkeypatch.setenv("OMP_NUM_THREADS", "96")
    told = run("import os; return os.environ['OMP_NUM_THREADS']", threads=threads)
    assert told == ("8" if threads else "1")


def test_progress(run: Callable[..., Any], tmp_path: Path) -> None:
    seen = []

    def note(activity: str, done: float) -> None:
        seen.append((activity, done))
        if activity == "half":
            (tmp_path / "go").touch()

    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(.01)\nreturn 1"
    assert run(f"progress('half', 0.5)\n{wait}", progress=note) == 1
    assert seen == sorted(seen) and {("half", 0.5)} <= set(seen) <= {("", 0.0), ("half", 0.5)}


def all_gone(pids: list[int]) -> bool:
    states = [Path(f"/proc/{pid}/stat") for pid in pids]
    return not any(f.exists() and f.read_text().split()[2] not in "ZX" for f in states)


@pytest.mark.parametrize("nested", [False, pytest.param(True, marks=slow)])
def test_deadline_ends_the_child_and_its_children(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    began = time.monotonic()
    reported = f"open({str(tmp_path / 'pids')!r}, 'w').write"
    program = (
        f"import os, subprocess; {reported}(f\"{{os.getpid()}} {{subprocess.Popen(['sleep', '60']).pid}}\"); os.wait()"
    )
    if nested:
        module(tmp_path, monkeypatch, program, "inner")
        program = "return ask_child('inner', {}, silence_s=60.0)"
    with pytest.raises(ChildError, match="it took longer than 3 s"):
        run(program, silence_s=3.0)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert time.monotonic() - began < 30 and len(pids) == 2
    until(lambda: all_gone(pids))


def test_a_child_that_reads_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deaf.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ChildError, match="it took longer than 1 s"):
        ask_child("deaf", {"text": "x" * 2_000_000}, silence_s=1.0)


def test_keys_are_not_inherited(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "XTOKEN_ENGINE_KEY", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "secret")
    names = set(run("import os; return list(os.environ)", environment={"XTOKEN_ROOTS": "{}"}))
    assert {"XDG_CACHE_HOME", "XTOKEN_ROOTS", "PATH"} <= names and not {"HF_TOKEN", "XTOKEN_ENGINE_KEY"} & names


def test_memory(run: Callable[..., Any]) -> None:
    with pytest.raises(ChildError, match="ran out of memory: it may need more than 256 MiB"):
        run("b'x' * (1 << 29)", memory=256 << 20)


@cases(
    "program, reason",
    ("import os; os.kill(os.getpid(), 11)", "was killed by signal 11"),
    ("raise ValueError('of a kind')", "of a kind"),
    ("raise SystemExit(3)", "exited with status 3"),
    ("raise SystemExit(0)", "exited with status 0"),
)
def test_failure(run: Callable[..., Any], program: str, reason: str) -> None:
    with pytest.raises(ChildError, match=reason):
        run(program)


@pytest.mark.parametrize(
    "line", ["no json", "[]", "{}", '{"progress": 1}', '{"error": "", "message": "m"}', "[" * 20_000]
)
def test_lines_that_are_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "odd.py").write_text(f"print({line!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ChildError, match="it printed a line that is no answer"):
        ask_child("odd", {}, silence_s=60.0)


@pytest.mark.parametrize("error", ["ConfigError", "InputError", "XtokenError"])
def test_errors_keep_their_kind(run: Callable[..., Any], error: str) -> None:
    with pytest.raises(getattr(errors, error), match=r"^of the child$") as raised:
        run(f"from xtoken_core import errors; raise errors.{error}('of the child')")
    assert type(raised.value).__name__ == error


def read_by_transformers(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("{}")
    vocabulary_size(directory)


def convert(directory: Path) -> None:
    (directory / "model.gguf").write_bytes(b"GGUF")
    gguf_model("student.model", directory / "model.gguf")


@cases(
    "call",
    pytest.param(read_by_transformers, marks=slow),
    pytest.param(convert, marks=slow),
    pytest.param(
        lambda directory: pair_file(PairCache(directory), "chain", directory, directory, ("a", "b"), "teacher"),
        marks=slow,
    ),
    lambda directory: check_importable(LossConfig(mode="custom"), "no_such_module:A"),
    lambda directory: parse_toml("a = "),
)
def test_no_module_of_the_working_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], None]
) -> None:
    place, other = tmp_path / "place", tmp_path / "other"
    for directory in (place, other):
        directory.mkdir()
    for name in ("json", "torch", "transformers", "xtoken_services", "gguf"):
        (place / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name + ' '!r})\n")
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises((ConfigError, InputError)):
        call(other)
    assert not (tmp_path / "executed").exists()


@cases(
    "text, reason",
    ("[" * 5000, "Invalid TOML"),
    ("a = " + "[" * 3000, "nested too deeply"),
    ("a" + ".a" * 40 + "=1", "nested deeper"),
    ("a = " + "9" * 5000, "4300 digits"),
    ("a = 0x" + "f" * 6000, "does not fit 64 bits"),
    ("a = [" + "1," * 20_000 + "]", "more than 4096 values"),
    ("a = '" + "x" * 70_000 + "'", "larger than 65536"),
)
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
    with pytest.raises(InputError, match=r"vocab_size = 1e\+30 is more than"):
        inspect_run(checked, lambda done, total: None, roots.environment)
    config.write_text(json.dumps({"vocab_size": 300}))
    (tmp_path / "data" / "projection.pt").touch()
    (config.parent / "tokenizer.json").write_text("{}")
    os.mkfifo(tmp_path / "data" / "model" / "model.safetensors")
    with pytest.raises(InputError, match=r"cannot read the student's weights .*: not a regular file"):
        inspect_run(checked, lambda done, total: None, roots.environment)
