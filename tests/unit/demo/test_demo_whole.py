"""The whole demo with fewer steps: real text, real processes, what it leaves behind."""

from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtoken_services.cli.starter import find_inputs
from xtoken_services.demo.report import read_run
from xtoken_services.demo.run import Training, run_demo


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_leaves_a_table_a_report_and_a_model_that_generates(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (tmp_path / "printed.txt").open("w") as file:
        run_demo(
            out,
            console=Console(file=file, width=100),
            teacher=Training(steps=12, eval_every=6),
            student=Training(steps=6, eval_every=3),
        )
    printed = (tmp_path / "printed.txt").read_text()
    for name in ("cross-entropy", "distilled"):
        run = read_run(name, out / "runs" / name)
        assert [line["step"] for line in run.evals] == [0, 3, 6]
        assert f"{run.final['bits_per_byte']:.4f}" in printed
        assert sorted(i for line in run.steps for i in line["ids"]) == list(range(24))
        assert run.final["bits_per_byte"] < run.evals[0]["bits_per_byte"]
    assert any(line["kl_loss"] > 0 for line in read_run("distilled", out / "runs" / "distilled").steps)
    teacher = read_run("teacher", out / "runs" / "teacher")
    assert [line["step"] for line in teacher.evals] == [0, 6, 12]
    assert teacher.final["bits_per_byte"] < teacher.evals[0]["bits_per_byte"]
    assert AutoModelForCausalLM.from_pretrained(out / "teacher").config.num_hidden_layers == 4
    found = find_inputs(tmp_path, student=None, teacher=None, data=None)
    assert (found.student, found.teacher) == ("out/student", "out/teacher")
    assert (out / "report.html").read_text().count("<svg") == 7
    assert "student, distilled" in (out / "table.txt").read_text()
    model = AutoModelForCausalLM.from_pretrained(out / "runs" / "distilled" / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "runs" / "distilled" / "model")
    ids = model.generate(**tokenizer("import os\n", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert ids.shape[1] > len(tokenizer("import os\n")["input_ids"])
