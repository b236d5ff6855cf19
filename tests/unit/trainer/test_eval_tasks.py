"""Accuracy on tasks with a tiny model: its completions are those of a plain loop, and training is not disturbed."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from tests.support.checkpointed import write_lines
from tests.support.ranks import run_ranks
from tests.support.vocabularies import sentencepiece_bpe, wordpiece
from tests.unit.core.test_evaluation import byte_tokenizer, llama
from tests.unit.trainer.students import settings
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, InputError
from xtoken_services.common.generation.sampling import Sampled, Sampling
from xtoken_services.common.models.packed_attention import NAME
from xtoken_services.common.processes import run_code
from xtoken_services.common.processes.worker import StopRequested
from xtoken_services.trainer import generate
from xtoken_services.trainer.eval_tasks import EvalSamples, EvalTasks
from xtoken_services.trainer.student import Student

TOKENIZER = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
PROMPTS = ["2 + 2 =", "a", "The capital of France is", "x" * 9]


def student_of(device: str = "cpu", **options: Any) -> Student:
    model = llama(320).to(device)
    model.set_attn_implementation(NAME)
    return Student(model, settings({"dtype": "float32", **options}))


def greedy(student: Student, prompt: str, count: int, *, specials: bool = False) -> str:
    """Complete a prompt by one forward pass per token, among bytes and the end."""
    allowed = [*range(256), TOKENIZER.eos_token_id]
    ids = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + count and ids[-1] != TOKENIZER.eos_token_id:
            ids.append(allowed[int(student.model(input_ids=torch.tensor([ids])).logits[0, -1, allowed].argmax())])
    return str(TOKENIZER.decode(ids[start:], skip_special_tokens=not specials))


def run_with(path: Path, records: list[dict[str, Any]], *, shown: Sequence[str] = (), **tasks: Any) -> RunSpec:
    """A run that is measured by the task of these records and shows samples of these prompts."""
    write_lines(path.parent, path.name, records)
    raw = settings({"dtype": "float32"}).model_dump()
    tasks = {"path": path, "max_new_tokens": 6, **tasks}
    return RunSpec.model_validate(raw | {"eval": {"path": path, "tasks": tasks, "samples": shown}})


def tasks_of(tmp_path: Path, answers: dict[str, Any], **changes: Any) -> EvalTasks:
    records = [{"prompt": prompt, "answer": answer} for prompt, answer in answers.items()]
    return EvalTasks(run_with(tmp_path / "sums.jsonl", records, **{"match": "contains", **changes}), TOKENIZER)


def test_accuracy_of_greedy_completions(tmp_path: Path) -> None:
    student = student_of().eval()
    answers = {prompt: greedy(student, prompt, 6) for prompt in PROMPTS}
    assert len(set(answers.values())) > 1 and all(map(str.strip, answers.values()))
    ended = sum("</s>" in greedy(student, prompt, 6, specials=True) for prompt in PROMPTS)
    answers["a"] = "no model says this"
    fractions: list[float] = []
    calls: list[int] = []
    tasks = tasks_of(tmp_path, answers)
    before = torch.get_rng_state()
    row = tasks.measure(student, progress=lambda: calls.append(1), on_fraction=fractions.append)
    assert row == {"task_accuracy_sums": 0.75, "task_prompts_sums": 4, "task_finished_sums": ended / 4}
    assert fractions[-1] == 1.0 and fractions == sorted(fractions) and len(calls) >= 6
    assert torch.equal(torch.get_rng_state(), before)

    def stop() -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        tasks.measure(student, progress=stop)


def test_samples_repeat_and_leave_the_generators_alone(tmp_path: Path) -> None:
    student = student_of(blockwise_head=True).eval()
    tasks = tasks_of(tmp_path, dict.fromkeys(PROMPTS, "e"), samples=8, temperature=1.0)
    before = torch.get_rng_state()
    row = tasks.measure(student)
    assert torch.equal(torch.get_rng_state(), before)
    assert row == tasks.measure(student), "every evaluation draws the same"
    assert row["task_accuracy_sums"] <= row["task_any_sums"]


def test_how_many_completions_end_by_themselves_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(_: Any, prompts: list[Any], *__: Any) -> list[Sampled]:
        return [Sampled([97], ends=len(ids) == 5, stopped=len(ids) == 9) for ids in prompts]

    monkeypatch.setattr(generate.Sampler, "complete", made)
    monkeypatch.setattr(generate, "MAX_ROWS", 3)
    tasks = tasks_of(tmp_path, {"x" * length: "a" for length in (5, 1, 9, 2)}, samples=2, temperature=1.0)
    assert tasks.measure(student_of())["task_finished_sums"] == 0.5


def with_rollouts(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a run with rollouts and a task."""
    records = [{"prompt": prompt, "answer": "e"} for prompt in PROMPTS]
    raw = run_with(tmp_path / "sums.jsonl", records, match="contains").model_dump()
    raw["loss"]["kl_loss_weight_end"] = None
    return raw | {"rollout": {"max_new_tokens": 8, "top_k": 20, "stop": ["e"]}}


