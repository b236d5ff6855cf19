"""View model of a run: what its page shows, derived from its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtoken_services.common.run.baseline import why_no_baseline
from xtoken_services.common.run.loss_words import divergence_name, loss_in_words
from xtoken_services.common.run.metric_lines import BITS, TASK, finite, with_error
from xtoken_services.common.run.run_warnings import warnings_of
from xtoken_services.common.run.status import RunState, RunStatus
from xtoken_services.common.run.verdict import Difference
from xtoken_services.control.api.dependencies import AppContext
from xtoken_services.control.web.formatting import number, percent, seconds_since
from xtoken_services.supervisor.comparison import Comparison, compare_with_baseline

MOST_SAMPLES = 16

TONES = {
    RunState.STARTING: "busy",
    RunState.RUNNING: "good",
    RunState.STOPPING: "busy",
    RunState.COMPLETED: "done",
    RunState.FAILED: "bad",
    RunState.STOPPED: "idle",
    RunState.INTERRUPTED: "warn",
}


class RunView:
    """View model of a run.

    Args:
        status: Its status. Results are of the last evaluation, or of the best one if the run exports its weights.
        steps: Metrics of its last steps.
        same_tokenizer: True for each teacher with the student's tokenizer; empty if that is not known.
    """

    def __init__(
        self, status: RunStatus, steps: Sequence[Mapping[str, Any]] = (), same_tokenizer: Sequence[bool] = ()
    ) -> None:
        self._status, self._steps = status, steps
        self.id, self.name, self.output = status.id, status.name, str(status.output)
        self.state, self.tone = status.state, TONES[status.state]
        self.active = not status.state.over
        self.error, self.launch, self.description = status.error, status.launch, status.description
        self.began, self.ended = status.began or status.created, status.ended
        self.step, self.steps, self.text_read = status.step, status.steps, status.text_read
        self.workers, self.spec = status.workers, status.spec
        self.evaluation, self.keeps_best, self.of_teacher = status.exported, status.keeps_best, status.of_teacher
        self.same_tokenizer = same_tokenizer

    @property
    def seconds(self) -> float | None:
        """Duration in seconds since its last start, up to its end; None for a run that was made elsewhere."""
        if self.began == self.ended:
            return None
        return seconds_since(self.began) - (seconds_since(self.ended) if self.ended else 0.0)

    @property
    def left_s(self) -> float | None:
        """Estimated remaining seconds, evaluations included; None if unknown."""
        return self._status.remaining_s(self._steps) if self._steps else None

    @property
    def activities(self) -> list[str]:
        """Work of its workers that takes long, such as evaluating."""
        if not self.active:
            return []
        checking = [self._status.checking] if self._status.checking else []
        return checking + [f"{w.name}: {w.activity}" for w in self.workers if w.activity and w.state == "running"]

    @property
    def activity(self) -> tuple[str, float | None] | None:
        """Work that the run waits for before its first step, and the fraction of it that is done."""
        if not self.activities or self.step:
            return None
        text, _, percentage = self.activities[-1].rpartition(": ")
        if percentage.endswith("%") and percentage[:-1].isdigit():
            return text, int(percentage[:-1]) / 100
        return self.activities[-1], None

    @property
    def progress(self) -> float | None:
        """Fraction of the steps that are done."""
        return self.step / self.steps if self.step is not None and self.steps else None

    @property
    def warnings(self) -> list[str]:
        """Warnings that its metrics call for."""
        return list(warnings_of(self._status).values())

    @property
    def comparison(self) -> Comparison | None:
        """Comparison with its baseline; None without an evaluation of both."""
        return compare_with_baseline(Path(self.output))

    @property
    def resumable(self) -> bool:
        """Return True if the run can be resumed."""
        return self.state.over and self.state != RunState.COMPLETED

    @property
    def student(self) -> str:
        """Name of the student's directory."""
        return _model_name(self.spec.get("student"))

    @property
    def teachers(self) -> str:
        """Names of the teachers' directories, and where the output of each comes from; empty without a teacher."""
        return ", ".join(_model_name(teacher) + _source_of(teacher) for teacher in self.spec.get("teacher") or ())

    @property
    def loss(self) -> str:
        """The loss in words."""
        return loss_in_words(self.spec, self.same_tokenizer)

    @property
    def divergence(self) -> str:
        """Name of the divergence from the teachers, or of the loss without any."""
        return divergence_name(self.spec, self.same_tokenizer) or self.loss

    @property
    def bits(self) -> float | None:
        """Bits per byte of the held-out text."""
        return finite(self.evaluation).get(BITS)

    @property
    def bits_text(self) -> str:
        """The bits per byte with their standard error over documents."""
        return with_error(self.evaluation, amount=False)

    @property
    def change(self) -> Difference | None:
        """Change of the bits per byte since step 0; negative is better."""
        return self._status.change

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of the last step."""
        return self._status.metrics.get("tokens_per_second")

    @property
    def evaluation_step(self) -> int | None:
        """Steps before the evaluation."""
        return self.evaluation.get("step")

    @property
    def tasks(self) -> list[tuple[str, float, float | None]]:
        """Tasks with the accuracy and its change since step 0."""
        first, last = finite(self._status.first_evaluation), finite(self.evaluation)
        before = first if first.get("step") == 0 and last.get("step") else {}
        return [
            (name.removeprefix(TASK), value, value - before[name] if name in before else None)
            for name, value in last.items()
            if name.startswith(TASK)
        ]

    @property
    def samples(self) -> list[tuple[str, str]]:
        """Prompts with their completions, see `eval.samples`."""
        samples = self.evaluation.get("samples")
        rows = [each for each in samples if isinstance(each, dict)] if isinstance(samples, list) else []
        return [(str(row.get("prompt", "")), str(row.get("completion", ""))) for row in rows[:MOST_SAMPLES]]

    @property
    def has_teacher(self) -> bool:
        """Return True if the run has a teacher."""
        return bool(self.spec.get("teacher"))

    @property
    def has_baseline(self) -> bool:
        """Return True if a baseline can be trained, and would be another run."""
        return not why_no_baseline(self.spec)

    @property
    def model_exported(self) -> bool:
        """Return True if the run has ended with a model."""
        return self.state == RunState.COMPLETED

    @property
    def has_checkpoint(self) -> bool:
        """Return True if a model can be exported from a checkpoint."""
        return any(Path(self.output, "checkpoints").glob("step-*"))

    @property
    def tiles(self) -> list[tuple[str, str, str]]:
        """Latest metrics as title, value and unit or description, the most important first."""
        last, evaluation = self._status.metrics, finite(self.evaluation)
        tiles = [
            ("Held-out accuracy", percent(evaluation.get("next_token_accuracy")), "next token"),
            ("Loss", number(last.get("loss")), self._parts(last)),
            ("Throughput", number(last.get("tokens_per_second")), "tokens/s"),
            ("Waiting", *self._waiting(last)),
        ]
        return [tile for tile in tiles if tile[1] != "–"]

    def _waiting(self, last: Mapping[str, float]) -> tuple[str, str]:
        """Return the longest of the trainer's waits in the last step as a fraction of it, and for what."""
        waits = {
            "completions" if last.get("completions") else "text": last.get("data_wait"),
            "the teacher": last.get("teacher_wait") if self.has_teacher else None,
        }
        known = {name: value for name, value in waits.items() if value is not None}
        longest = max(known, key=lambda name: known[name], default="")
        return percent(known.get(longest)), f"of the last step, for {longest}"

    def _parts(self, last: Mapping[str, float]) -> str:
        fraction = last.get("kl_fraction")
        if fraction is None or not self.has_teacher:
            return "nats"
        return f"nats, {percent(fraction)} of it {divergence_name(self.spec, self.same_tokenizer)}"


def _source_of(teacher: Any) -> str:
    """Return where a teacher's output comes from, if not from a process that loads it."""
    if not isinstance(teacher, dict):
        return ""
    return " (stored)" if teacher.get("store") else " (served)" if teacher.get("url") else ""


def _model_name(model: Any) -> str:
    path = Path(str((model or {}).get("model", ""))) if isinstance(model, Mapping) else Path()
    return path.name or str(path)


def run_view(context: AppContext, status: RunStatus) -> RunView:
    """Return the view model of a run, without its curves."""
    view = context.views.of(status.id)
    return RunView(status, (), view.same_tokenizer if view is not None else ())


def run_views(context: AppContext, rows: Sequence[dict[str, Any]]) -> list[RunView]:
    """Return the view models of summaries, with each run's settings and held-out result."""
    specs = context.runs.store.specs([row["id"] for row in rows])
    views = []
    for row in rows:
        view = context.views.of(row["id"])
        spec = specs.get(row["id"], {})
        more = {"spec": spec, **view.eval.evaluations(spec)} if view is not None else {}
        views.append(run_view(context, RunStatus.model_validate({**row, **more})))
    return views
