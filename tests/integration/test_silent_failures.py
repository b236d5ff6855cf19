"""Runs that cannot end well: each is refused or fails with its reason, and none leaves a model behind."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import Crew, Tiny
from tests.support.forks import ForkLauncher
from tests.support.tiny_run import TinyAssets, documents, steps_of, tiny_spec, write_jsonl, write_run
from tests.support.waiting import until
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError, XtokenError
from xtoken_core.evaluation import EvalResult
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.cli import dry_run
from xtoken_services.cli.dry_run import check_run
from xtoken_services.common.run import inspection, machine, resolve
from xtoken_services.common.run.defaults import load_run
from xtoken_services.common.run.resolve import file_warnings, resolve_run
from xtoken_services.common.run.run_warnings import is_size, warnings_of
from xtoken_services.common.run.start_checks import check_start
from xtoken_services.common.run.status import RunState
from xtoken_services.common.run.teacher_result import read_result
from xtoken_services.common.text.collation import look_at_sample, make_collator, open_data, row_counts
from xtoken_services.common.text.prompts import look_at_prompts
from xtoken_services.common.tokenizers.loading import tokenizer_of
from xtoken_services.supervisor.local_run import run_locally
from xtoken_services.supervisor.run_files import Curve, with_files
from xtoken_services.teacher.base import HeldOutText
from xtoken_services.teacher.held_out import measure_held_out
from xtoken_services.teacher.opening import opened_teacher

LONG_PROMPT = " ".join(["the"] * 400)
REFUSING = (
    "{% if messages[0].role == 'user' %}{{ raise_exception('no user here') }}{% endif %}{{ messages[0].content }}"
)


def chats(directory: Path, count: int) -> Path:
    """Conversations of one message each."""
    file = directory / "user.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in documents(count, seed=5)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def refusing(assets: TinyAssets, directory: Path, data: Path, **changes: Any) -> RunSpec:
    """A run whose chat templates take no user's message."""
    template = directory / "refusing.jinja"
    template.write_text(REFUSING, encoding="utf-8")
    student = {"model": assets.student, "context_length": 64, "chat_template": template}
    teacher = [assets.first_teacher(chat_template=template)]
    return tiny_spec(assets, directory, data={"path": data}, student=student, teacher=teacher, **changes)


class Measured:
    """Keeps the text on which a teacher is measured."""

    def evaluate(self, text: HeldOutText) -> EvalResult:
        self.text = text
        return EvalResult(1.0, None, 1.0, 1, 1, 1.0, 1, [1], [1.0])


