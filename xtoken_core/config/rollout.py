"""RolloutSpec: the settings of completions that the student generates while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from xtoken_core.config.base import Count
from xtoken_core.config.loss import PUBLIC_NAMES, Positive, modes_of, parsed
from xtoken_core.config.served import ServedSpec

if TYPE_CHECKING:
    from xtoken_core.config.spec import RunSpec

Part = Annotated[float, Field(gt=0, le=1)]
LEARNING_RATE, BETA, TEACHER_TEMPERATURE = 3e-5, 0.5, 0.5
"""Defaults of a run with completions: measured beside others in docs/evidence.md."""


class RolloutSpec(ServedSpec):
    """On-policy distillation: the student completes prompts of the training text and learns from its completions.

    With `url` servers generate instead of the rollout worker, which makes them load every version of the weights.
    """

    url_weights: Literal["directory", "ipc", "nccl"] = "directory"
    """Servers load weights from `rollout-model` in the run's output directory, or (vLLM alone) from the rollout
    worker's GPU: "ipc" on the same one, "nccl" on another."""

    after: Annotated[int, Field(ge=0, strict=True)] | Annotated[float, Field(gt=0, lt=1)] = 0
    """Cold start: so many steps, or this fraction of the run's steps, train on the text alone before the first
    completions."""
    fraction: Part | tuple[Part, Part] = 1.0
    """Fraction of a step's samples that are prompts to complete, the last ones; the rest is ordinary text. Two numbers:
    the first one's fraction at the step `after`, the second one's at the last step, and a straight line in between."""
    completions: Count = 1
    """Completions of every prompt, as samples of the same step. Steps, epochs and `fraction` count samples: a prompt
    with four completions is four of them."""
    learning_rate: Positive | None = None
    """The highest rate of the steps from `after` on, with a warm-up and a schedule of their own; those of `train` end
    with the cold start then, and `train.min_learning_rate` is scaled likewise. Left out, the run has one schedule."""
    prompt_characters: Count | None = None
    """Records of plain text: the prompt is so many characters of it at most, cut at the end of a word. Left out, the
    whole text is the prompt. Of `prompt` and `completion` the prompt is taken, of `messages` all before the last
    answer."""
    max_new_tokens: Count = 128
    """Tokens of a completion, of the student's tokenizer."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Temperature of the sampling; 0 takes the most likely token."""
    teacher_temperature: Positive = 1.0
    """Temperature of the teachers' distributions on completions, of which `loss.temperature` is another; text is
    compared with teachers as they are."""
    top_k: Count | None = None
    """Sample from so many of the most likely tokens. Left out, from all."""
    top_p: Part = 1.0
    """Sample from the most likely tokens that together have this probability."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion, which keeps them."""
    publish_every: Count = 1
    """Steps between two versions of the student's weights that rollout workers generate with."""
    max_staleness: Annotated[int, Field(ge=0, lt=1 << 16)] = 1
    """Maximum of optimiser steps between the weights that generated a completion and the step that trains it. With 0
    the trainer waits for the completions of every step."""
    weights: Literal["auto", "shared_memory", "directory"] = "auto"
    """Where the trainer publishes weights: in the memory of its GPU, for rollout workers that see it ("auto"; without a
    GPU, without cuda-bindings or for servers without "ipc" as "shared_memory"); in shared memory, for those on its
    machine; or as a file in the run's output directory, for workers on other machines that see it."""
    stop_when_worse: Count | None = None
    """End the run after so many evaluations in a row whose accuracy on `[eval.tasks]`, a mean over tasks, was below the
    best one's. The best evaluation, which `eval.keep_best` keeps and exports, is then that with the highest accuracy,
    and the student of step 0 takes part. Left out: no run ends so, and the best has the fewest bits per byte."""
    workers: Count = 1
    """Rollout workers, on the GPUs after those of the students, then on these again."""

    @model_validator(mode="after")
    def _possible(self) -> RolloutSpec:
        if self.publish_every > self.max_staleness + 1:
            raise ValueError(
                f"rollout.publish_every = {self.publish_every} is more than rollout.max_staleness + 1 = "
                f"{self.max_staleness + 1}: the last step before new weights could train no completion: publish more "
                "often or raise max_staleness"
            )
        if self.url and self.workers > 1:
            raise ValueError(
                f"rollout.workers = {self.workers}: one worker updates the servers of rollout.url: set it to 1"
            )
        by, engine = self.url_weights, self.url_engine
        if by != "directory" and engine != "vllm":
            raise ValueError(f'rollout.url_weights = "{by}" is for vLLM, not {engine}: set it to "directory"')
        return self

    @property
    def loads_model(self) -> bool:
        """True if rollout workers have the student's weights on their own device."""
        return not self.url or self.url_weights == "ipc"

    @property
    def fractions(self) -> tuple[float, float]:
        """The fraction of prompts in the first step that has some, and in the last step."""
        return self.fraction if isinstance(self.fraction, tuple) else (self.fraction, self.fraction)

    @property
    def has_text(self) -> bool:
        """True if some samples of the run are ordinary text."""
        return bool(self.after) or min(self.fractions) < 1

    def steps_before(self, steps: int) -> int:
        """Return the number of steps before the first with prompts, in a run of so many."""
        return self.after if isinstance(self.after, int) else max(round(self.after * steps), 1)

    def prompts_of(self, samples_per_step: int) -> tuple[int, int]:
        """Return the number of prompts of the first step that has some, and of the last step."""
        first, last = self.fractions
        return round(first * samples_per_step), round(last * samples_per_step)


