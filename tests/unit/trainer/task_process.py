"""One rank that measures tasks with a student of several: `python -m tests.unit.trainer.task_process FILE`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.unit.core.test_evaluation import byte_tokenizer, llama
from tests.unit.trainer.students import settings
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.processes import run_code
from xtoken_services.trainer.distributed import RankGroup
from xtoken_services.trainer.eval_tasks import EvalTasks
from xtoken_services.trainer.student import Student


def main() -> None:
    """Print the metrics."""
    path = Path(sys.argv[1])
    run_code.check_isolation = lambda: None
    run_code.passes = lambda program: bool(time.sleep(1))
    group = RankGroup.of_environment() or RankGroup(0, 1)
    raw = settings({"dtype": "float32"}, train={"parallel": "fsdp"}).model_dump()
    tasks = {"path": path, "match": "contains", "max_new_tokens": 6, "samples": 4, "temperature": 1.0, "run_code": True}
    spec = RunSpec.model_validate(raw | {"eval": {"path": path, "tasks": tasks}})
    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    student = Student(llama(320), spec, ranks=group.size).eval()
    assert student.sharded == (group.size > 1)
    print(json.dumps(EvalTasks(spec, tokenizer).measure(student, judges=group.is_leader)))
    group.close()


if __name__ == "__main__":
    main()
