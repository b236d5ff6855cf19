"""On-policy runs of real processes: the same ids twice, a mixture with text, kills of workers."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.integration.conftest import Start
from tests.support.engine_process import kill_at_random, server_process
from tests.support.forks import ForkLauncher
from tests.support.tiny_run import TinyAssets, documents, make_assets, steps_of, tiny_spec, write_jsonl
from tests.support.trained_student import train_briefly
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import ConfigError
from xtoken_services.common.run.resolve import resolve_run
from xtoken_services.common.run.status import RunState
from xtoken_services.common.text.collation import look_at_sample, make_collator, open_data, row_counts

EXACT = ("ids", "loss", "grad_norm", "completion_tokens", "finished", "staleness")


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> TinyAssets:
    """The assets of a tiny run whose student writes text."""
    assets = make_assets(tmp_path_factory.mktemp("writing"))
    train_briefly(assets.student)
    return assets


def on_policy(
    assets: TinyAssets, directory: Path, *, records: int = 24, mode: str = "p_kl", beta: float | None = None,
    importance_cap: float | None = None, kl: tuple[float, float | None] = (1.0, None),
    train: dict[str, Any] | None = None, ranks: int = 1, evaluation: dict[str, Any] | None = None,
    device: str = "cpu", **rollout: Any,
) -> RunSpec:  # fmt: skip
    settings = {"max_new_tokens": 10, "prompt_characters": 40, "max_staleness": 0, **rollout}
    loss = {"mode": mode, "beta": beta, "importance_cap": importance_cap}
    loss |= {"kl_loss_weight": kl[0], "kl_loss_weight_end": kl[1]}
    held_out = {} if evaluation is None else {"eval": evaluation}
    return tiny_spec(
        assets, directory, records=records, rollout=settings, loss=loss, train={"checkpoint_every": 2, **(train or {})},
        workers={"collators": 1, "ranks": ranks, "device": device}, **held_out,
    )  # fmt: skip


@pytest.mark.slow
def test_two_runs_train_on_the_same_completions(
    writing: TinyAssets, tmp_path: Path, start: Start, forking: ForkLauncher
) -> None:  # fmt: skip
    specs = [on_policy(writing, tmp_path / name) for name in "ab"]
    crews = [start(spec, forking) for spec in specs]
    for crew in crews:
        crew.complete()
    one, two = ([{name: line[name] for name in EXACT} for line in steps_of(spec.output)] for spec in specs)
    assert one == two
    assert [i for line in one for i in line["ids"]] == list(range(24))
    for line in steps_of(specs[0].output):
        assert line["completions"] == 8
        assert 1 <= line["completion_tokens"] <= 10
        assert line["staleness"] == line["ce_loss"] == 0 and "accuracy" not in line
        assert line["kl_loss"] > 0
        assert line["generated_tokens_per_second"] > 0
        assert line["entropy"] > 0
        assert 0 < line["rollout_wait"] < 1
    assert not (specs[0].output / "logs" / "collator-0.1.log").exists()
    [shown, *_] = json.loads((specs[0].output / "rollouts.json").read_text())["samples"]
    [side] = shown["teachers"]
    compared = {chunk for _, chunk in side["student"] if chunk >= 0}
    assert compared == {chunk for _, chunk in side["teacher"] if chunk >= 0} == {int(c) for c in side["divergence"]}
    text, other = ("".join(text for text, chunk in side[name] if chunk >= 0) for name in ("student", "teacher"))
    assert text.split("<")[0] == other.split("<")[0]
    assert max(side["divergence"].values()) > 0


@pytest.mark.slow
def test_a_teachers_temperature_counts_on_completions_alone(
    writing: TinyAssets, tmp_path: Path, start: Start, forking: ForkLauncher
) -> None:
    form = {"after": 1, "max_new_tokens": 10, "mode": "chain"}
    specs = [on_policy(writing, tmp_path / str(at), teacher_temperature=at, **form) for at in (0.1, 1.0)]
    crews = [start(spec, forking) for spec in specs]
    for crew in crews:
        crew.complete()
    sharp, plain = (steps_of(spec.output)[:2] for spec in specs)
    assert [sharp[0][name] for name in ("ids", "loss", "grad_norm")] == [plain[0][name] for name in EXACT[:3]]
    assert [sharp[1][name] for name in ("ids", "entropy")] == [plain[1][name] for name in ("ids", "entropy")]
    assert sharp[1]["kl_loss"] != pytest.approx(plain[1]["kl_loss"], rel=0.01)


@pytest.mark.slow
def test_a_teacher_with_the_students_tokenizer_is_compared_by_bytes(
    writing: TinyAssets, tmp_path: Path, start: Start
) -> None:
    twin = shutil.copytree(writing.student, tmp_path / "twin")
    settings = {"max_new_tokens": 10, "prompt_characters": 40, "max_staleness": 0, "teacher_temperature": 1.0}
    spec = tiny_spec(
        writing, tmp_path, records=24, teacher=[{"model": twin, "context_length": 64}],
        loss={"vocab_topk": None, "mode": "chain", "beta": 0.5},
        rollout=settings,
    )  # fmt: skip
    assert resolve_run(spec).same_tokenizer == (False,)
    start(spec).complete()
    first, *_, last = steps_of(spec.output)
    assert abs(first["kl_loss"]) < 1e-5 < last["kl_loss"]  # of weights that are the teacher's, then of others
    assert first["chunk_count_generated_1to1_t0"] > 0


@pytest.mark.slow
def test_a_sharded_student_with_adapters_completes_prompts(writing: TinyAssets, tmp_path: Path, start: Start) -> None:
    pytest.importorskip("peft")
    train = {"lora": {"rank": 4}, "parallel": "fsdp", "learning_rate": 0.03}
    spec = on_policy(writing, tmp_path, mode="chain", train=train, ranks=2)
    crew = start(spec)
    crew.complete()
    lines = steps_of(spec.output)
    assert all(0 < line["overlap_ratio"] <= 1 for line in lines)
    assert sorted(i for line in lines for i in [*line["ids"], *line["skipped"]]) == list(range(24))
    assert [line["staleness"] for line in lines] == [0.0] * 3
    assert lines[-1]["entropy"] != lines[0]["entropy"]


@pytest.mark.slow
def test_a_killed_trainer_goes_over_from_text_to_completions_at_the_same_step(
    writing: TinyAssets, tmp_path: Path, start: Start, forking: ForkLauncher
) -> None:
    """A supervised cold start of a third, then two completions each of more and more prompts; kills around the switch.

    Killed behind a checkpoint of the text, the second run goes through the switch again.
    """
    form = {"after": 1 / 3, "fraction": [0.5, 1.0], "completions": 2, "learning_rate": 1e-3, "max_staleness": 0}
    specs = [on_policy(writing, tmp_path / name, records=8 * 18, kl=(0.0, 1.0), **form) for name in "ab"]
    start(specs[0], forking).complete()
    crew = start(specs[1], forking)
    for steps, victim in ((5, "trainer-0"), (7, "rollout-0"), (10, "trainer-0")):
        crew.wait_for_steps(steps)
        crew.kill(victim)
    crew.complete()
    exact = (*EXACT[:3], "learning_rate")
    one, two = ([{name: line[name] for name in exact} for line in steps_of(spec.output)] for spec in specs)
    assert one == two
    lines = steps_of(specs[0].output)
    skipped = [i for line in lines for i in line["skipped"]]  # a tiny model also writes bytes that are no text
    assert sorted([*skipped, *(i for line in lines for i in line["ids"])]) == list(range(8 * 18))
    prompts = [0] * 6 + [4] * 6 + [8] * 6
    made = [sum(i // 8 == step for i in skipped) + line.get("completions", 0) for step, line in enumerate(lines)]
    assert made == prompts and len(skipped) < 16
    assert all(line["ce_loss"] > 0 and line["kl_loss_scale"] == 0 for line in lines[:6])
    assert all((line["ce_loss"] > 0) == (line["step"] < 12) for line in lines[6:])
    assert all(line["kl_loss"] > 0 and line["kl_loss_scale"] == 1 for line in lines[6:])
    assert max(line["learning_rate"] for line in lines[6:]) == 1e-3 < lines[1]["learning_rate"] == 3e-3
    log = (specs[0].output / "logs" / "rollout-0.1.log").read_text()
    assert "generating with the weights of step 6" in log
    assert not any(f"weights of step {step}\n" in log for step in range(6)) and "waiting for weights" not in log


def test_a_cold_start_as_long_as_the_run_is_refused(writing: TinyAssets, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.after = 3 of 3 steps leaves none for completions: lower it"):
        resolve_run(on_policy(writing, tmp_path, after=3))


def test_a_cold_start_is_looked_at_where_it_has_text(writing: TinyAssets, tmp_path: Path) -> None:
    run = resolve_run(on_policy(writing, tmp_path, records=28, after=1, fraction=0.5))
    found = look_at_sample(run, make_collator(run), open_data(run), row_counts(run))
    assert found.pop("tokens") > 8 + 4 + 4 + 4
    assert found == {"positions": 8 + 4 + 4 + 4, "skipped": 0, "truncated": 0, "reason": ""}


@pytest.mark.parametrize(
    ("device", "form"),
    [
        pytest.param("cpu", {"mode": "chain", "beta": 0.5, "importance_cap": 2.0}, marks=pytest.mark.slow),
        pytest.param("cuda", {"mode": "chain", "beta": 0.5}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"mode": "p_kl", "weights": "shared_memory"}, marks=pytest.mark.gpu),
    ],
    ids=["cpu-chain-jsd", "cuda-chain-jsd", "cuda-p_kl"],
)
def test_half_of_a_step_is_generated(
    writing: TinyAssets, tmp_path: Path, start: Start, device: str, form: dict[str, Any]
) -> None:
    """No completion is older than allowed and no position is lost, also with all workers on one GPU."""
    spec = on_policy(writing, tmp_path, records=8 * 12, fraction=0.5, max_staleness=1, device=device, **form)
    crew = start(spec)
    lines = crew.complete()
    positions = [i for line in lines for i in (*line["ids"], *line["skipped"])]
    assert sorted(positions) == list(range(8 * 12))
    assert max(line.get("staleness", 0) for line in lines) <= 1
    assert all(line["kl_loss"] > 0 for line in lines)
    ratios = [line["overlap_ratio"] for line in lines if "overlap_ratio" in line]
    assert len(ratios) == (len(lines) if form["mode"] == "chain" else 0) and all(0 < each <= 1 for each in ratios)
    logs = {name: (spec.output / "logs" / f"{name}-0.1.log").read_text() for name in ("rollout", "trainer")}
    assert ("CUDA graph of" in logs["rollout"]) == (device == "cuda")
    assert "without CUDA graphs" not in logs["rollout"]
    assert ("publishing the weights on the host" in logs["trainer"]) == (device == "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_completion_is_of_the_first_weights_though_its_server_is_killed(
    writing: TinyAssets, tmp_path: Path, start: Start, forking: ForkLauncher, engine: str
) -> None:
    """The trainer's weights give every completion the log-probabilities with which it was sampled."""
    end = AutoTokenizer.from_pretrained(writing.student).eos_token_id
    kills = int(os.environ.get("SERVER_KILLS", "5"))  # 50 take minutes: --timeout=2000
    steps, form = 4 * kills + 4, {"mode": "chain", "beta": 0.5, "importance_cap": 2.0}
    with server_process("generating", writing.student, end) as (url, pids):
        spec = on_policy(
            writing, tmp_path, records=8 * steps, url=url, url_engine=engine, temperature=0.0, url_timeout_s=30.0,
            train={"learning_rate": 1e-4}, **form,
        )  # fmt: skip
        crew = start(spec, forking)
        for kill in range(kills):
            crew.wait_for_steps(1 + 3 * kill)
            kill_at_random(pids, kill, 0.3)
        lines = crew.complete()
    # A tiny model also writes bytes that are no text; a step of such alone has no line.
    skipped = [int(i) for i in json.loads((spec.output / "summary.json").read_text())["skipped_reasons"]]
    assert sorted([*skipped, *(i for line in lines for i in line["ids"])]) == list(range(8 * steps))
    assert len(pids) == kills + 1 and not any(line["dead"] for line in lines)
    assert [line["importance_weight_t0"] for line in lines] == pytest.approx([1.0] * len(lines), abs=1e-4)


