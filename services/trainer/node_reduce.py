"""A step of several node groups: each has planned its own share, and what they must have in common is added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from services.common.step_plan import StepPlan
from services.trainer.distributed import Group
from xtoken_core.config.resolved import ResolvedRun
from xtoken_core.data_plane.run_client import RunClient

Reasons = dict[int, str]


@dataclass(frozen=True)
class Account:
    """What has become of a step's positions, over all node groups.

    Attributes:
        ids: Those that were trained.
        skipped: Positions without a row, with their reason.
        dead: Dead letters, with their reason.
    """

    ids: tuple[int, ...]
    skipped: Reasons
    dead: Reasons


def joined(step: StepPlan, group: Group) -> StepPlan:
    """A node group's step with the denominators and the number of micro-batches of the whole one; all ranks call.

    Its positions stay the group's own: what has become of the others is asked once the step is taken.
    """
    if group.nodes == 1:
        return step
    counts = [step.plan.micro_batches, step.ce_tokens, step.tokens, step.truncated, *step.kd_chunks]
    columns = list(zip(*group.of_nodes(counts), strict=True))
    ce_tokens, tokens, truncated, *kd_chunks = (sum(column) for column in columns[1:])
    return replace(
        step,
        plan=step.plan.filled_up(max(columns[0]), sides=1 + len(kd_chunks)),
        ce_tokens=ce_tokens,
        tokens=tokens,
        truncated=truncated,
        kd_chunks=tuple(kd_chunks),
    )


def account_of(step: StepPlan, group: Group, queue: RunClient) -> Account:
    """What has become of all positions of a step; all ranks call."""
    skipped = reasons_of(queue, "skipped", step.skipped)
    dead = reasons_of(queue, "dead", step.dead)
    if group.nodes == 1:
        return Account(step.ids, skipped, dead)
    mine: list[Any] = [list(step.ids), list(skipped.items()), list(dead.items())]
    told = group.gather(mine)
    firsts = told[:: group.size // group.nodes]
    return Account(
        tuple(i for ids, _, _ in firsts for i in ids),
        {int(i): str(why) for _, found, _ in firsts for i, why in found},
        {int(i): str(why) for _, _, found in firsts for i, why in found},
    )


def reasons_of(queue: RunClient, state: str, ids: Iterable[int]) -> Reasons:
    """Why a step's positions are skipped or dead, as the queue knows."""
    wanted = sorted(ids)
    if not wanted:
        return {}
    span = wanted[-1] - wanted[0] + 1
    listed = queue.client.list_samples(queue.partition, state, after=wanted[0] - 1, limit=span)
    return {i: listed.reasons.get(i, "") for i in wanted}


def owned(reasons: Reasons, run: ResolvedRun) -> Reasons:
    """Those of a run's positions that belong to this node group."""
    return {i: why for i, why in reasons.items() if run.owns(i)}