def completions(student: Student, raw: dict[str, Any], **sampling: Any) -> dict[str, list[str]]:
    """Return the completions of a run's task by prompt."""
    evaluation = raw["eval"] | {"tasks": raw["eval"]["tasks"] | sampling}
    made = EvalTasks(RunSpec.model_validate(raw | {"eval": evaluation}), TOKENIZER)
    found: dict[str, list[str]] = {}
    complete = made._completer.complete

    def kept(student: Student, rows: list[list[int]], *calls: Any) -> tuple[list[list[str]], list[int]]:
        texts, finished = complete(student, rows, *calls)
        found.update((str(TOKENIZER.decode(row)), own) for row, own in zip(rows, texts, strict=True))
        return texts, finished

    made._completer.complete = kept  # type: ignore[method-assign]
    made.measure(student)
    return found


SAMPLED = {"samples": 4, "temperature": 1.0}


def test_runs_with_rollouts_draw_each_completion_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student, raw = student_of().eval(), with_rollouts(tmp_path)
    assert completions(student, raw).keys() == set(PROMPTS)
    drawn = completions(student, raw, **SAMPLED)
    assert drawn == completions(student, raw, **SAMPLED)
    monkeypatch.setattr(generate, "MAX_ROWS", 3)
    assert drawn == completions(student, raw, **SAMPLED), "a completion depends on its batch"
    assert len({text for texts in drawn.values() for text in texts}) > len(PROMPTS)
    assert all("e" not in text[:-1] for texts in drawn.values() for text in texts)


def test_batches_are_as_large_as_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks together: a row of 9 characters and 6 tokens takes the most, and comes first."""
    student, asked = student_of().eval(), []
    tasks = tasks_of(tmp_path, dict.fromkeys(PROMPTS, "e"), samples=2, temperature=1.0)
    longest = max(map(len, PROMPTS)) + 6
    values = 2 * 2 * 2 * 16 + 4 * (32 + 48)  # keys and values of two layers, activations of one
    assert generate.row_bytes(student.model, longest) == longest * values * 4 + 40 * 320
    sampler = generate.Sampler.complete

    def kept(own: Any, prompts: list[Any], *others: Any) -> Any:
        asked.append([len(prompt) for prompt in prompts])
        return sampler(own, prompts, *others)

    monkeypatch.setattr(generate.Sampler, "complete", kept)
    monkeypatch.setattr(generate, "MAX_BYTES", 3 * generate.row_bytes(student.model, longest))
    tasks.measure(student)
    lengths = [length for batch in asked for length in batch]
    assert len(asked[0]) == 3 and lengths == sorted(lengths, reverse=True) and len(lengths) == 2 * len(PROMPTS)
    asked.clear()
    monkeypatch.undo()
    monkeypatch.setattr(generate.Sampler, "complete", kept)
    tasks.measure(student)
    assert len(asked) == 1


def test_a_student_whose_tokens_spell_no_spaces_has_its_text_from_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = wordpiece()
    record = {"prompt": "the", "answer": "x"}
    spec = run_with(tmp_path / "words.jsonl", [record], shown=["the"], match="contains")
    student = Student(llama(len(tokenizer)), settings({"dtype": "float32"})).eval()
    ids = EvalTasks(spec, tokenizer)._ids["words"]
    whole = student.model.generate(
        torch.tensor(ids), max_new_tokens=32, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    expected = tokenizer.decode(whole[0, len(ids[0]) :], skip_special_tokens=True)
    assert expected
    [row] = EvalSamples(spec, tokenizer).measure(student)["samples"]
    assert row["completion"] == expected
    assert EvalTasks(spec, tokenizer).measure(student)["task_prompts_words"] == 1


def test_a_student_without_keys_and_values_completes(tmp_path: Path) -> None:
    """Prompts of other lengths are padded on the left."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=8)
    student = Student(MambaForCausalLM(config), settings({"dtype": "float32"})).eval()
    answers = {prompt: greedy(student, prompt, 6) for prompt in PROMPTS}
    assert len(set(answers.values())) > 1 and all(map(str.strip, answers.values()))
    assert tasks_of(tmp_path, answers).measure(student)["task_accuracy_sums"] == 1.0


