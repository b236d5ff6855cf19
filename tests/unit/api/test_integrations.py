"""Other trainers with xtoken's loss: a step's gradient is that of a run, however the step is divided."""

import json
import os
import pickle
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import xtoken
from tests.architecture.conftest import ROOT
from tests.support.tiny_run import TinyAssets, documents, make_assets, write_jsonl
from xtoken.integrations import DistillationCollator, DistillationTrainer
from xtoken_core.losses.masks import loss_counts

EXAMPLES = ROOT / "deploy" / "examples"
SETTINGS: dict[str, Any] = {"mode": "alm", "kl_loss_weight": 0.7, "ce_loss_scale": 0.4}
CLOSE = 1e-6
"""Largest relative difference to a run."""
RECORDS: list[dict[str, Any]] = [
    *({"text": text} for text in documents(9, seed=3)),
    {"prompt": "def ", "completion": "return 12"},
    {"text": " "},  # counts for nothing
    {"text": "x = 345"},
]
"""Of lengths so different that a mean of means is another number."""


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> TinyAssets:
    return make_assets(tmp_path_factory.mktemp("assets"), extra_rows=0)


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state for the process."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def pair_of(assets: TinyAssets) -> xtoken.TokenizerPair:
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher)]
    return xtoken.TokenizerPair(*tokenizers, context_length=64, **SETTINGS)


def models_of(assets: TinyAssets, dtype: torch.dtype) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(path, dtype=dtype) for path in (assets.student, assets.teacher)]


def arguments(out: Path, rows: int, micro_batches: int, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        str(out), per_device_train_batch_size=rows, gradient_accumulation_steps=micro_batches,
        train_sampling_strategy="sequential", lr_scheduler_type="constant", report_to="none", save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_steps=1, **settings,
    )  # fmt: skip


class Stream(IterableDataset[dict[str, Any]]):
    """The records one after the other, of a number that nobody knows."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(RECORDS)


def gradients(
    assets: TinyAssets, out: Path, rows: int, micro_batches: int, records: Any = RECORDS
) -> dict[str, Tensor]:
    """The gradient of one step over all records, in float64: what plain descent at rate 1 takes away."""
    student, teacher = models_of(assets, torch.float64)
    before = {name: value.clone() for name, value in student.state_dict().items()}
    settings = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
    trainer = DistillationTrainer(
        student, arguments(out, rows, micro_batches, **settings), train_dataset=records, pair=pair_of(assets),
        teacher=teacher,
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]
    parts = SETTINGS["ce_loss_scale"] * logged["ce_loss"] + SETTINGS["kl_loss_weight"] * logged["kl_loss"]
    assert parts == pytest.approx(logged["loss"], rel=1e-4) and min(logged["ce_loss"], logged["kl_loss"]) > 0
    return {name: before[name] - value for name, value in student.state_dict().items()}


def reference(assets: TinyAssets) -> dict[str, Tensor]:
    """The same by the loss of a run's step: micro-batches of one row under the denominators of `loss_counts`."""
    student, teacher = models_of(assets, torch.float64)
    pair = pair_of(assets)
    rows = [pair.collator.padded([record]) for record in RECORDS if record.get("text") != " "]
    counts = [loss_counts(pair.loss_fn.config, [False])(row) for row in rows]
    tokens, chunks = (sum(int(count[name].sum()) for count in counts) for name in ("ce_tokens", "kd_chunks_0"))
    for row in rows:
        theirs = teacher(row["teacher_0_input_ids"]).logits
        ours = student(row["input_ids"]).logits
        loss, _ = pair.loss_fn(row, ours, [theirs], global_valid_toks=tokens, global_valid_chunks=[chunks])
        loss.backward()
    return {name: value.grad for name, value in student.named_parameters()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).norm() / value.norm()) for name, value in expected.items())


@pytest.mark.parametrize(("rows", "micro_batches"), [(12, 1), (4, 3), (5, 3)])
def test_a_step_does_not_depend_on_its_micro_batches(
    assets: TinyAssets, tmp_path: Path, rows: int, micro_batches: int
) -> None:
    assert difference(gradients(assets, tmp_path, rows, micro_batches), reference(assets)) < CLOSE


