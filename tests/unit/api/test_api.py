"""The Python interface: a training loop of one's own without services, and a run's settings given by name."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import xtoken
from tests.architecture.conftest import ROOT, run_code
from tests.support.tiny_run import TinyAssets, documents, make_assets, write_jsonl

SCRIPT = ROOT / "deploy" / "examples" / "own_loop.py"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> TinyAssets:
    return make_assets(tmp_path_factory.mktemp("assets"), extra_rows=0)


def test_a_loop_of_ones_own_lowers_the_loss_in_under_40_lines(assets: TinyAssets, tmp_path: Path) -> None:
    assert len(SCRIPT.read_text("utf-8").splitlines()) < 40
    text = tmp_path / "text.txt"
    text.write_text("".join(text.replace("\n", " ") + "\n" for text in documents(40, seed=3)), encoding="utf-8")
    train = runpy.run_path(str(SCRIPT))["train"]
    losses = train(str(assets.student), str(assets.teacher), str(text), str(tmp_path / "out"))
    assert losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("mode", ["p_kl", "gold", "uld", "alm", "chain"])
def test_every_mode_gives_a_gradient_through_a_pair(assets: TinyAssets, mode: str) -> None:
    student, teacher = (AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher))
    pair = xtoken.TokenizerPair(student, teacher, context_length=32, mode=mode, kl_loss_weight=1.0, ce_loss_scale=0.0)
    batch = pair.collate([*documents(2, seed=1), {"prompt": "def ", "completion": "self return 2024"}])
    rows, width = batch["input_ids"].shape
    torch.manual_seed(0)
    logits = torch.randn(rows, width, len(student), requires_grad=True)
    loss, metrics = pair.loss(batch, logits, torch.randn(*batch["teacher_input_ids"].shape, len(teacher)))
    loss.backward()
    assert torch.isfinite(loss) and loss > 0 and metrics["kl_loss"] > 0
    assert logits.grad is not None and logits.grad.abs().sum() > 0


def test_a_pair_knows_no_last_step(assets: TinyAssets) -> None:
    student, teacher = (AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher))
    with pytest.raises(xtoken.XtokenError, match="give loss_fn the kl_loss_weight of each step"):
        xtoken.TokenizerPair(student, teacher, mode="alm", kl_loss_weight_end=0.0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "custom"}, "call your own loss in your loop"),
        ({"bogus": 1}, "bogus: there is no such field"),
        ({"mode": "alm", "temperature": 2.0}, "use alm_temperature"),
        ({"mode": "chain", "reverse_kl": True}, "reverse_kl"),
        ({"mode": "alm", "importance_cap": 2.0}, "importance_cap"),
    ],
)
def test_a_pair_refuses_what_it_cannot_use(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(xtoken.ConfigError, match=reason):
        xtoken.TokenizerPair(None, None, **settings)


def test_the_parts_for_ones_own_loop_load_no_service() -> None:
    code = """
import json, sys, xtoken
lazy = "torch" not in sys.modules
xtoken.TokenizerPair, xtoken.TokenAligner, xtoken.CrossTokenizerDistillationLoss
print(json.dumps([lazy, sorted(name for name in sys.modules if name.startswith("xtoken_services"))]))
"""
    assert json.loads(run_code(code)) == [True, []]


def test_settings_by_file_and_by_name_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(xtoken.ConfigError, match=r"replace them by `settings`"):
        xtoken.distill(tmp_path / "run.toml", student="models/student")
    with pytest.raises(xtoken.XtokenError, match=r"distill.*: student: field required"):
        xtoken.distill(output=str(tmp_path / "out"), data="train.jsonl")


@pytest.mark.slow
def test_a_run_from_python_calls_back_and_returns_its_model(assets: TinyAssets, tmp_path: Path) -> None:
    seen: list[int] = []
    held_out = write_jsonl(tmp_path / "heldout.jsonl", documents(6, seed=5))
    result = xtoken.distill(
        student={"model": str(assets.student), "context_length": 64}, teacher=str(assets.teacher),
        data=str(write_jsonl(tmp_path / "train.jsonl", documents(32, seed=2))), output=str(tmp_path / "out"),
        eval={"path": str(held_out), "every": 2}, workers={"collators": 1, "device": "cpu"},
        train={"samples_per_step": 8, "micro_batch_tokens": 2048}, callback=lambda status: seen.append(status["step"]),
    )  # fmt: skip
    assert seen[-1] == 4 == result.summary["steps"]
    assert [row["step"] for row in result.evaluations()] == [0, 2, 4]
    assert (result.model / "model.safetensors").is_file()