def test_a_teacher_is_measured_in_the_chat_template_that_it_reads(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out, template = chats(tmp_path, 4), tmp_path / "own.jinja"
    answer = {"role": "assistant", "content": "hello"}
    records = [json.loads(line) for line in held_out.read_text(encoding="utf-8").splitlines()]
    held_out.write_text("".join(json.dumps({"messages": [*each["messages"], answer]}) + "\n" for each in records))
    template.write_text("{% for m in messages %}[own] {{ m.content }}\n{% endfor %}", encoding="utf-8")
    spec = tiny_spec(assets, tmp_path, teacher=[assets.first_teacher(chat_template=template)], eval={"path": held_out})
    run, measured = resolve_run(spec), Measured()
    with opened_teacher(run, 0, 0, lambda _: None) as model:
        monkeypatch.setattr(model, "evaluate", measured.evaluate)
        assert measure_held_out(run, 0, model, lambda _: None) is not None
        text = run.held_out_fingerprint
        other = run.spec.model_copy(update={"data": run.spec.data.model_copy(update={"train_on": "all"})})
        assert read_result(run, 0, text) is not None
        assert read_result(run.model_copy(update={"spec": other}), 0, text) is None
        moved = [run.teachers[0].model_copy(update={"weights_fingerprint": "other"})]
        assert read_result(run.model_copy(update={"teachers": tuple(moved)}), 0, text) is None
    assert measured.text.tokenizer.chat_template == template.read_text(encoding="utf-8")


def failed(crew: Crew) -> str:
    """The reason of a run that has failed once and for all, without a model."""
    ending = crew.join()
    assert (ending.state, ending.exit_code) == (RunState.FAILED, 2), ending
    assert not (crew.spec.output / "model").exists() and not (crew.spec.output / "summary.json").exists()
    return ending.error


def has_memory(directory: Path, available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find so many bytes of memory available, in a file as the kernel writes it."""
    directory.mkdir(exist_ok=True)
    (directory / "meminfo").write_text(f"MemAvailable: {available >> 10} kB\n")
    monkeypatch.setattr(machine, "PROC", directory)


def refusals(spec: RunSpec) -> set[str]:
    """The reasons for which a dry run and a start refuse a run; neither leaves anything."""
    found = set()
    for begin in (lambda: check_run(spec, None), lambda: run_locally(spec, show=False)):
        with pytest.raises(XtokenError) as refused:
            begin()
        found.add(str(refused.value))
        assert not spec.output.exists()
    return found


def test_a_run_that_the_memory_cannot_hold_is_refused_and_defaults_are_made_to_fit(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny.spec(train={"micro_batch_tokens": 8192})
    has_memory(tiny.path / "proc", 24 << 20, monkeypatch)
    [reason] = refusals(spec)
    assert reason.startswith("host memory (available) has 0.02 GiB, the run keeps 0.03 there before any activation (")
    assert "signal in 2 slots 0.02" in reason and "lower train.micro_batch_tokens = 8192 or" in reason
    (tiny.path / "run.toml").write_text(
        f'student = "{tiny.assets.student}"\nteacher = "{tiny.assets.teacher}"\ndata = "train.jsonl"\n'
        "[workers]\ncollators = 1\n",
        encoding="utf-8",
    )
    has_memory(tiny.path / "proc", 1536 << 20, monkeypatch)
    between, notes = load_run(tiny.path / "run.toml")
    assert 256 < between.train.micro_batch_tokens < 8192
    assert any("for 1.5 GiB of memory)" in note for note in notes)
    _, lines = check_start(between)
    sizes = [line for line in lines if is_size(line)]
    assert sizes[0].startswith("text: 94 records, 1 epoch: 94 samples in 3 steps of 32") and sizes[1].startswith(
        "models: student 0.0 million parameters"
    )
    assert sizes[0].endswith("; evaluated 2 times, every 100 steps, on at most 6,144 bytes") and len(lines) <= 10
    assert "of 1.50 GiB host memory (available)" in sizes[-2] and sizes[-1].startswith("disk: at most 3 checkpoints of")
    has_memory(tiny.path / "proc", 24 << 20, monkeypatch)
    fitted, notes = load_run(tiny.path / "run.toml")
    assert fitted.train.micro_batch_tokens == 256, "a single sample, where not even the processes fit"
    with pytest.raises(ConfigError, match=r"the run needs about .* where there is 0\.02 GiB of host memory"):
        check_start(fitted)
    has_memory(tiny.path / "proc", 4 << 30, monkeypatch)
    roomy, notes = load_run(tiny.path / "run.toml")
    assert roomy.train.micro_batch_tokens == 8192 and not any("micro_batch" in note for note in notes)


def test_a_run_whose_signals_shared_memory_cannot_hold_is_refused(
    tiny: Tiny, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DIRECTORY", small_disk)
    [reason] = refusals(tiny.spec())
    assert reason.startswith("/dev/shm has 0.00 GiB") and "lower train.micro_batch_tokens = 320 or" in reason


def test_a_disk_without_room_for_a_checkpoint_is_named(assets: TinyAssets, tmp_path: Path, small_disk: Path) -> None:
    reasons = refusals(tiny_spec(assets, tmp_path).model_copy(update={"output": small_disk / "out"}))
    assert all(reason.startswith(f"the disk of {small_disk / 'out'} has ") for reason in reasons), reasons
    assert all("bytes free, a checkpoint takes " in reason for reason in reasons)


def unknown_architecture(directory: Path, assets: TinyAssets) -> TinyAssets:
    """A student of a kind that transformers has only an encoder with a decoder for."""
    student = directory / "t5"
    shutil.copytree(assets.student, student)
    config = json.loads((student / "config.json").read_text("utf-8"))
    (student / "config.json").write_text(json.dumps({**config, "model_type": "t5"}), encoding="utf-8")
    return replace(assets, student=student)


def test_a_model_without_a_causal_language_model_is_refused_by_dry_run_and_start(
    tiny: Tiny, forking: ForkLauncher
) -> None:
    spec = tiny_spec(unknown_architecture(tiny.path, tiny.assets), tiny.path, train={"packing": "off"})
    with pytest.raises(XtokenError) as refused:
        check_run(spec, None)
    assert "is of the type 't5': transformers" in str(refused.value)
    assert not spec.output.exists()
    assert failed(tiny.start(spec, forking)) == f"trainer-0: {refused.value}"


def test_a_context_beyond_the_models_is_refused(assets: TinyAssets, tmp_path: Path) -> None:
    student = {"model": assets.student, "context_length": 257}
    [reason] = refusals(tiny_spec(assets, tmp_path, student=student, train={"micro_batch_tokens": 512}))
    assert reason == f"the student's context_length = 257: {assets.student} was made for 256 tokens: lower it"
    config = json.loads((assets.student / "config.json").read_text("utf-8"))
    wide = RunSpec.model_validate(tiny_spec(assets, tmp_path, student={**student, "context_length": 1024},
                                            train={"micro_batch_tokens": 2048}).model_dump()).student  # fmt: skip
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    resolve._check_context("student", wide, {**config, "rope_parameters": scaled})
    with pytest.raises(XtokenError, match="made for 512 tokens"):
        resolve._check_context("student", wide, {**config, "rope_scaling": {**scaled, "factor": 2.0}})


@pytest.mark.slow
def test_a_dry_run_refuses_a_text_without_a_usable_record_as_the_start_does(assets: TinyAssets, tmp_path: Path) -> None:
    spec = refusing(assets, tmp_path, chats(tmp_path, 40))
    with pytest.raises(XtokenError, match=r"none of 40 samples, evenly spread over the run, can be used; the first: "):
        check_run(spec, None)
    assert not spec.output.exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eval": {"samples": [LONG_PROMPT]}}, r"eval\.samples: the prompt .* has [0-9]+ tokens"),
        ({"eval": {"tasks": {"path": "task.jsonl"}}}, r"eval\.tasks: prompt 2 of .*task\.jsonl has [0-9]+ tokens"),
        ({"rollout": {"max_new_tokens": 63}, "loss": {"mode": "chain"}}, r"none of 8 prompts, .*leave room for 1 to 1"),
    ],
    ids=["samples", "tasks", "rollouts"],
)
def test_a_dry_run_refuses_prompts_that_leave_no_room(tiny: Tiny, changes: dict[str, Any], reason: str) -> None:
    held_out = write_jsonl(tiny.path / "held.jsonl", documents(4, seed=5))
    asked = tiny.path / "task.jsonl"
    asked.write_text("".join(json.dumps({"prompt": p, "answer": "a"}) + "\n" for p in ("the", LONG_PROMPT)))
    if "eval" in changes:
        changes["eval"]["path"] = held_out
        if "tasks" in changes["eval"]:
            changes["eval"]["tasks"] = {"path": asked, "max_new_tokens": 8}
    run = resolve_run(tiny.spec(records=8, **changes))
    with pytest.raises(XtokenError, match=reason):
        inspection.ACTIONS["check_as_workers"]({"run": run.model_dump(mode="json")}, lambda *_: None)


def test_held_out_conversations_without_an_answer_are_refused(assets: TinyAssets, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text((json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n") * 8)
    with pytest.raises(
        XtokenError, match=r"no record of the held-out text \(.*asked\.jsonl\) has an answer.*eval\.path"
    ):
        resolve_run(tiny_spec(assets, tmp_path, eval={"path": asked}))


def test_a_look_at_long_documents_reads_two_mebibytes_at_most(assets: TinyAssets, tmp_path: Path) -> None:
    """A parquet file of some hundred bytes can hold any number of them."""
    words = " ".join(documents(40, seed=3))
    text = words * (400_000 // len(words))
    pq.write_table(pa.table({"text": [text] * 20 + ["short"]}), tmp_path / "bomb.parquet")
    run = resolve_run(tiny_spec(assets, tmp_path, data={"path": tmp_path / "bomb.parquet"}))
    found = look_at_sample(run, make_collator(run), open_data(run), row_counts(run))
    assert found.pop("tokens") > 6
    assert found == {"positions": 6, "skipped": 0, "truncated": 5, "reason": ""}
    asking = run.spec.model_copy(update={"rollout": RolloutSpec(max_new_tokens=8, prompt_characters=40)})
    encoder = TextTokenizer(tokenizer_of(run.spec.student, "student"), "student")
    assert look_at_prompts(asking, encoder, open_data(run)) == {"positions": 6, "skipped": 0, "reason": ""}


@pytest.mark.slow
def test_a_dry_run_warns_of_cut_documents(tiny: Tiny) -> None:
    long = write_jsonl(tiny.path / "long.jsonl", [" ".join(documents(20, seed=n)) for n in range(24)])
    lines = check_run(tiny.spec(data={"path": long}, train={"micro_batch_tokens": 4096, "samples_per_step": 8}), None)
    less = "a step has about 512, memory is estimated for micro-batches of 4,096"
    assert f"text: 64 tokens each on average, about 1,536 in all; {less}" in lines, lines
    assert sum("samples are cut" in line for line in lines) == 1, "once"
    assert "--measure" in lines[-1] and "whether the teacher is better" in lines[-1]
    assert any(line.startswith("warning: 24 of 24 samples are cut at a context") for line in lines), lines


def test_evaluation_text_that_is_trained_on_is_warned_about(tiny: Tiny) -> None:
    long = write_jsonl(tiny.path / "long.jsonl", documents(24, seed=1))
    copied = tiny.path / "copied.jsonl"
    shutil.copyfile(long, copied)
    other = write_jsonl(tiny.path / "other.jsonl", documents(9, seed=77))
    for data, held_out in ((long, copied), ([long, other], other)):
        lines = file_warnings(resolve_run(tiny.spec(data={"path": data}, eval={"path": held_out})))
        assert "eval.path is also training text: bits per byte of it say nothing about other text" in lines
    fresh = resolve_run(tiny.spec(data={"path": other}, eval={"path": copied}))
    assert list(file_warnings(fresh)) == []


def test_too_little_held_out_text_for_an_adaptive_weight_is_warned_about(tiny: Tiny) -> None:
    text = write_jsonl(tiny.path / "held-out.jsonl", documents(700, seed=3))
    assert text.stat().st_size < 1 << 17
    for most, warns in ((1 << 16, True), (1 << 17, False)):  # at the limit the last document does not fit
        held_out = {"path": text, "max_bytes": most}
        _, lines = check_start(tiny.spec(eval=held_out, loss={"mode": "p_kl", "kl_loss_weight_end": "adaptive"}))
        said = [line for line in lines if line.startswith("the weight of the divergence stays 1, ")]
        assert len(said) == warns and all("bytes of held-out text are read, fewer than 65,536" in one for one in said)
        no_order = "no error", f"a larger eval.max_bytes than {most}"
        assert all(words in one and "(" not in one for one in said for words in no_order)


@pytest.mark.slow
def test_a_trial_compares_the_teacher_and_gives_the_time_of_the_whole_run(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dry_run, "TRIAL_BYTES", 250)
    held_out = write_jsonl(tiny.path / "held-out.jsonl", documents(6, seed=3))
    adaptive = {"mode": "p_kl", "vocab_topk": 64, "kl_loss_weight_end": "adaptive"}
    changes = {"report": {"tensorboard": True}, "train": {"checkpoint_every": 1}, "loss": adaptive}
    spec = tiny.spec(eval={"path": held_out, "every": 2}, **changes)
    before = sorted(tiny.path.iterdir())
    *_, teacher, time = check_run(spec, None, measure=True)
    found = re.fullmatch(
        r"time: (\S+) s a step, the median after the first of 3, (\S+) s an evaluation, of which there are 7, (\S+) s "
        r"for start and end: about (?:(\d+) min )?(\d+) s for 12 steps; the trainer's peak was 0\.\d+ GiB",
        time,
    )
    assert found, time
    step, evaluation, once, minutes, seconds = (float(group or 0) for group in found.groups())
    assert 60 * minutes + seconds == pytest.approx(12 * step + 7 * evaluation + once, abs=1.1)
    results = re.fullmatch(
        r"teacher beside the student: (.*): (\d\.\d{4}) bits per byte of held-out text, the student (\d\.\d{4}) ± "
        r"0\.\d{4} \([2-5] documents, 2\d\d bytes\)",
        teacher,
    )
    assert results, teacher
    verdict, its, own = results[1], *map(float, results.groups()[1:])
    if not verdict.startswith("no difference"):
        word, difference = re.findall(r"(better|worse) by (\d\.\d{4}) ± ", verdict)[0]
        assert word == ("worse" if its > own else "better")
        assert float(difference) == pytest.approx(abs(its - own), abs=2e-4)
    assert sorted(tiny.path.iterdir()) == before, "the trial leaves nothing"
    assert not any("weight of the divergence" in said for said in caplog.messages), "of its own text"


@pytest.mark.slow
def test_a_trial_that_is_stopped_names_the_signal(tiny: Tiny) -> None:
    file = write_run(tiny.path, {"eval": "none"} | tiny.spec().model_dump(mode="json", exclude_defaults=True))
    command = [sys.executable, "-m", "xtoken", "run", str(file), "--dry-run", "--measure"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as trial:
        until(lambda: any(tiny.path.rglob(".xtoken-*/output/logs/trainer*")))
        trial.send_signal(signal.SIGTERM)
        _, said = trial.communicate()
    assert said.splitlines()[-1] == "error: the trial of 3 steps has not completed: it was stopped by SIGTERM"


def test_a_run_without_a_usable_record_ends_before_its_first_step(tiny: Tiny, forking: ForkLauncher) -> None:
    crew = tiny.start(refusing(tiny.assets, tiny.path, chats(tiny.path, 40)), forking)
    reason = failed(crew)
    assert "none of 40 samples, evenly spread over the run, can be used" in reason
    assert "user.jsonl:" in reason and "no user here" in reason
    assert steps_of(crew.spec.output) == []


def test_a_run_whose_every_loss_is_not_finite_writes_no_model(tiny: Tiny, forking: ForkLauncher) -> None:
    student = tiny.path / "nan"
    shutil.copytree(tiny.assets.student, student)
    weights = load_file(student / "model.safetensors")
    save_file({k: torch.full_like(v, torch.nan) for k, v in weights.items()}, student / "model.safetensors")
    spec = tiny_spec(replace(tiny.assets, student=student), tiny.path, records=16, train={"packing": "off"})
    crew = tiny.start(spec, forking)
    assert "nothing was trained, no model is written: of 16 samples 2 steps had no finite loss" in failed(crew)


def test_many_skipped_and_cut_samples_are_said_from_the_start_to_the_end(tiny: Tiny, forking: ForkLauncher) -> None:
    mixed = [json.dumps({"text": text}) for text in documents(14, seed=4, words=12)]
    mixed += chats(tiny.path, 10).read_text("utf-8").splitlines()
    long = json.dumps({"text": " ".join(documents(20, seed=6))})
    data = tiny.path / "mixed.jsonl"
    data.write_text("\n".join([*mixed, *[long] * 8]) + "\n", encoding="utf-8")
    crew = tiny.start(refusing(tiny.assets, tiny.path, data), forking)
    crew.complete()
    curves = Curve(crew.spec.output / "steps.jsonl"), Curve(tiny.path / "none")
    status = with_files(crew.supervisor.status(), *curves)
    assert status.summary is not None and status.summary["skipped"] == 10
    before = status.model_copy(update={"last": None, "summary": None})
    under_way = status.model_copy(update={"summary": None})
    for said in (before, under_way, status):
        lines = warnings_of(said)
        assert lines["skipped"].startswith("10 of 32 samples are skipped"), lines
        assert "no user here" in lines["skipped"]
        assert lines["truncated"].startswith("8 of 32 samples are cut at a context")
    assert status.last is not None and (status.last["skipped_total"], status.last["truncated_total"]) == (10, 8)