@pytest.mark.slow
def test_a_killed_rollout_worker_and_trainer_lose_nothing(writing: TinyAssets, tmp_path: Path, start: Start) -> None:
    spec = on_policy(
        writing, tmp_path, records=8 * 60, fraction=0.5, max_staleness=1, publish_every=2, weights="directory"
    )
    crew = start(spec)
    for steps, victim in ((6, "rollout-0"), (14, "trainer-0"), (24, "rollout-0"), (34, "queue")):
        crew.wait_for_steps(steps)
        crew.kill(victim)
    assert crew.join().state == RunState.COMPLETED
    lines = steps_of(spec.output)
    trained = [i for line in lines for i in line["ids"]]
    # A model without training also writes bytes that are no text.
    skipped = [int(i) for i in json.loads((spec.output / "summary.json").read_text())["skipped_reasons"]]
    assert sorted(trained + skipped) == list(range(8 * 60))
    assert all(i % 8 >= 4 for i in skipped)
    assert all(line.get("completions", 0) == sum(i % 8 >= 4 for i in line["ids"]) for line in lines)
    assert max(line.get("staleness", 0) for line in lines) <= 1
    assert lines[0]["ce_loss"] > 0
    assert not (spec.output / "rollout-weights").exists()


@pytest.mark.slow
def test_a_stopped_run_resumes_with_completions_by_its_checkpoint(
    writing: TinyAssets, tmp_path: Path, start: Start
) -> None:
    whole = on_policy(writing, tmp_path / "whole", records=8 * 12)
    start(whole).complete()
    shutil.copytree(tmp_path / "whole", tmp_path / "again", ignore=shutil.ignore_patterns("out"))
    again = on_policy(writing, tmp_path / "again", records=8 * 12)
    crew = start(again)
    crew.wait_for_steps(4)
    crew.stop()
    start(again).complete()
    one, two = ([{name: line[name] for name in EXACT} for line in steps_of(spec.output)] for spec in (whole, again))
    assert one == two


