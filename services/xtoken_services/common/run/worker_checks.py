"""The program that makes in a dry run, in a child process, the checks which workers make when they have loaded.

Its request is a resolved run, its result a list of warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.processes.child_process import Progress, answer_requests, ask_child
from xtoken_services.common.run.run_warnings import left_out_warnings

SILENCE_S = 300.0


def check_as_workers(run: ResolvedRun, environment: Mapping[str, str] | None = None) -> list[str]:
    """Refuse models that cannot be loaded, and a text of which a sample has no usable record.

    Args:
        run: The run, with an output in which its text is indexed.
        environment: Variables of the child: the roots that it may read.

    Returns:
        Warnings about what is skipped or cut.

    Raises:
        XtokenError: The run is refused; the text is that of the worker that would refuse it.
    """
    return list(ask_child(__name__, run.model_dump(mode="json"), silence_s=SILENCE_S, environment=environment))


def main(request: dict[str, Any], _: Progress) -> list[str]:
    """Check the run of a request."""
    from xtoken_services.common.models.loading import check_architecture
    from xtoken_services.common.text.collation import look_at_sample, make_collator, open_data, row_counts

    run = ResolvedRun.model_validate(request)
    check_architecture(run.spec.student.model, "student")
    for number, teacher in enumerate(run.spec.teacher):
        if teacher.loads_model:
            check_architecture(teacher.model, run.spec.teacher_name(number))
    if not run.spec.has_text:
        return []
    found = look_at_sample(run, make_collator(run), open_data(run), row_counts(run))
    return list(left_out_warnings(found, found["positions"]).values())


if __name__ == "__main__":
    answer_requests(main)
