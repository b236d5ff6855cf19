"""Routes: which teachers compare a sample, and what its row, its plan and the denominators of its step make of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import vocabularies as v
from tests.support.runs import resolved_run
from xtoken_core import schema
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config.loss import LossConfig
from xtoken_core.config.routing import RouteError, Routes
from xtoken_core.config.spec import RunSpec, parse_run_spec
from xtoken_core.data_plane.run_client import StepRows
from xtoken_core.dataset.records import ROUTE, Route
from xtoken_core.errors import ConfigError
from xtoken_core.losses.masks import loss_counts
from xtoken_core.plan import RowLengths, plan
from xtoken_services.common.batches.step_plan import plan_fields, plan_step

TEXTS = ["hello there, again and again", "héllo 日本", "say hello there", "one two three four five six seven"]


def spec_of(names: list[str | None], sources: list[list[str] | None], **changes: Any) -> RunSpec:
    """A run of named teachers whose sources have lists of names."""
    model = {"model": "m", "context_length": 64}
    raw: dict[str, Any] = {
        "output": "out",
        "student": model,
        "teacher": [model | ({"name": name} if name else {}) for name in names],
        "data": {"sources": [{"path": "a.txt"} | ({} if own is None else {"teachers": own}) for own in sources]},
    }
    return parse_run_spec(raw | changes, source="run.toml")


def test_a_record_goes_before_its_source_and_a_source_before_all() -> None:
    routes = Routes.of(spec_of(["math", "code", None], [["math"], ["code", "math"], None]))
    assert routes is not None
    assert [routes.teachers_of({"text": "x"}, source) for source in range(3)] == [(0,), (0, 1), (0, 1, 2)]
    assert routes.teachers_of({"text": "x", "teacher": "code"}, 0) == (1,)
    assert routes.teachers_of({"text": "x", "teacher": ["code", "math"]}, 2) == (0, 1)
    assert Routes.of(spec_of([None, None], [None])) is None


@pytest.mark.parametrize("named", ["physics", [], ["math", 3]])
def test_a_record_that_names_no_teacher_is_refused_with_the_names(named: object) -> None:
    routes = Routes.of(spec_of(["math", "code"], [None]))
    assert routes is not None
    with pytest.raises(RouteError, match="the run has math, code: correct the record"):
        routes.teachers_of({"text": "x", "teacher": named}, 0)


@pytest.mark.parametrize(
    ("names", "sources", "message"),
    [
        (["math"], [["maths"]], r"data.sources.0.teachers names the teacher 'maths', and the names are math"),
        ([None], [["math"]], r"names the teacher 'math', and no \[\[teacher\]\] has a name"),
        (["math"], [None, []], r"data.sources.1.teachers names no teacher: name one, or leave it out"),
        (["math", "math"], [None], "teacher.name = 'math' is there twice"),
        (["math", None], [["math"]], "teacher.1 has no name, and every source names others"),
    ],
)
def test_names_that_route_nothing_are_refused(names: Any, sources: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(names, sources)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_other_teachers_are_in_other_micro_batches(packed: bool) -> None:
    routes = [(0,), (1,), (0, 1), (0,), (1,), (1,)]
    rows = [RowLengths(i, (9, 10 * (0 in route), 12 * (1 in route)), route) for i, route in enumerate(routes)]
    made = plan(rows, ranks=2, token_budget=64, max_widths=(16, 16, 16), packed=packed)
    batches = [batch for own in made.ranks for batch in own if batch.ids]
    assert {batch.teachers for batch in batches} == {(0,), (1,), (0, 1)}
    for batch in batches:
        assert {routes[i] for i in batch.ids} == {batch.teachers}
        assert [width > 0 for width in batch.widths[1:]] == [n in batch.teachers for n in range(2)]
    assert sorted(i for batch in batches for i in batch.ids) == list(range(6))
    without = [RowLengths(row.id, (9, 10, 12)) for row in rows]
    everyone = [RowLengths(row.id, (9, 10, 12), (0, 1)) for row in rows]
    arguments: dict[str, Any] = {"ranks": 2, "token_budget": 64, "max_widths": (16, 16, 16), "packed": packed}
    assert plan(everyone, **arguments) == plan(without, **arguments)


def collator() -> CrossTokenizerCollator:
    return CrossTokenizerCollator(
        student_tokenizer=v.byte_level(),
        teacher_tokenizer=[v.sentencepiece_bpe("legacy"), v.unigram()],
        aligner=None,
        ctx_length_student=64,
        ctx_length_teacher=64,
    )


def values_of(routes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    return [{"text": text, ROUTE: Route(route)} for text, route in zip(TEXTS, routes, strict=True)]


def test_a_row_has_tokens_and_pairs_of_its_own_teachers_only() -> None:
    routes = [(0,), (1,), (0, 1), (1,)]
    counts = loss_counts(LossConfig(), [False, False])
    rows = collator().rows(values_of(routes), counts)
    both = collator().rows([{"text": text} for text in TEXTS], counts)
    assert rows.columns["teachers"].values.cast("q").tolist() == [1, 2, 3, 2] and "teachers" not in both.columns
    for teacher in range(2):
        for field in (schema.TEACHER_INPUT_LENGTHS, schema.KD_CHUNKS, schema.NUM_CHUNKS):
            name = schema.field_name(field, teacher)
            of_all = both.columns[name].values.cast("q").tolist()
            assert min(of_all) > 0
            own = [n if teacher in route else 0 for n, route in zip(of_all, routes, strict=True)]
            assert rows.columns[name].values.cast("q").tolist() == own


@pytest.mark.parametrize("packed", [False, True])
def test_denominators_are_of_the_samples_that_each_teacher_compares(tmp_path: Path, packed: bool) -> None:
    routes = [(0,), (1,), (0, 1), (1,)]
    run = resolved_run(tmp_path, teachers=2).model_copy(
        update={"routes": Routes(named={"a": (0,), "b": (1,)}, sources=(), teachers=2), "packed": packed}
    )
    columns = collator().rows(values_of(routes), loss_counts(run.spec.loss, run.same_tokenizer)).columns
    given = {name: columns[name] for name in plan_fields(run)}
    step = plan_step(run, 0, StepRows([0, 1, 2, 3], [], [3], given))
    chunks = [columns[schema.field_name(schema.KD_CHUNKS, n)].values.cast("q").tolist() for n in range(2)]
    tokens = columns[schema.CE_TOKENS.name].values.cast("q").tolist()
    assert step.kd_chunks == (chunks[0][0] + chunks[0][2], chunks[1][1] + chunks[1][2]), "sample 3 is dead"
    assert step.samples_of == (2, 2) and step.text_of == (tokens[0] + tokens[2], tokens[1] + tokens[2])
    total = sum(tokens[:3])
    assert step.shares == [(tokens[0] + tokens[2]) / total, (tokens[1] + tokens[2]) / total]
    assert {i: batch.teachers for own in step.plan.ranks for batch in own for i in batch.ids} == dict(enumerate(routes))
