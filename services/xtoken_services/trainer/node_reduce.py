"""Reductions of a step over node groups: each plans its own positions; counts and outcomes are combined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.run_client import RunClient
from xtoken_services.common.batches.step_plan import StepPlan
from xtoken_services.trainer.distributed import RankGroup

Reasons = dict[int, str]


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of a step's positions, over all node groups.

    Attributes:
        ids: Trained positions.
        skipped: Positions without a row, with their reason.
        dead: Dead letters, with their reason.
    """

    ids: tuple[int, ...]
    skipped: Reasons
    dead: Reasons


def reduce_plan(step: StepPlan, group: RankGroup) -> StepPlan:
    """Return a node group's step with the denominators and the micro-batch count of all groups; all ranks call.

    Its positions stay the group's own; `step_outcome` gathers those of the others after the step.
    """
    if group.nodes == 1:
        return step
    # One exchange for all: a collective's latency is the cost, not its size.
    counts = [step.plan.micro_batches, step.ce_tokens, step.tokens, step.truncated, *step.kd_chunks]
    columns = list(zip(*group.gather_nodes(counts), strict=True))
    ce_tokens, tokens, truncated, *kd_chunks = (sum(column) for column in columns[1:])
    return replace(
        step,
        # Every rank has as many backward passes, or one would wait in a collective for ever.
        plan=step.plan.filled_up(max(columns[0]), sides=1 + len(kd_chunks)),
        ce_tokens=ce_tokens,
        tokens=tokens,
        truncated=truncated,
        kd_chunks=tuple(kd_chunks),
    )


def step_outcome(step: StepPlan, group: RankGroup, queue: RunClient) -> StepOutcome:
    """Return the outcome of all positions of a step; all ranks call."""
    skipped = reasons_of(queue, "skipped", step.skipped)
    dead = reasons_of(queue, "dead", step.dead)
    if group.nodes == 1:
        return StepOutcome(step.ids, skipped, dead)
    mine: list[Any] = [list(step.ids), list(skipped.items()), list(dead.items())]
    # Ranks of a node group have the same plan: the first one of each group speaks for it.
    firsts = group.all_gather(mine)[:: group.size // group.nodes]
    return StepOutcome(
        tuple(i for ids, _, _ in firsts for i in ids),
        {int(i): str(why) for _, reasons, _ in firsts for i, why in reasons},
        {int(i): str(why) for _, _, reasons in firsts for i, why in reasons},
    )


def reasons_of(queue: RunClient, state: str, ids: Iterable[int]) -> Reasons:
    """Return from the queue why positions are skipped or dead."""
    wanted = sorted(ids)
    if not wanted:
        return {}
    span = wanted[-1] - wanted[0] + 1
    listed = queue.client.list_samples(queue.partition, state, after=wanted[0] - 1, limit=span)
    return {i: listed.reasons.get(i, "") for i in wanted}


def own_positions(reasons: Reasons, run: ResolvedRun) -> Reasons:
    """Return the entries of positions that belong to this node group."""
    return {i: why for i, why in reasons.items() if run.owns(i)}
