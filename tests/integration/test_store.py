"""Runs whose teacher's output comes from a store: built by the real processes, read by a run without a teacher."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.integration.conftest import DEADLINE_S, Crew, Start, Tiny
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl, write_run
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset.order import record_at
from xtoken_core.teacher_store.identity import StoreError, identity_of
from xtoken_core.teacher_store.shards import FRAMES, INDEX, Entry
from xtoken_core.teacher_store.store import TeacherStore, empty_values
from xtoken_core.teacher_store.writing import ShardWriter, drop_records
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.cli.store import store_app
from xtoken_services.common.files.allowed_paths import RefusedError
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunState
from xtoken_services.common.stores.store_build import as_part_of, build_spec
from xtoken_services.common.stores.store_records import check_stores, missing_steps
from xtoken_services.common.stores.teacher_stores import skip_condition
from xtoken_services.common.text import measured_text
from xtoken_services.common.text.collation import open_data
from xtoken_services.common.text.run_order import record_of
from xtoken_services.control.validation import SpecValidator
from xtoken_services.supervisor.local_run import run_locally, run_to_end
from xtoken_services.supervisor.run import Run
from xtoken_services.supervisor.store_build import resolve_build, store_build
from xtoken_services.teacher.prepare import TeacherModel
from xtoken_services.teacher.store_writer import StoreWriter


def build(spec: RunSpec, store: Path) -> TeacherStore:
    """Build the store of a run's first teacher."""
    result = run_to_end(store_build(build_spec(spec, 0, str(store)), str(store), run=spec), show=False)
    assert result.state == RunState.COMPLETED, result.error
    return TeacherStore.open(str(store))


def of_store(spec: RunSpec, store: Path, output: Path, **settings: Any) -> RunSpec:
    """The same run, its first teacher read from a store."""
    teacher = spec.teacher[0].model_copy(update={"store": str(store), **settings})
    return RunSpec.model_validate(
        spec.model_copy(update={"teacher": (teacher, *spec.teacher[1:]), "output": output}).model_dump()
    )


def losses(spec: RunSpec, start: Start, positions: int) -> torch.Tensor:
    """The losses of a run that ended well, having trained each position once."""
    return losses_of(start(spec), positions)


def losses_of(crew: Crew, positions: int) -> torch.Tensor:
    """The losses of a run that was started, once it has ended well."""
    spec, ending = crew.spec, crew.join()
    assert ending.state == RunState.COMPLETED, ending.error
    steps = steps_of(spec.output)
    assert [i for line in steps for i in line["ids"]] == list(range(positions))
    return torch.tensor([line["loss"] for line in steps])


def reads_its_store(spec: RunSpec) -> bool:
    """Whether the teacher's process of each rank has read the store and loaded no model."""
    logs = [path.read_text() for path in (spec.output / "logs").glob("teacher-*.log")]
    assert len(logs) == spec.workers.ranks
    return all("teacher loaded from the store" in log for log in logs)


