"""One rank of a small training without a queue, in torchrun's environment: `python -m ...rank_process OUT JSON`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.runs import resolved_run
from tests.unit.trainer.students import make_model, nll, settings, tokens
from xtoken_services.trainer.checkpoint import Checkpoints, Cursor
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.optimizer import StudentOptimizer
from xtoken_services.trainer.student import Student

STEPS = 4
MICRO_BATCHES = 3
"""Of a step, over all ranks: odd, so that one of two ranks has nothing to do in the last round."""


def train(group: RankGroup, directory: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Train from the newest checkpoint in a directory to a step, save, and say what came out."""
    spec = settings(case.get("student"), case.get("train"))
    model = make_model(case.get("family", "llama"))
    student = Student(
        model if spec.train.master_weights else model.to(getattr(torch, spec.student.dtype)), spec, ranks=group.size
    )
    optimizer = StudentOptimizer(student, spec.train, STEPS)
    checkpoints = Checkpoints(directory / "checkpoints", resolved_run(directory), group)
    start, state, norms = Cursor(), optimizer.state(), []
    latest = checkpoints.latest()
    group.barrier()
    if latest is not None:
        start = checkpoints.load(latest, state)
        optimizer.after_restore(state)
    for step in range(start.step, case["until"]):
        for index in range(-(-MICRO_BATCHES // group.size)):
            place = index * group.size + group.rank
            if place < MICRO_BATCHES:
                ids = tokens(seed=100 * step + place)
                nll(student.outputs(ids), ids).backward()
            elif student.sharded:
                student.dummy_step(0)
        if not student.sharded:
            group.all_reduce_gradients(optimizer.weights.values())
        norms.append(float(optimizer.clip()))
        checkpoints.stage.wait()
        optimizer.step(step)
    checkpoints.save(Cursor(step=case["until"]), optimizer.state())
    checkpoints.wait()
    group.barrier()
    shares = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in optimizer.state().items()}
    whole = student.full_model(spec) if not student.sharded else None
    published = student.full_weights(keeps=group.is_leader)
    return {
        "norms": norms,
        "state": shares,
        "published": published,
        "logits": whole[0](tokens()).logits.detach() if whole else None,
    }


def main() -> None:
    """Join the others, train, and leave what the first rank has."""
    torch.use_deterministic_algorithms(True)
    group = RankGroup.of_environment() or RankGroup(0, 1)
    started = group.incarnation()
    assert group.broadcast(started) == started
    assert group.any(group.rank == group.size - 1)
    assert [len(of_rank) for of_rank in group.all_gather([{"x": 1.0}] * group.rank)] == list(range(group.size))
    result = train(group, Path(sys.argv[1]), json.loads(sys.argv[2]))
    if group.is_leader:
        torch.save(result, Path(sys.argv[1]) / "result.pt")
    group.barrier()
    group.close()


if __name__ == "__main__":
    main()