@pytest.mark.slow
def test_a_run_that_gets_worse_on_its_task_ends_with_the_student_that_was_best(
    tmp_path: Path, start: Start, forking: ForkLauncher
) -> None:
    assets = make_assets(tmp_path)
    train_briefly(assets.student, texts=["two and two are four"] * 8 * 40)
    sum_of_two = {"answer": "four", "match": "contains"}
    data, task, held_out = (tmp_path / f"{name}.jsonl" for name in ("train", "sums", "held_out"))
    data.write_text((json.dumps({"text": "two and two are", **sum_of_two}) + "\n") * 8 * 40)
    task.write_text(json.dumps({"prompt": "two and two are", **sum_of_two}) + "\n")
    write_jsonl(held_out, documents(4, seed=5))
    spec = on_policy(
        assets, tmp_path, train={"learning_rate": 3.0, "warmup_steps": 0}, stop_when_worse=2, prompt_characters=None,
        evaluation={"path": held_out, "every": 2, "tasks": {"path": task, "max_new_tokens": 10}},
    )  # fmt: skip
    lines = start(spec, forking).complete()
    assert lines[0]["completion_accuracy"] > 0.5, "the student of step 0 knows it"
    summary = json.loads((spec.output / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["best"]["step"] == 0
    assert summary["stopped_early"] == "2 evaluations in a row were worse on tasks than that of step 0 (" \
        "rollout.stop_when_worse)"  # fmt: skip
    given, exported = (load_file(where / "model.safetensors") for where in (assets.student, spec.output / "model"))
    assert all(torch.equal(given[name].to(exported[name].dtype), exported[name]) for name in exported)
    assert "after 0 of the run's 40 steps" in (spec.output / "model" / "README.md").read_text()
