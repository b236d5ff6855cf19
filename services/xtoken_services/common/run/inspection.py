"""The program that reads a run's files in a child process: they are another user's, or their parsers need torch.

A request is `{"do": NAME, ...}` with the name of one of `ACTIONS`; its result is what that function returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import InputError
from xtoken_services.common.files.allowed_paths import check_allowed
from xtoken_services.common.processes.child_process import ChildError, Progress, answer_requests, ask_child
from xtoken_services.common.run.run_warnings import left_out_warnings

COMPLETION_S = 900.0
"""Seconds after which a completion is killed: it may read the whole text to find that no part can be held back."""
START_SILENCE_S = 120.0
WORKERS_SILENCE_S = 300.0
"""Seconds after which a child that reports no progress is killed."""
REPORT_S = 0.5


def complete_document(
    document: Mapping[str, Any], base: Path, paths: Iterable[tuple[str, Path]], environment: Mapping[str, str]
) -> tuple[RunSpec, list[str]]:
    """Fill in a run's settings in a child process; see `xtoken_services.common.run.defaults.fill_run_defaults`.

    Args:
        document: The settings.
        base: Directory of their relative paths.
        paths: Paths that are read, by setting.
        environment: Variables of the child: the roots that it may read.

    Returns:
        The specification, and a line for every default that was filled in.

    Raises:
        XtokenError: A setting is wrong, or the files cannot be read within the limits.
    """
    request = {"do": "complete", "document": document, "base": base, "paths": list(paths)}
    answer = _ask(request, COMPLETION_S, environment)
    return RunSpec.model_validate(answer["spec"]), answer["notes"]


def inspect_run(
    spec: RunSpec, progress: Progress, environment: Mapping[str, str], *, output: Path | None = None
) -> tuple[ResolvedRun, list[str]]:
    """Resolve a run in a child process; see `xtoken_services.common.run.start_checks.check_start`.

    Args:
        spec: The run.
        progress: Called with what takes long, in words, and the part (0 to 1) of it that is done.
        environment: As of `complete_document`.
        output: As of `check_start`.

    Returns:
        The run with what its files say, and warnings about its settings.

    Raises:
        XtokenError: The run is invalid, or its files cannot be inspected within the limits.
    """

    def report(activity: str, done: float) -> None:
        if activity:  # something takes long
            progress(activity, done)

    request = {"do": "check_start", "spec": spec.model_dump(mode="json"), "output": output or spec.output}
    answer = _ask(request, START_SILENCE_S, environment, report)
    return ResolvedRun.model_validate(answer["resolved"]), answer["warnings"]


def check_as_workers(run: ResolvedRun, environment: Mapping[str, str] | None = None) -> list[str]:
    """Make the checks of workers that have loaded: refuse what cannot be loaded, and samples or prompts of no use.

    Args:
        run: The run, with an output in which its text is indexed.
        environment: As of `complete_document`.

    Returns:
        A line about the share that is cut and the tokens of a sample of the text; warnings about what is left out.

    Raises:
        XtokenError: The run is refused; the text is that of the worker that would refuse it.
    """
    request = {"do": "check_as_workers", "run": run.model_dump(mode="json")}
    return list(_ask(request, WORKERS_SILENCE_S, environment))


def _ask(
    request: Mapping[str, Any],
    silence_s: float,
    environment: Mapping[str, str] | None,
    progress: Progress = lambda activity, done: None,
) -> Any:
    try:
        return ask_child(__name__, request, silence_s=silence_s, environment=environment, progress=progress)
    except ChildError as error:
        raise InputError(f"cannot inspect the run's files: {error}") from error


def _complete(request: dict[str, Any], _: Progress) -> dict[str, Any]:
    from xtoken_services.common.run.defaults import fill_run_defaults

    for name, path in request["paths"]:
        check_allowed(Path(path), name)
    spec, notes = fill_run_defaults(request["document"], Path(request["base"]), source="the run")
    return {"spec": spec.model_dump(mode="json"), "notes": notes}


def _check_start(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    printed_at = 0.0

    def report(activity: str, done: float) -> None:
        nonlocal printed_at
        if done == 1 or time.monotonic() - printed_at > REPORT_S:
            printed_at = time.monotonic()
            progress(activity, done)

    from xtoken_services.common.run.start_checks import check_start

    run, warnings = check_start(RunSpec.model_validate(request["spec"]), report, output=Path(request["output"]))
    return {"resolved": run.model_dump(mode="json"), "warnings": warnings}


def _check_as_workers(request: dict[str, Any], _: Progress) -> list[str]:
    from xtoken_core.collate_generated import CompletionCollator
    from xtoken_services.common.models.loading import check_architecture
    from xtoken_services.common.text.collation import collator_of, look_at_sample, open_data, row_counts
    from xtoken_services.common.text.prompts import look_at_prompts, sample_prompts, task_prompts

    run = ResolvedRun.model_validate(request["run"])
    check_architecture(run.spec.student.model, "student")
    for number, teacher in enumerate(run.spec.teacher):
        if teacher.loads_model:
            check_architecture(teacher.model, run.spec.teacher_name(number))
    collator, index = collator_of(CompletionCollator, run), open_data(run)
    if run.spec.eval is not None:
        sample_prompts(run.spec, collator.student)
        if run.spec.eval.tasks is not None:
            task_prompts(run.spec, collator.student)
    if run.spec.rollout is not None:
        found = look_at_prompts(run.spec, collator.student, index)
        if not run.spec.has_text:
            return list(left_out_warnings(found, found["positions"]).values())
    found = look_at_sample(run, collator, index, row_counts(run))
    share, each = found["truncated"] / max(found["positions"], 1), found["tokens"] / max(found["positions"], 1)
    warnings = left_out_warnings(found, found["positions"])
    cut = "" if "truncated" in warnings else f"{share:.0%} of {found['positions']} samples are cut; "  # or said twice
    step, most = each * run.spec.train.samples_per_step, run.spec.train.micro_batch_tokens
    less = f"; a step has about {step:,.0f}, memory is estimated for micro-batches of {most:,}" * (2 * step < most)
    return [
        f"text: {cut}{each:.0f} tokens each on average, about {each * run.positions:,.0f} in all{less}",
        *warnings.values(),
    ]


ACTIONS = {"complete": _complete, "check_start": _check_start, "check_as_workers": _check_as_workers}


if __name__ == "__main__":
    answer_requests(lambda request, progress: ACTIONS[request["do"]](request, progress))
