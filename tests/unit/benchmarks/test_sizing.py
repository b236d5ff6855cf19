"""The estimate of memory beside measured peaks, and the tables of its page."""

import mmap
import os
from pathlib import Path
from typing import Any

import psutil

from benchmarks import pages, sizing_page
from benchmarks.end_to_end.assets import LLAMA_1B, QWEN3_4B
from benchmarks.sizing import Peaks
from tests.support.cases import cases
from xtoken_core.config.spec import RunSpec
from xtoken_services.common.run.memory_estimate import step_bytes, student_bytes
from xtoken_services.common.run.memory_fit import unresolved


@cases(
    "variant, tokens, checkpointed, content",
    ("p_kl_wide", 8192, False, "logits"),
    ("h_kl_wide", 8192, False, "logits"),
    ("gold_wide", 8192, False, "logits"),
    ("p_kl_hidden", 2048, False, "hidden"),
    ("p_kl_hidden_checkpointed", 2048, True, "hidden"),
)
def test_a_trainers_peak_on_a_gpu_is_as_estimated(
    tmp_path: Path, variant: str, tokens: int, checkpointed: bool, content: str
) -> None:
    student, teacher = (
        {"model": sizing_page.write_sizes(tmp_path / name, config), "context_length": 2048, "dtype": "bfloat16"}
        for name, config in (("student", LLAMA_1B), ("teacher", QWEN3_4B))
    )
    heads: dict[str, Any] = {"blockwise_head": content == "hidden", "checkpoint_activations": checkpointed}
    spec = RunSpec.model_validate({
        "name": "run", "output": tmp_path / "out", "data": {"path": tmp_path / "text.jsonl"},
        "student": {**student, **heads, "compile": True}, "teacher": [{**teacher, "content": content}],
        "train": {"master_weights": False, "micro_batch_tokens": tokens},
    })  # fmt: skip
    result = pages.result("end_to_end")["variants"][variant]
    state = student_bytes(spec)
    estimate = state + step_bytes(unresolved(spec, tokens), on_gpu=True)
    ratio = estimate / (state + result["peak_bytes_above_state"])
    assert 1 - sizing_page.BELOW <= ratio <= 1 + sizing_page.WITHIN


def test_a_checkpoint_that_is_read_for_a_gpu_is_no_memory_that_a_machine_must_have(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * (32 << 20))
    peaks = {device: Peaks(device) for device in ("cpu", "cuda")}
    with (tmp_path / "model.safetensors").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as read:
        assert read[:: mmap.PAGESIZE].count(b"x") == (32 << 20) // mmap.PAGESIZE
        for each in peaks.values():
            each.names = {os.getpid(): "teacher-0-0"}
            each.read(psutil.Process())
    assert peaks["cpu"].host["teacher-0-0"] - peaks["cuda"].host["teacher-0-0"] > 32 << 20


def test_every_kept_row_of_the_benchmark_is_within_the_bounds() -> None:
    result = pages.result("sizing")
    assert {row["case"] for row in result["rows"]} >= {"logits", "hidden", "stored", "rollouts", "cross_entropy"}
    assert len(result["rows"]) >= 12 and {row["device"] for row in result["rows"]} == {"cpu", "cuda"}
    assert [row["case"] for row in result["rows"] if not sizing_page.is_right(row)] == []
    wrong = {**result["rows"][0], "estimate": {"host": {}, "shared": 0, "gpu": 0}}
    wrong["estimate"]["host"] = {name: size * 0.9 for name, size in wrong["peak"]["host"].items()}
    assert not sizing_page.is_right(wrong), "a tenth below"


def test_what_is_on_paper_fits_where_the_page_says_so() -> None:
    paper = sizing_page.paper()
    assert paper["whole_student"] > paper["gpu"] > max(paper["build"], paper["train"])
    assert paper["build"] > paper["teacher"] * 2 // 4, "a quarter of its weights in bfloat16"