def damage(store: Path, entry: Entry) -> None:
    """Flip a bit within a record."""
    content = bytearray((store / entry.shard).read_bytes())
    content[entry.offset + entry.size // 2] ^= 1
    (store / entry.shard).write_bytes(content)


def test_a_build_divides_long_documents_as_its_run_does(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_module: str, request: dict[str, Any], **_: Any) -> int:
        return int(min(context for _, _, context in request["sides"]))

    monkeypatch.setattr(measured_text, "ask_child", measured)  # the measurement itself imports transformers
    teachers: list[dict[str, Any]] = [
        {"model": tiny.assets.teacher, "context_length": 96, "content": "hidden"},
        {"model": tiny.assets.other_teacher, "context_length": 32},
    ]
    changes = {"loss": {"mode": "alm", "vocab_topk": None}, "data": {"long": "split"}}
    spec = tiny.spec(records=100, teacher=teachers, eval={}, **changes)
    run = resolve_run(spec)
    built = as_part_of(resolve_run(build_spec(spec, 0, str(tiny.path / "store"))), spec)
    assert run.piece_bytes == built.piece_bytes == 32
    assert identity_of(built, 0) == identity_of(run, 0)
    assert (built.records, built.positions) == (run.records, run.positions)
    TeacherStore.create(str(tiny.path / "store"), identity_of(built, 0))
    first = spec.teacher[0].model_copy(update={"store": str(tiny.path / "store"), "store_missing": "compute"})
    stored = resolve_run(spec.model_copy(update={"teacher": (first, spec.teacher[1])}))
    with pytest.raises(StoreError, match=r"of the text are not in the store .*, record 0 first"):
        check_stores(stored, completed=True)
    other = stored.model_copy(update={"data_fingerprint": "0" * 64})
    with pytest.raises(StoreError, match=r"what differs is the text \(data\)"):
        check_stores(other, completed=True)


def test_a_conversation_that_a_template_refuses_is_skipped_for_this_template_only(tiny: Tiny) -> None:
    data, templates = tiny.path / "train.jsonl", {name: tiny.path / f"{name}.jinja" for name in "ab"}
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    data.write_text(f"{json.dumps({'messages': talk})}\n{json.dumps({'text': ''})}\n")
    for name, file in templates.items():
        file.write_text("{% for m in messages %}" + name + "{{ m.content }}{% endfor %}")
    model = {"context_length": 64, "chat_template": templates["a"]}

    def run(student: Path, train_on: str = "completions") -> ResolvedRun:
        changes = {"student": {**model, "model": tiny.assets.student, "chat_template": student}, "data": {"path": data}}
        changes["data"]["train_on"] = train_on
        teacher = [{**model, "model": tiny.assets.teacher, "content": "hidden"}]
        return resolve_run(tiny.spec(teacher=teacher, loss={"mode": "alm"}, **changes))

    one, other = run(templates["a"]), run(templates["b"])
    conditions = [skip_condition(each, 0) for each in (one, other, run(templates["a"], "all"))]
    assert len(set(conditions)) == 3
    assert skip_condition(run(templates["a"]), 0) == conditions[0]
    store = TeacherStore.create(str(tiny.path / "store"), identity_of(one, 0))
    shard = ShardWriter(store.files, 1 << 20)
    writer: Any = SimpleNamespace(run=one, index=open_data(one), shard=shard)
    StoreWriter._skip(writer, {0: "refused", 1: "empty"})
    shard.flush()
    store.refresh()
    assert (missing_steps(one, store), store.missing(range(2), conditions[1])) == ([[]], [0])
    assert [[record_of(other, p) for p in step] for step in missing_steps(other, store)[0]] == [[0]]


def test_a_build_reads_only_what_its_store_lacks(assets: TinyAssets, tmp_path: Path) -> None:
    teacher = assets.first_teacher(content="hidden")
    spec, address = tiny_spec(assets, tmp_path, records=24, teacher=[teacher]), str(tmp_path / "store")
    building = build_spec(spec, None, address)
    identity = identity_of(resolve_run(building), 0)
    shard = ShardWriter(TeacherStore.create(address, identity).files, 1 << 20)
    for record in set(range(24)) - {3, 4, 17, 21}:
        shard.add(record, 1, "d", b"frame")
    shard.flush()
    resolved, _ = resolve_build(store_build(building, address, run=spec), store=address, run=spec)
    (step,) = missing_steps(resolved, TeacherStore.open(address))[0]
    assert {record_of(resolved, position) for position in step} == {3, 4, 17, 21}


CONTENTS = pytest.mark.parametrize("content", [{"content": "hidden"}, {"content": "topk", "topk": 1000}])


def computed_and_stored(tiny: Tiny, content: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a run with a teacher that computes, and of the same run with the store of its output."""
    teacher = tiny.assets.first_teacher(**content)
    changes = {"loss": {"vocab_topk": None}, "data": {"epochs": 2}, **changes}
    spec = tiny.spec(records=48, teacher=[teacher], **changes)
    computed = losses(spec, tiny.start, 96)
    store = build(spec, tiny.path / "store")
    assert sorted(store.entries) == list(range(48))
    stored = of_store(spec, tiny.path / "store", tiny.path / "stored")
    found = losses(stored, tiny.start, 96)
    last = steps_of(stored.output)[-1]
    assert last["store_hits"] == 8
    assert last["store_misses"] == 0
    assert last["store_bytes"] > 0
    assert reads_its_store(stored)
    return computed, found


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["on", "off"])
@CONTENTS
def test_a_run_from_a_store_equals_one_whose_teacher_computes(
    tiny: Tiny, content: dict[str, Any], packing: str
) -> None:
    computed, stored = computed_and_stored(tiny, content, train={"packing": packing})
    torch.testing.assert_close(stored, computed, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "queue"])
def test_a_stored_teacher_is_killed_beside_one_that_computes(tiny: Tiny, transport: str) -> None:
    second = {"model": tiny.assets.other_teacher, "context_length": 96, "projection": tiny.assets.other_projection}
    teachers = [tiny.assets.first_teacher(content="hidden"), second | {"content": "topk"}]
    changes = {"loss": {"vocab_topk": None}, "data": {"epochs": 2}, "workers": {"transport": transport}}
    spec = tiny.spec(records=48, teacher=teachers, **changes)
    computed = losses(spec, tiny.start, 96)
    build(spec, tiny.path / "store")
    crew = tiny.start(of_store(spec, tiny.path / "store", tiny.path / "stored"))
    crew.wait_for_steps(2)
    crew.kill("teacher-0-0")
    torch.testing.assert_close(losses_of(crew, 96), computed, rtol=1e-5, atol=1e-6)
    assert len(list((tiny.path / "stored" / "logs").glob("teacher-0-0.*.log"))) > 1


@pytest.mark.gpu
@CONTENTS
def test_a_run_from_a_store_equals_one_whose_teacher_computes_on_a_gpu(tiny: Tiny, content: dict[str, Any]) -> None:
    computed, stored = computed_and_stored(tiny, content, workers={"device": "cuda"})
    torch.testing.assert_close(stored, computed, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_run_reads_the_store_that_a_build_has_written(assets: TinyAssets, tmp_path: Path) -> None:
    teacher = assets.first_teacher(content="hidden")
    held_out = {"path": write_jsonl(tmp_path / "heldout.jsonl", documents(12, seed=5)), "every": 2}
    spec = tiny_spec(assets, tmp_path, records=24, teacher=[teacher], loss={"vocab_topk": None}, eval=held_out)
    store = build(spec, tmp_path / "store")
    assert sorted(store.entries) == list(range(24))
    measured = json.loads((tmp_path / "store" / "build" / "teacher-0-held-out.json").read_text())["bits_per_byte"]
    model = TeacherModel(AutoModelForCausalLM.from_pretrained(assets.teacher))
    text = TextTokenizer(AutoTokenizer.from_pretrained(assets.teacher), "teacher")
    lines = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for record, ids in enumerate(text.encode(lines, specials=True)):
        stored = torch.empty(1, store.entries[record].tokens, 32)
        store.read_into(record, stored[0].numpy())
        computed = model.hidden(torch.tensor(ids).unsqueeze(0))[:, : stored.shape[1]]
        torch.testing.assert_close(stored[:, : computed.shape[1]], computed, rtol=1e-5, atol=1e-6)
    damage(tmp_path / "store", store.entries[5])
    stored_run = of_store(spec, tmp_path / "store", tmp_path / "stored", store_missing="skip")
    result = run_locally(stored_run, show=False)
    assert result.state == RunState.COMPLETED, result.error
    steps = steps_of(stored_run.output)
    skipped = next(position for position in range(24) if record_at(position, records=24, seed=7, shuffle=True) == 5)
    assert sorted(i for line in steps for i in line["ids"]) == sorted({*range(24)} - {skipped})
    assert [i for line in steps for i in line["skipped"]] == [skipped]
    assert (sum(line["store_hits"] for line in steps), sum(line["store_misses"] for line in steps)) == (23, 1)
    assert reads_its_store(stored_run)
    evaluations = [json.loads(line) for line in (stored_run.output / "eval.jsonl").read_text().splitlines()]
    assert [row["teacher_bits_per_byte"] for row in evaluations] == [measured] * len(evaluations), "as its build found"
    log = next((stored_run.output / "logs").glob("collator-0*.log")).read_text()
    assert "train.jsonl:6: record 5 of the text is damaged in the store" in log
    other = tiny_spec(assets, tmp_path / "other", records=25, teacher=[teacher], loss={"vocab_topk": None})
    with pytest.raises(StoreError, match=r"what differs is the text \(data\), the number of records"):
        resolve_run(of_store(other, tmp_path / "store", tmp_path / "no"))
    another = {"model": assets.other_teacher, "projection": assets.other_projection}
    with pytest.raises(StoreError, match=r"the teacher's tokenizer"):
        resolve_run(of_store(spec, tmp_path / "store", tmp_path / "no", **another))


@pytest.mark.slow
def test_a_run_computes_what_its_store_lacks(assets: TinyAssets, tmp_path: Path) -> None:
    teacher = assets.first_teacher(content="topk")
    spec = tiny_spec(assets, tmp_path, records=24, teacher=[teacher], loss={"vocab_topk": None})
    store = build(spec, tmp_path / "store")
    whole, before = {n: bytes(store.frame(n)) for n in range(24)}, len(steps_of(tmp_path / "store" / "build"))
    drop_records(store.files, store.entries[7].shard.removesuffix(FRAMES) + INDEX, {7, 8, 9})
    damage(tmp_path / "store", store.entries[5])
    stored = of_store(spec, tmp_path / "store", tmp_path / "stored", store_missing="compute")
    result = run_locally(stored, show=False)
    assert result.state == RunState.COMPLETED, result.error
    steps = steps_of(stored.output)
    assert sorted(i for line in steps for i in line["ids"]) == list(range(24))
    assert (sum(line["store_hits"] for line in steps), sum(line["store_misses"] for line in steps)) == (24, 0)
    computed = steps_of(tmp_path / "store" / "build")[before:]
    assert sum(len(line["ids"]) for line in computed) == 4, "records that are stored are not computed again"
    again = TeacherStore.open(str(tmp_path / "store"))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    result = run_locally(stored, show=False)
    assert result.state == RunState.COMPLETED and not (tmp_path / "store").exists(), "a complete run needs no store"
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    assert again.missing(range(24), "") == []
    for record in set(range(24)) - {5, 7, 8, 9}:
        assert bytes(again.frame(record)) == whole[record]
    assert reads_its_store(stored)
    with pytest.raises(RefusedError, match="a control plane builds no store"):
        SpecValidator(None, tmp_path).validate(stored)
    (tmp_path / "store" / again.entries[9].shard).unlink()
    damage(tmp_path / "store", again.entries[0])
    index = tmp_path / "store" / again.entries[0].shard.replace(FRAMES, INDEX)
    index.write_bytes(index.read_bytes()[:-2])
    file = write_run(tmp_path, spec.model_dump(mode="json") | {"eval": "none"})  # else it would hold back some text
    command = [sys.executable, "-m", "xtoken_services.cli", "store", "build", file]
    subprocess.run([*command, "--out", tmp_path / "store", "--verify"], check=True, timeout=DEADLINE_S)
    assert TeacherStore.open(str(tmp_path / "store")).damaged(range(24)) == {}


def test_a_dry_build_writes_nothing(assets: TinyAssets, tmp_path: Path) -> None:
    teacher = assets.first_teacher(content="hidden")
    spec = tiny_spec(assets, tmp_path, records=24, teacher=[teacher], loss={"vocab_topk": None})
    before = sorted(tmp_path.rglob("*"))
    file = write_run(tmp_path, spec.model_dump(mode="json") | {"eval": "none"})
    command = ["build", str(file), "--out", str(tmp_path / "store"), "--dry-run", "--json"]
    shown = CliRunner().invoke(store_app, command, catch_exceptions=False)
    assert [json.loads(shown.stdout)[name] for name in ("records", "missing")] == [24, 24]
    assert sorted(tmp_path.rglob("*")) == sorted([*before, file])


@pytest.mark.slow
def test_two_writers_complete_a_store_after_kills_and_a_forced_end(assets: TinyAssets, tmp_path: Path) -> None:
    teacher = assets.first_teacher(content="topk")
    spec = tiny_spec(assets, tmp_path, records=160, teacher=[teacher], workers={"ranks": 2})
    rng, address = random.Random(4), str(tmp_path / "store")
    run = store_build(build_spec(spec, None, address), address, run=spec)
    run.start()
    try:
        for name in ("writer-1", "writer-0"):
            steps_before = len(steps_of(run.spec.output))
            wait(run, lambda steps=steps_before: len(steps_of(run.spec.output)) > steps)
            time.sleep(rng.uniform(0.0, 0.3))
            worker = next(worker for worker in run.status().workers if worker.name == name)
            psutil.Process(worker.pid).kill()
            wait(run, lambda name=name: restarts(run, name) > 0)
        wait(run, lambda: len(steps_of(run.spec.output)) > 2)
    finally:
        run.stop(now=True)
        assert run.over.wait(120.0)
    after_kills = TeacherStore.open(address)
    assert after_kills.damaged(sorted(after_kills.entries)) == {}
    built = build(spec, tmp_path / "store")
    assert sorted(built.entries) == list(range(160))
    assert built.damaged(range(160)) == {}
    undisturbed = build(spec, tmp_path / "other")
    for record in range(160):
        values = [empty_values(each.identity, each.entries[record].tokens) for each in (built, undisturbed)]
        for each, out in zip((built, undisturbed), values, strict=True):
            each.read_into(record, out)
        assert built.entries[record].digest == undisturbed.entries[record].digest
        k = built.identity.topk
        found, expected = (torch.from_numpy(each[:, :k]) for each in values)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def restarts(run: Run, name: str) -> int:
    """How often a worker was restarted."""
    return next((w.restarts for w in run.status().workers if w.name == name), 0)


def wait(run: Run, condition: Callable[[], bool]) -> None:
    """Until the condition holds; fails if the build ends before."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert not run.over.is_set(), run.result
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.01)