def test_a_completion_keeps_its_first_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers of SentencePiece decode without it, and the first line of a function's body would be indented less."""
    tokenizer, code = sentencepiece_bpe(), "    return 1"
    before, whole = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("x\n", f"x\n{code}"))
    ids = whole[len(before) :]
    assert tokenizer.decode(ids) != code
    monkeypatch.setattr(generate.Sampler, "complete", lambda *_: [Sampled(ids)])
    student = Student(llama(len(tokenizer)), settings({"dtype": "float32"})).eval()
    completer = generate.Completer(tokenizer, Sampling(8))
    assert completer.complete(student, [before], lambda: None) == ([[code]], [0])


def code_task(tmp_path: Path, **changes: Any) -> EvalTasks:
    """Return a task whose even prompts want another completion than the odd ones."""
    tests = ["assert made == 1", "assert made == 2", "assert made == 1"]
    records = [{"prompt": f"{n} + 2 =", "tests": text, "match": "code"} for n, text in enumerate(tests)]
    return EvalTasks(run_with(tmp_path / "code.jsonl", records, run_code=True, **changes), TOKENIZER)


def test_programs_of_completions_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the child: it judges by the tests, and never while the trainer does not report."""
    monkeypatch.setattr(run_code, "check_isolation", lambda: None)
    reported, ran = threading.Event(), []

    def passes(program: str) -> bool:
        ran.append(program)
        reported.clear()
        return reported.wait(60) and program.endswith("assert made == 1\n")

    monkeypatch.setattr(run_code, "passes", passes)
    student, tasks = student_of().eval(), code_task(tmp_path)
    row = tasks.measure(student, progress=reported.set)
    assert row == {"task_accuracy_code": pytest.approx(2 / 3), "task_prompts_code": 3, "task_finished_code": 0.0}
    assert sorted(program[:7] for program in ran) == ["0 + 2 =", "1 + 2 =", "2 + 2 ="]
    ran.clear()
    tasks.measure(student, judges=False)
    assert not ran

    def stop() -> None:
        if ran:
            raise StopRequested

    monkeypatch.setattr(run_code, "passes", lambda program: ran.append(program) or time.sleep(0.2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(StopRequested):
        tasks.measure(student, progress=stop)
    assert len(ran) < 3, "programs that have not begun are left out"


def test_a_task_of_code_needs_isolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_code, "_ISOLATED", ("unshare", "--no-such-namespace"))
    with pytest.raises(ConfigError, match=r"eval\.tasks\.run_code: code cannot be isolated here"):
        code_task(tmp_path)


@pytest.mark.gpu
def test_completions_of_rollouts_are_those_of_a_cpu(tmp_path: Path) -> None:
    raw, found = with_rollouts(tmp_path), []
    for device in ("cpu", "cuda"):
        drawn = completions(student_of(device).eval(), raw, **SAMPLED)
        found.append([text for texts in drawn.values() for text in texts])
    same = sum(one == other for one, other in zip(*found, strict=True))
    assert same >= len(found[0]) - 2  # a rounding may choose another token


def test_prompt_without_room_for_a_completion_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompt 2 of .*sums.jsonl has 900 tokens"):
        tasks_of(tmp_path, {"a": "b", "x" * 900: "y"})
    spec = run_with(tmp_path / "sums.jsonl", [{"messages": [{"role": "user", "content": "?"}], "answer": "a"}])
    with pytest.raises(InputError, match="chat template does not take"):
        EvalTasks(spec, TOKENIZER)


@pytest.mark.slow
def test_ranks_of_a_sharded_student_complete_together(tmp_path: Path) -> None:
    lines = [{"prompt": prompt, "answer": "e"} for prompt in PROMPTS]
    code = {"prompt": "a", "tests": "assert False", "match": "code"}  # one rank runs it, all wait
    write_lines(tmp_path, "sums.jsonl", [*lines, code])
    rows = []
    for size in (1, 2):
        command = [sys.executable, "-m", "tests.unit.trainer.task_process", str(tmp_path / "sums.jsonl")]
        rows += [json.loads(said) for said in run_ranks(command, size, timeout_s=500)]
    assert rows[0] == rows[1] == rows[2]


def samples_of(prompts: list[str], context: int) -> EvalSamples:
    raw = settings({"dtype": "float32", "context_length": context}).model_dump()
    raw["eval"] = {"path": "text.jsonl", "samples": prompts}
    return EvalSamples(RunSpec.model_validate(raw), TOKENIZER)


def test_sample_completions() -> None:
    student = student_of().eval()
    before = torch.get_rng_state()
    for context, count in ((64, 32), (192, 64)):
        row = samples_of(PROMPTS, context).measure(student)
        assert row == {"samples": [{"prompt": p, "completion": greedy(student, p, count)} for p in PROMPTS]}
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(InputError, match=r"eval\.samples: the prompt 'xx.* has room for 1 to"):
        samples_of(["x" * 500], 192)
