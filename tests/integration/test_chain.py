"""A run by the command, with `loss.mode = "chain"` and no projection: tables and matrix are built, kept, part of it."""

from pathlib import Path

import pytest

from tests.integration.conftest import Tiny
from tests.integration.test_control import Command
from tests.support.tiny_run import documents, steps_of, write_jsonl, write_run
from xtoken_services.common.run.resolve import resolve_run


@pytest.mark.slow
def test_chain_and_p_kl_learn_from_files_built_at_the_start(
    tiny: Tiny, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.path / "cache"))
    teachers = [
        {"model": tiny.assets.teacher, "context_length": 96},
        {"model": tiny.assets.other_teacher, "context_length": 80},
    ]
    spec = tiny.spec(
        teacher=teachers,
        records=64,
        loss={"mode": "chain", "teacher_modes": ["none", "p_kl"]},
        eval={"path": write_jsonl(tiny.path / "heldout.jsonl", documents(4, seed=5))},
    )
    document = spec.model_dump(mode="json", exclude_none=True)  # all of it: what is left out, the command chooses
    document["loss"]["teacher_modes"] = ["none", "p_kl"]
    command = Command(tiny.path, "run", str(write_run(tiny.path, document)), cwd=planted)
    assert command.ended() == 0, command.said()
    lines = steps_of(spec.output)
    assert lines[-1]["kl_loss_t0"] < lines[0]["kl_loss_t0"]
    assert lines[-1]["kl_loss_t1"] < lines[0]["kl_loss_t1"]
    assert all(lines[0][f"chain_{part}_t0"] > 0 for part in ("start", "inner", "end"))
    run = resolve_run(spec)
    assert run.same_tokenizer == (False, False)
    files = [path.parent.name if path else None for path in run.pair_files]
    assert files == ["chain", "projection"]
    own = {"model": tiny.assets.student, "context_length": 64, "weight": 0.1}
    loss = {"mode": "chain", "teacher_modes": ["none", "p_kl", "none"]}
    assert resolve_run(tiny.spec(teacher=[*teachers, own], loss=loss)).same_tokenizer[2]
