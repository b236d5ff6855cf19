"""View model of a run: what its page shows, derived from its status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xtoken_services.common.run.baseline import why_no_baseline
from xtoken_services.common.run.best_evaluation import exported_evaluation, keeps_best
from xtoken_services.common.run.run_warnings import change_since_start, warnings_of
from xtoken_services.common.run.verdict import Verdict, judge
from xtoken_services.control.api.dependencies import AppContext
from xtoken_services.control.web.formatting import number, percent, seconds_since
from xtoken_services.control.web.loss_terms import divergence_name, loss_in_words
from xtoken_services.supervisor.comparison import Comparison, compare_with_baseline
from xtoken_services.supervisor.remaining import remaining_s
from xtoken_services.supervisor.run_record import RunState

TASK = "task_accuracy_"
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
        status: Its status, or its summary in a list. Results are of the last evaluation, or of the best one if the run
            exports its weights.
        steps: Metrics of its last steps.
        same_tokenizer: True for each teacher with the student's tokenizer; empty if that is not known.
    """

    def __init__(
        self,
        status: Mapping[str, Any],
        steps: Sequence[Mapping[str, Any]] = (),
        same_tokenizer: Sequence[bool] = (),
    ) -> None:
        self._status, self._steps = status, steps
        self.id: str = status["id"]
        self.name: str = status["name"]
        self.output = str(status["output"])
        self.state = RunState(status["state"])
        self.tone = TONES[self.state]
        self.active = not self.state.over
        self.error: str = status.get("error") or ""
        self.launch: int = status.get("launch") or 1
        self.began: str | None = status.get("began") or status["created"]
        self.ended: str | None = status.get("ended")
        self.step: int | None = status.get("step")
        self.steps: int | None = status.get("steps")
        self.text_read: float | None = status.get("text_read")
        self.workers: list[dict[str, Any]] = status.get("workers") or []
        self.spec: dict[str, Any] = status.get("spec") or {}
        self.summary: dict[str, Any] | None = status.get("summary")
        self.evaluation = exported_evaluation(status)
        self.keeps_best = keeps_best(status)
        self.same_tokenizer = same_tokenizer

    @property
    def seconds(self) -> float | None:
        """Duration in seconds since its last start, up to its end; None for a run that was made elsewhere."""
        if self.began is None or self.began == self.ended:
            return None
        return seconds_since(self.began) - (seconds_since(self.ended) if self.ended else 0.0)

    @property
    def left_s(self) -> float | None:
        """Estimated remaining seconds, evaluations included; None if unknown."""
        return remaining_s(self._status, self._steps) if self._steps else None

    @property
    def activities(self) -> list[str]:
        """Work of its workers that takes long, such as evaluating."""
        busy = [w for w in self.workers if w.get("activity") and w["state"] == "running"] if self.active else []
        checking = [str(self._status["checking"])] if self.active and self._status.get("checking") else []
        return checking + [f"{w['name']}: {w['activity']}" for w in busy]

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
        """The loss as a sum of weighted terms."""
        return loss_in_words(self.spec, self.same_tokenizer)

    @property
    def divergence(self) -> str:
        """Name of the divergence from the teachers, or of the loss without any."""
        return divergence_name(self.spec, self.same_tokenizer) or self.loss

    @property
    def bits(self) -> float | None:
        """Bits per byte of the held-out text."""
        bits = self.evaluation.get("bits_per_byte")
        return bits if isinstance(bits, (int, float)) else None

    @property
    def change(self) -> float | None:
        """Change of the bits per byte since step 0; negative is better."""
        return change_since_start(self._status)

    @property
    def verdict(self) -> Verdict | None:
        """Verdict on the change since step 0."""
        return None if self.change is None else judge(self.change)

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of the last step."""
        return (self._status.get("last") or {}).get("tokens_per_second")

    @property
    def evaluation_step(self) -> int | None:
        """Steps before the evaluation."""
        return self.evaluation.get("step")

    @property
    def tasks(self) -> list[tuple[str, float, float | None]]:
        """Tasks with the accuracy and its change since step 0."""
        first, last = self._status.get("first_evaluation") or {}, self.evaluation
        tasks = []
        for key, value in last.items():
            if key.startswith(TASK) and isinstance(value, (int, float)):
                before = first.get(key) if first.get("step") == 0 and last.get("step") else None
                change = value - before if isinstance(before, (int, float)) else None
                tasks.append((key.removeprefix(TASK), value, change))
        return tasks

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
        last, evaluation = self._status.get("last") or {}, self.evaluation
        tiles = [
            ("Held-out accuracy", percent(evaluation.get("next_token_accuracy")), "next token"),
            ("Loss", number(last.get("loss")), self._parts(last)),
            ("Held-out loss", number(evaluation.get("held_out_loss")), "nats, weighted as in training"),
            ("Throughput", number(last.get("tokens_per_second")), "tokens/s"),
            ("Waiting", *self._waiting(last)),
        ]
        return [tile for tile in tiles if tile[1] != "–"]

    def _waiting(self, last: Mapping[str, Any]) -> tuple[str, str]:
        """Return the longest of the trainer's waits in the last step as a fraction of it, and for what."""
        waits = {
            "completions" if self.spec.get("rollout") else "text": last.get("data_wait"),
            "the teacher": last.get("teacher_wait") if self.has_teacher else None,
        }
        known = {name: value for name, value in waits.items() if value is not None}
        longest = max(known, key=lambda name: known[name], default="")
        return percent(known.get(longest)), f"of the last step, for {longest}"

    def _parts(self, last: Mapping[str, Any]) -> str:
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


def run_views(context: AppContext, rows: Sequence[dict[str, Any]]) -> list[RunView]:
    """Return the view models of summaries, with each run's settings and held-out result."""
    specs = context.runs.store.specs([row["id"] for row in rows])
    views = []
    for row in rows:
        view = context.views.of(row["id"])
        more = {"spec": specs.get(row["id"], {}), **view.results()} if view is not None else {}
        views.append(RunView({**row, **more}, (), view.same_tokenizer if view is not None else ()))
    return views
