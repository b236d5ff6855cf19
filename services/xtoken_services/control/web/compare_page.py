"""Page that sets runs side by side: results, curves over each other, and the settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response

from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.baseline import baseline_output
from xtoken_services.common.run.metric_lines import with_error
from xtoken_services.common.run.verdict import Verdict, difference
from xtoken_services.control.api.dependencies import Context
from xtoken_services.control.web.charts import COMPARED
from xtoken_services.control.web.render import PageRoute, page
from xtoken_services.control.web.run_view import RunView, run_view

MAX_RUNS = 6
MAX_CHOICES = 50
OWN = ("name", "output")
"""Settings in which any two runs differ."""
MAX_TEXT = 200

router = APIRouter(route_class=PageRoute)

RunIds = Annotated[list[str], Query(max_length=64)]


@router.get("/compare")
def compare(request: Request, context: Context, run: RunIds = []) -> Response:  # noqa: B006 - read by FastAPI
    """Show the chosen runs side by side; for an htmx request only the results."""
    ids = list(dict.fromkeys(run))
    if len(ids) > MAX_RUNS:
        raise HTTPException(400, f"At most {MAX_RUNS} runs can be compared: leave some out.")
    chosen = [run_view(context, context.status(run_id)) for run_id in ids]
    others = [row for row in context.runs.store.page(MAX_CHOICES) if row["id"] not in ids]
    verdict, finding = _finding(chosen)
    samples: dict[str, list[tuple[int, str]]] = {}
    for number, view in enumerate(chosen):
        for prompt, completion in view.samples:
            samples.setdefault(prompt, []).append((number, completion))
    part = "compare_results.html" if "hx-request" in request.headers else "compare.html"
    return page(
        request,
        part,
        runs=chosen,
        labels=_labels(chosen),
        others=others,
        charts=COMPARED,
        differing=differing_settings({view.id: view.spec for view in chosen}),
        room=len(ids) < MAX_RUNS,
        verdict=verdict,
        finding=finding,
        samples=samples,
        tasks=list(dict.fromkeys(name for view in chosen for name, *_ in view.tasks)),
    )


def _labels(runs: list[RunView]) -> dict[str, str]:
    """Return a short name for each run: its own, or its id where two have the same."""
    names = [view.name for view in runs]
    return {view.id: view.name if names.count(view.name) == 1 else view.id for view in runs}


def _finding(runs: list[RunView]) -> tuple[Verdict, str]:
    """Return which run has the best held-out result: the verdict, and one line, which is empty without two results.

    A run and its baseline are compared in these terms, whatever other runs there are.
    """
    measured = [view for view in runs if view.bits is not None]
    by_output = {view.output: view for view in measured}
    for view in measured:
        baseline = by_output.get(str(baseline_output(Path(view.output))))
        if baseline is not None and len(runs) == 2 and view.comparison:
            return view.comparison.verdict, view.comparison.line()
    if len(measured) < 2:
        return Verdict.SAME, ""
    best, second, *_ = sorted(measured, key=lambda view: view.bits or 0.0)
    labels, change = _labels(runs), difference(best.evaluation, second.evaluation)
    assert change is not None
    return change.verdict, (
        f"lowest on held-out text: {labels[best.id]} with {with_error(best.evaluation)} bits per byte after "
        f"{best.evaluation_step} steps; beside {labels[second.id]}: {change}"
    )


def differing_settings(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings in which runs differ, each with its text in every run; `–` where a run has no such setting.

    Settings that have their default in every run that has them are left out. A run without a teacher reads none of the
    loss.

    Args:
        specs: Specifications as JSON, by run.
    """
    specs = {run: _without_unread(spec) for run, spec in specs.items()}
    flat = [dict(_leaves(spec)) for spec in specs.values()]
    chosen = dict.fromkeys(name for spec in specs.values() for name, _ in _leaves(_without_defaults(spec)))
    names = [name for name in chosen if name not in OWN]
    rows = {name: [one.get(name, "–") for one in flat] for name in names}
    several = any(len(spec.get("teacher") or ()) > 1 for spec in specs.values())
    shown = {name if several else name.replace("teacher.0.", "teacher.", 1): texts for name, texts in rows.items()}
    return {name: texts for name, texts in shown.items() if len(set(texts)) > 1}


def _without_unread(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return spec if spec.get("teacher") else {name: value for name, value in spec.items() if name != "loss"}


def _without_defaults(spec: Mapping[str, Any]) -> dict[str, Any]:
    return RunSpec.model_validate(spec).model_dump(mode="json", exclude_defaults=True) if spec else {}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every setting with its text; the items of a list of sections by their number."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}.{number}")
    elif value is not None and value != []:
        yield name, _text(value)[:MAX_TEXT]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
