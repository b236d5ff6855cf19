"""One rank of two node groups that agree on a step, without a queue: `python -m ...share_process OUT`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from xtoken_core.plan import RowLengths, plan
from xtoken_services.common.batches.step_plan import StepPlan
from xtoken_services.trainer.distributed import RankGroup, reduce_plan, step_outcome

NODES = 2
LENGTHS = {0: [(8, 8), (16, 8), (16, 8)], 1: []}
"""The rows of each group's share: the second group has none."""


def share(node: int, ranks: int) -> StepPlan:
    """A group's own plan; the second group's positions are a tombstone and a dead letter."""
    rows = [RowLengths(i, lengths) for i, lengths in enumerate(LENGTHS[node])]
    found = plan(rows, ranks=ranks, token_budget=16, max_widths=(16, 8))
    ids = tuple(row.id for row in rows)
    lost = ((), ()) if rows else ((3,), (4,))
    return StepPlan(5, found, ids, *lost, ce_tokens=7 + node, kd_chunks=(20 + node,), tokens=len(rows), truncated=node)


def listed(_: str, state: str, *, after: int, limit: int) -> Any:
    """What the second group's queue says of its positions."""
    reasons = {"skipped": {3: "empty"}, "dead": {4: "refused"}}[state]
    return SimpleNamespace(reasons={i: why for i, why in reasons.items() if after < i <= after + limit})


def main() -> None:
    """Agree, and leave what every rank has understood."""
    group = RankGroup.of_environment()
    group.nodes = NODES
    step = share(group.node, group.size // NODES)
    whole = reduce_plan(step, group)
    queue = cast(Any, SimpleNamespace(partition="p", client=SimpleNamespace(list_samples=listed)))
    said = {
        "node": group.node,
        "leads": [group.is_leader, group.is_node_leader],
        "rewinds": group.broadcast_in_node(100 + group.rank),
        "micro_batches": [len(own) for own in whole.plan.ranks],
        "denominators": [whole.ce_tokens, *whole.kd_chunks, whole.tokens, whole.truncated],
        "own": [list(whole.ids), list(whole.skipped), list(whole.dead)],
        "account": asdict(step_outcome(step, group, queue)),
    }
    every = group.all_gather(said)
    if group.is_leader:
        Path(sys.argv[1]).write_text(json.dumps(every))
    group.barrier()
    group.close()


if __name__ == "__main__":
    main()