def save_gradients(student: str, teacher: str, out: str) -> None:
    """What a rank does: `python -c` in two processes."""
    place = Path(student).parent
    assets = TinyAssets(Path(student), Path(teacher), place, place, place)
    found = [gradients(assets, Path(out), 2, 3, records) for records in (RECORDS, Stream())]
    if os.environ["RANK"] == "0":
        torch.save(found, Path(out) / "gradients.pt")


@pytest.mark.slow
def test_a_step_does_not_depend_on_its_ranks(assets: TinyAssets, tmp_path: Path) -> None:
    code = "from tests.unit.api.test_integrations import save_gradients; import sys; save_gradients(*sys.argv[1:])"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common["PYTHONPATH"] = f"{ROOT}:{ROOT}/services"
    command = [sys.executable, "-c", code, str(assets.student), str(assets.teacher), str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank}, cwd=ROOT)
        for rank in ("0", "1")
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
    listed, streamed = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert max(difference(listed, reference(assets)), difference(streamed, reference(assets))) < CLOSE


@pytest.mark.slow
def test_steps_are_those_of_a_run(assets: TinyAssets, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "train.jsonl", documents(24, seed=6))
    train = {
        "samples_per_step": 8, "micro_batch_tokens": 256, "learning_rate": 1e-3, "schedule": "constant",
        "grad_clip": 0.1, "betas": (0.9, 0.95),
    }  # fmt: skip
    sides = {
        name: {"model": str(path), "context_length": 64, "dtype": "float32"}
        for name, path in (("student", assets.student), ("teacher", assets.teacher))
    }
    run = run_of(sides, data, tmp_path / "out", train)
    lines = [json.loads(line) for line in (run.output / "steps.jsonl").read_text("utf-8").splitlines()]
    student, teacher = models_of(assets, torch.float32)
    settings = {"learning_rate": 1e-3, "adam_beta2": 0.95, "weight_decay": 0.0, "max_grad_norm": 0.1, "max_steps": 3}
    records = [json.loads(line) for line in data.read_text("utf-8").splitlines()]
    trainer = DistillationTrainer(
        student, arguments(tmp_path / "trainer", 2, 4, **settings), train_dataset=records, pair=pair_of(assets),
        teacher=teacher,
    )  # fmt: skip
    trainer.train()
    logs = [line for line in trainer.state.log_history if "loss" in line]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in logs] == pytest.approx([line[name] for line in lines], rel=CLOSE)
    exported = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).state_dict()
    assert difference(student.state_dict(), exported) < CLOSE


def run_of(sides: dict[str, Any], data: Path, out: Path, train: dict[str, Any]) -> xtoken.DistillResult:
    settings = [f"loss.{name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    return xtoken.distill(
        **sides, data={"path": data, "shuffle": False}, output=out, train=train, eval="none",
        workers={"collators": 1, "device": "cpu"}, settings=[*settings, "loss.kl_loss_weight_end=none"],
    )  # fmt: skip


def test_an_evaluation_and_a_step_weigh_records_as_the_loss_of_a_pair(assets: TinyAssets, tmp_path: Path) -> None:
    student, teacher = models_of(assets, torch.float64)
    pair, labels = pair_of(assets), []
    records = [RECORDS[0], RECORDS[1] | {"loss_multiplier": 0.25}, *RECORDS[9:11]]
    trainer = DistillationTrainer(
        student, arguments(tmp_path, 4, 1, per_device_eval_batch_size=4, max_steps=1), train_dataset=records,
        eval_dataset=records, pair=pair, teacher=teacher,
        compute_metrics=lambda found: labels.append(found.label_ids) or {},
    )  # fmt: skip
    batch = pair.collate(records)
    with torch.no_grad():
        theirs = teacher(batch["teacher_input_ids"]).logits
        expected, _ = pair.loss(batch, student(batch["input_ids"]).logits, theirs)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=CLOSE)
    learnt = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)).bool()
    assert torch.equal(torch.from_numpy(labels[0]), batch["input_ids"].where(learnt, -100)), "no padding, no prompt"
    trainer.train()
    assert trainer.state.log_history[-2]["loss"] == pytest.approx(float(expected), rel=CLOSE)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved("x = 345")["input_ids"] == pair.tokenizer("x = 345")["input_ids"], "beside the weights"