def loss_defaults(loss: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the loss in a run with completions: one weight, with chain a JSD.

    Args:
        loss: The settings that are given.
    """
    usual = "chain" if loss.keys().isdisjoint(PUBLIC_NAMES) else "p_kl"
    is_jsd = "chain" in modes_of(loss, usual) and not parsed(bool, loss.get("reverse_kl"))
    return {"kl_loss_weight_end": None} | ({"beta": BETA} if is_jsd else {})


def check_rollout(rollout: RolloutSpec, run: RunSpec) -> None:
    """Refuse settings of a run that exclude generated completions.

    Raises:
        ValueError: The first of them, and what to change.
    """
    size, several = run.train.samples_per_step, rollout.completions
    counts = rollout.prompts_of(size)
    for fraction, prompts in zip(rollout.fractions, counts, strict=True):
        if prompts == 0 or (prompts == size and fraction < 1):
            raise ValueError(
                f"rollout.fraction = {fraction:g} of train.samples_per_step = {size} is {prompts} prompts: raise "
                "samples_per_step or choose another fraction"
            )
        if prompts % several or size % several:
            raise ValueError(
                f"rollout.completions = {several} must divide train.samples_per_step = {size} and the {prompts} "
                "prompts of a step (rollout.fraction): change one of them"
            )
        if prompts % run.block_size:
            raise ValueError(
                f"queue.block_size = {run.block_size} must divide the {prompts} prompts of a step (rollout.fraction)"
            )
    if run.block_size % several:
        raise ValueError(
            f"queue.block_size = {run.block_size} must be a multiple of rollout.completions = {several}: set it to "
            "one, or unset it"
        )
    if several > 1 and rollout.temperature == 0:
        raise ValueError(
            f"rollout.temperature = 0 makes rollout.completions = {several} the same text: raise it or set completions "
            "to 1"
        )
    if rollout.max_new_tokens >= run.student.context_length:
        raise ValueError(
            f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt in "
            f"student.context_length = {run.student.context_length}: lower it"
        )
    if rollout.stop_when_worse is not None and (run.eval is None or run.eval.tasks is None):
        raise ValueError(
            "rollout.stop_when_worse goes by the accuracy on tasks, and this run has none: name them in [eval.tasks], "
            "or unset it"
        )
    if rollout.stop_when_worse is not None and run.eval is not None and isinstance(run.eval.patience, int):
        raise ValueError("rollout.stop_when_worse and eval.patience both end the run: unset one of them")
    reason = _obstacle(run, rollout, only_prompts=size in counts)
    if reason:
        raise ValueError(f"rollout: {reason}")


def _obstacle(run: RunSpec, rollout: RolloutSpec, *, only_prompts: bool) -> str:
    """Return why a run, of which some step has `only_prompts`, cannot train on completions; empty if it can."""
    if not run.teacher:
        return "completions are compared with a teacher, and this run has none: name a [teacher]"
    if any(teacher.store is not None for teacher in run.teacher):
        return "stored output is of given text: unset teacher.store"
    if run.loss.importance_cap is not None and rollout.url_engine == "sglang":
        at = rollout.temperature
        if at not in (0.0, 1.0):
            return f"SGLang gives log-probabilities at temperature = {at:g}, loss.importance_cap needs 1: set it to 1"
    if rollout.teacher_temperature != 1 and any(teacher.url for teacher in run.teacher):
        return "servers give a teacher's logits at temperature 1: set teacher_temperature = 1"
    if run.loss.dynamic_loss_scaling:
        return "completions have no cross-entropy to scale by: set loss.dynamic_loss_scaling to false"
    end = run.loss.kl_loss_weight_end
    switches = bool(rollout.after) and isinstance(end, float)
    if only_prompts and run.loss.last_kl_loss_weight == 0:
        name = "kl_loss_weight_end" if switches else "kl_loss_weight"
        return f"completions are trained on by the divergence alone: set loss.{name} above 0"
    if only_prompts and end is not None and not switches:
        return "completions are trained on by the divergence alone, beside no text: unset loss.kl_loss_weight_end"
    if run.workers.nodes > 1 or run.workers.launcher == "ray":
        return 'completions are generated in a single node group: set workers.nodes = 1 and launcher = "local"'
    return ""
