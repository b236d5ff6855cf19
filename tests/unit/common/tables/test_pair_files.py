"""Files about two tokenizers in a run: what a mode reads, where it is kept, a failed and a stopped build."""

import os
import time
from pathlib import Path
from typing import get_args

import pytest

from tests.support.runs import resolved_run
from xtoken_core.config.loss import PAIR_KINDS, LossMode
from xtoken_core.config.resolved import ResolvedModel
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_core.projection.pair_cache import PairCache
from xtoken_services.common.run import resolve
from xtoken_services.common.tables import pair_files
from xtoken_services.common.tables.pair_files import cache_of, pair_file


def test_files_of_the_modes() -> None:
    projection, nothing = "projection", None
    assert {mode: PAIR_KINDS.get(mode) for mode in get_args(LossMode)} == {
        "p_kl": projection, "gold": projection, "h_kl": projection, "uld": nothing, "alm": nothing, "chain": "chain",
        "custom": nothing,
    }  # fmt: skip


def test_cache_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = resolved_run(tmp_path).spec
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_of(spec).directory == tmp_path / "user" / "xtoken"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_of(spec).directory == spec.output / "cache"
    on_ray = spec.model_copy(update={"workers": spec.workers.model_copy(update={"launcher": "ray"})})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert cache_of(on_ray).directory == spec.output / "cache"


def test_a_failed_build_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_files, "BUILDER", "no_such_module")
    with pytest.raises(
        InputError, match=r"cannot build the chain tables of the student's and teacher 1's tokenizer: .*no_such"
    ):
        pair_file(PairCache(tmp_path), "chain", tmp_path, tmp_path, ("a", "b"), "teacher 1")


def test_a_run_reads_a_file_only_for_a_loss_that_needs_one_and_other_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "quick.py").write_text(
        "from pathlib import Path\nfrom xtoken_services.common.processes.child_process import answer_requests\n"
        "def build(request, _):\n    file = Path(request['file'])\n"
        "    file.parent.mkdir(parents=True, exist_ok=True)\n    file.touch()\nanswer_requests(build)\n"
    )
    monkeypatch.setattr(pair_files, "BUILDER", "quick")
    raw = resolved_run(tmp_path).spec.model_dump()
    raw["teacher"][0]["projection"] = None
    student, other = (ResolvedModel(vocab_size=8, head_width=8, tokenizer_fingerprint=name) for name in "st")

    def file(mode: LossMode, teacher: ResolvedModel) -> Path | None:
        spec = RunSpec.model_validate(raw | {"loss": {"mode": mode}})
        return resolve._pair_file(spec, 0, student, teacher, None, same_tokenizer=teacher is student)

    assert file("alm", other) is None and file("p_kl", student) is None
    for built in (file("p_kl", other), file("chain", other)):
        assert built is not None and built.is_file() and built.is_relative_to(tmp_path / "user")


class StoppedError(Exception):
    pass


def test_a_stopped_build_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "endless.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(pair_files, "BUILDER", "endless")
    deadline = time.monotonic() + 60

    def stop(_: float) -> None:
        assert time.monotonic() < deadline
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise StoppedError

    with pytest.raises(StoppedError):
        pair_file(PairCache(tmp_path), "chain", tmp_path, tmp_path, ("a", "b"), "teacher 0", progress=stop)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