def test_parts_of_a_loss_are_those_of_its_steps_after_a_resume_too(assets: TinyAssets, tmp_path: Path) -> None:
    for steps, checkpoint in ((2, None), (3, str(tmp_path / "checkpoint-2"))):
        student, teacher = models_of(assets, torch.float32)
        settings = arguments(tmp_path, 2, 2, max_steps=steps)
        settings.set_save(strategy="steps", steps=2)
        trainer = DistillationTrainer(student, settings, train_dataset=RECORDS, pair=pair_of(assets), teacher=teacher)
        trainer.train(resume_from_checkpoint=checkpoint)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        parts = SETTINGS["ce_loss_scale"] * line["ce_loss"] + SETTINGS["kl_loss_weight"] * line["kl_loss"]
        assert parts == pytest.approx(line["loss"], rel=1e-4)


def test_a_pair_on_another_device_another_loss_and_a_teacher_as_a_path_are_refused(
    assets: TinyAssets, tmp_path: Path
) -> None:
    student, teacher = models_of(assets, torch.float32)
    pair = pair_of(assets)
    pair.device = torch.device("cuda")
    with pytest.raises(xtoken.ConfigError, match=r'the pair is on cuda, .* device="cpu"'):
        DistillationTrainer(student, arguments(tmp_path, 2, 1), pair=pair, teacher=teacher)
    smooth = arguments(tmp_path, 2, 1, label_smoothing_factor=0.1)
    with pytest.raises(xtoken.ConfigError, match="the pair's loss has no label_smoothing_factor"):
        DistillationTrainer(student, smooth, pair=pair_of(assets), teacher=teacher)
    unloaded: Any = assets.teacher
    with pytest.raises(
        xtoken.ConfigError, match=r"teacher: '/.*/teacher' is no model: load it by AutoModelForCausalLM"
    ):
        DistillationTrainer(student, arguments(tmp_path, 2, 1), pair=pair, teacher=unloaded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_without_masters_is_warned_about(
    assets: TinyAssets, tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    student, teacher = models_of(assets, dtype)
    DistillationTrainer(student, arguments(tmp_path, 2, 1), pair=pair_of(assets), teacher=teacher)
    told = [text for text in caplog.messages if text.startswith("the student's weights are torch.bfloat16: small")]
    assert len(told) == (dtype == torch.bfloat16)


def test_the_collator_takes_what_a_pair_takes(assets: TinyAssets) -> None:
    pair = pair_of(assets)
    records = ["x = 345", RECORDS[9], RECORDS[10]]
    batch = pickle.loads(pickle.dumps(DistillationCollator(pair)))(records)  # as to a worker that is not forked
    assert batch["input_ids"].shape == pair.collate(records)["input_ids"].shape, "no padding to the context"
    assert batch["ce_tokens"].tolist()[2] == batch["kd_chunks_0"].tolist()[2] == 0
    assert all(batch[name][:2].min() > 0 for name in ("ce_tokens", "kd_chunks_0"))
    with pytest.raises(xtoken.InputError, match="record 1 of the batch"):
        DistillationCollator(pair)(["x", {"messages": []}])


def example(name: str, assets: TinyAssets, tmp_path: Path, **constants: int) -> Any:
    text = tmp_path / "text.txt"
    text.write_text("".join(text.replace("\n", " ") + "\n" for text in documents(12, seed=3)), encoding="utf-8")
    train = runpy.run_path(str(EXAMPLES / name))["train"]
    train.__globals__.update(constants)
    places = str(assets.student), str(assets.teacher), str(text), str(tmp_path / "out")
    return lambda **settings: train(*places, **settings)


def test_the_example_for_accelerate_lowers_the_loss(assets: TinyAssets, tmp_path: Path) -> None:
    losses = example("accelerate_loop.py", assets, tmp_path, STEPS=8)()
    assert len(losses) == 8 and losses[-1] < 0.97 * losses[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_example_for_trl_lowers_the_loss(assets: TinyAssets, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    losses = example("trl_sft.py", assets, tmp_path)(max_steps=8, use_cpu=True, learning_rate=4e-3)
    assert len(losses) == 8 and losses[-1] < 0.97 * losses[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()
