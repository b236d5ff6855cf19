"""Runs of two teachers of which each compares its own samples only: computed, killed, stored, refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.integration.conftest import Tiny
from tests.support.tiny_run import documents, make_assets, steps_of
from tests.support.trained_student import train_briefly
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import Record
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunState
from xtoken_services.common.stores.store_build import build_spec
from xtoken_services.common.text.collation import (
    BadRecordError,
    look_at_sample,
    make_collator,
    open_data,
    row_counts,
    value_with_route,
)
from xtoken_services.common.text.run_order import record_of
from xtoken_services.supervisor.local_run import run_to_end
from xtoken_services.supervisor.store_build import store_build

NAMES: Sequence[str | None] = ("other", None, None, "code")
"""What the records of the second text name, in turns."""


def routed(tiny: Tiny, name: str, *, names: Sequence[str | None] = NAMES, **changes: Any) -> RunSpec:
    """A run of two texts: the first for teacher `code`, the second as its records say, for both if they do not."""
    texts = [tiny.path / "code.jsonl", tiny.path / "both.jsonl"]
    for number, path in enumerate(texts):
        lines = [{"text": text} for text in documents(40, seed=20 + number)]
        if number:
            lines = [line | {"teacher": names[at % len(names)]} for at, line in enumerate(lines)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = {"model": tiny.assets.other_teacher, "context_length": 96, "projection": tiny.assets.other_projection}
    settings: dict[str, Any] = {
        "teacher": [tiny.assets.first_teacher(name="code"), {**other, "name": "other"}],
        "data": {"path": (), "sources": [{"path": texts[0], "teachers": ["code"]}, {"path": texts[1]}]},
    }
    return tiny.spec(name, **(settings | changes))


def routes_of(run: ResolvedRun) -> list[tuple[int, ...]]:
    """The teachers of every position, by the file that its record is in and the name in its line."""
    index = open_data(run)
    routes = []
    for position in range(run.positions):
        number = record_of(run, position)
        (record,) = index.read([number])
        assert isinstance(record, Record)
        name = record.value.get("teacher")
        by_source = (0,) if "code.jsonl" in index.location(number) else (0, 1)
        routes.append({"code": (0,), "other": (1,), None: by_source}[name])
    return routes


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_teacher_computes_its_own_samples_also_after_kills(tiny: Tiny) -> None:
    whole = routed(tiny, "whole")
    tiny.start(whole).complete(80)
    lines, routes = steps_of(whole.output), routes_of(resolve_run(whole))
    assert set(routes) == {(0,), (1,), (0, 1)}
    for line in lines:
        for teacher in range(2):
            assert line[f"samples_t{teacher}"] == sum(teacher in routes[i] for i in line["ids"])
    broken = routed(tiny, "broken")
    crew = tiny.start(broken)
    crew.wait_for_steps(3)
    crew.kill("teacher-1-0")
    crew.wait_for_steps(6)
    crew.kill("trainer-0")
    crew.complete(80)
    for name in ("ids", "loss", "kl_loss_t0", "kl_loss_t1", "samples_t1"):
        assert [line.get(name) for line in steps_of(broken.output)] == [line.get(name) for line in lines]


@pytest.mark.slow
def test_the_cross_entropy_by_teacher_is_the_mean_over_its_samples(tiny: Tiny) -> None:
    spec = routed(tiny, "apart", names=("other", "other", "code"), train={"max_steps": 4})
    tiny.start(spec).complete()
    run, tokenizer = resolve_run(spec), AutoTokenizer.from_pretrained(tiny.assets.student)
    index, routes = open_data(run), routes_of(run)
    for line in steps_of(spec.output):
        lengths = [0, 0]
        for position in line["ids"]:
            (record,) = index.read([record_of(run, position)])
            assert isinstance(record, Record)
            lengths[routes[position][0]] += min(len(tokenizer(record.value["text"])["input_ids"]), 64)
        share = lengths[0] / sum(lengths)
        assert 0.2 < share < 0.9
        mean = share * line["ce_loss_t0"] + (1 - share) * line["ce_loss_t1"]
        assert line["ce_loss"] == pytest.approx(mean, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_store_holds_and_a_run_reads_the_teachers_own_records_only(tiny: Tiny) -> None:
    store = tiny.path / "store"
    live = routed(tiny, "live")
    built = run_to_end(store_build(build_spec(live, 1, str(store)), str(store), run=live), show=False)
    assert built.state == RunState.COMPLETED, built.error
    routes = routes_of(resolve_run(live))
    assert len(TeacherStore.open(str(store)).entries) == sum(1 in route for route in routes)
    teachers = [live.teacher[0], live.teacher[1].model_copy(update={"store": str(store)})]
    stored = routed(tiny, "stored", teacher=[teacher.model_dump() for teacher in teachers])
    tiny.start(stored).complete(80)
    for line in steps_of(stored.output):
        assert line["store_hits"] == line["samples_t1"] == sum(1 in routes[i] for i in line["ids"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_completions_are_compared_by_the_teachers_of_their_prompts_also_after_kills(tiny: Tiny) -> None:
    writing = replace(tiny, assets=make_assets(tiny.path / "writing"))
    train_briefly(writing.assets.student)
    rollout = {"max_new_tokens": 10, "prompt_characters": 40, "max_staleness": 0}
    whole, broken = (
        routed(writing, name, rollout=rollout, train={"checkpoint_every": 2, "max_steps": 6}) for name in ("a", "b")
    )
    tiny.start(whole).complete()
    lines, routes = steps_of(whole.output), routes_of(resolve_run(whole))
    assert sum(line["completions"] for line in lines) > 36, "hardly any of 48 completions is lost"
    for line in lines:
        for teacher in range(2):
            own = sum(teacher in routes[i] for i in line["ids"])
            assert line[f"samples_t{teacher}"] == own and (line.get(f"kl_loss_t{teacher}", 0) > 0) == (own > 0)
    crew = tiny.start(broken)
    for steps, victim in ((2, "rollout-0"), (3, "teacher-1-0"), (5, "trainer-0")):
        crew.wait_for_steps(steps)
        crew.kill(victim)
    crew.complete()
    for name in ("ids", "loss", "kl_loss_t0", "kl_loss_t1", "samples_t1", "completion_tokens"):
        assert [line.get(name) for line in steps_of(broken.output)] == [line.get(name) for line in lines]


def test_an_unknown_name_in_the_text_is_refused_before_the_first_step(tiny: Tiny) -> None:
    run = resolve_run(routed(tiny, "bad", names=("physics", None)))
    with pytest.raises(BadRecordError, match=r"both.jsonl:\d+: .*names the teacher 'physics': the run has code, other"):
        look_at_sample(run, make_collator(run), open_data(run), row_counts(run))


def test_routes_are_a_part_of_what_a_checkpoint_must_have_in_common(tiny: Tiny) -> None:
    run = resolve_run(routed(tiny, "one"))
    source = {"path": tiny.path / "code.jsonl", "teachers": ["other"]}
    other = resolve_run(routed(tiny, "two", data={"path": (), "sources": [source, {"path": tiny.path / "both.jsonl"}]}))
    assert run.identity().differences(other.identity()) == ["routes.sources.0.0"]
    (record,) = open_data(other).read([0])
    assert isinstance(record, Record) and value_with_route(other, open_data(other), record)["route"].teachers == (1,)


def prompted(tiny: Tiny, name: str, prompt: Any, **changes: Any) -> RunSpec:
    """A run whose teacher has the student's tokenizer, and words of its own before every text."""
    own: dict[str, Any] = {"model": tiny.assets.student, "context_length": 96}
    teacher = own if prompt is None else {**own, "prompt": prompt}
    return tiny.spec(name, teacher=[teacher], loss={"mode": "chain", "vocab_topk": None}, **changes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_student_behind_a_prompt_teaches_the_student_without_it(tiny: Tiny) -> None:
    (tiny.path / "prompt.txt").write_text("def class return\n")
    spec = prompted(tiny, "prompted", {"file": tiny.path / "prompt.txt"}, train={"max_steps": 4})
    run = resolve_run(spec)
    assert run.same_tokenizer == (False,) and run.teachers[0].prompt == "def class return\n"
    tiny.start(spec).complete(32)
    lines = steps_of(spec.output)
    assert all(0 < line["kl_loss"] < line["ce_loss"] for line in lines), "one model, read behind other words"


def test_a_prompt_without_room_is_refused_before_the_first_step(tiny: Tiny) -> None:
    run = resolve_run(prompted(tiny, "long", "return value " * 60))
    with pytest.raises(BadRecordError, match=r"none of 64 samples.*leaves no room in its context_length = 96: shorten"):
        look_at_sample(run, make_collator(run), open_data(run), row_counts(run))


def test_a_prefix_for_a_teacher_that_reads_the_student_s_rows_is_refused(tiny: Tiny) -> None:
    data = tiny.path / "prefixes.jsonl"
    data.write_text(json.dumps({"text": "def x", "teacher_prefix": "class y"}) + "\n")
    for name, prompt in (("without", None), ("with", "{teacher_prefix}\n")):
        run = resolve_run(prompted(tiny, name, prompt, data={"path": data}))
        arguments = run, make_collator(run), open_data(run), row_counts(run)
        if prompt is None:
            with pytest.raises(
                BadRecordError, match=r"give it rows of its own by teacher.prompt = \"{teacher_prefix}\""
            ):
                look_at_sample(*arguments)
        else:
            assert look_at_sample(*arguments)["skipped"] == 0


def test_a_prompt_is_a_part_of_what_a_checkpoint_must_have_in_common(tiny: Tiny) -> None:
    (tiny.path / "prompt.txt").write_text("one")
    prompts = ("one", "two", {"file": tiny.path / "prompt.txt"})
    one, other, read = (
        resolve_run(prompted(tiny, f"run-{number}", prompt)).identity() for number, prompt in enumerate(prompts)
    )
    assert one.differences(other) == ["teacher.0.prompt"] and one.differences(read) == []
