"""The Python interface: a training loop of one's own without services, and a run's settings given by name."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import xtoken
from tests.architecture.conftest import ROOT, run_code
from tests.support.cases import cases
from tests.support.tiny_run import TinyAssets, documents, make_assets
from xtoken.distill import CallbackView
from xtoken.objects import as_files
from xtoken_services.common.run.status import RunState, RunStatus

PEFT = get_peft_model(torch.nn.Sequential(torch.nn.Linear(1, 1)), LoraConfig(target_modules=["0"]))
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


def test_chain_tables_of_a_pair_are_built_once_for_all_processes(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    student, teacher = (AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher))
    first = xtoken.TokenizerPair(student, teacher).loss_fn.losses[0].teacher.tables

    def built(*_: Any) -> None:
        raise AssertionError("they are there")

    with monkeypatch.context() as patched:
        patched.setattr("xtoken.pair.build_tables", built)
        second = xtoken.TokenizerPair(student, teacher).loss_fn.losses[0].teacher.tables
        assert all(torch.equal(value, second.flat()[name]) for name, value in first.flat().items())
        student.add_tokens(["another word"])  # it is not what its directory holds
        with pytest.raises(AssertionError, match="they are there"):
            xtoken.TokenizerPair(student, teacher)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(xtoken.TokenizerPair(student, teacher).loss_fn.losses[0].teacher.tables.student.root) == len(student)


def test_rows_of_a_pair_are_as_long_as_their_longest_text(assets: TinyAssets) -> None:
    student, teacher = (AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher))
    pair = xtoken.TokenizerPair(student, teacher, context_length=256)
    texts, vocabularies = ["def f(x): return x", "x"], (len(student), len(teacher))
    short, long = pair.collate(texts), pair.collator([{"text": text} for text in texts])
    values = []
    for batch in (short, long):
        shapes = [batch[name].shape for name in ("input_ids", "teacher_input_ids")]
        draws = [torch.randn(2, 256, V, generator=torch.Generator().manual_seed(V)) for V in vocabularies]
        values.append(pair.loss(batch, *(draw[:, : shape[1]] for draw, shape in zip(draws, shapes, strict=True)))[0])
    assert short["input_ids"].shape[1] == -(-int(long["input_lengths"].max()) // 8) * 8
    assert short["teacher_input_ids"].shape[1] == -(-int(long["teacher_input_lengths"].max()) // 8) * 8
    torch.testing.assert_close(*values)


def test_a_pair_knows_no_last_step(assets: TinyAssets) -> None:
    student, teacher = (AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher))
    with pytest.raises(xtoken.XtokenError, match="give loss_fn the kl_loss_weight of each step"):
        xtoken.TokenizerPair(student, teacher, mode="alm", kl_loss_weight_end=0.0)


@cases(
    "settings, reason",
    ({"mode": "custom"}, "call your own loss in your loop"),
    ({"bogus": 1}, "bogus: there is no such field"),
    ({"mode": "alm", "temperature": 2.0}, "use alm_temperature"),
    ({"mode": "chain", "reverse_kl": True}, "reverse_kl"),
    ({"mode": "alm", "importance_cap": 2.0}, "importance_cap"),
    ({"context_length": 1}, "context_length = 1: it is a number of tokens, at least 2"),
    ({}, "'a' is no tokenizer: load one by AutoTokenizer.from_pretrained"),
)
def test_a_pair_refuses_what_it_cannot_use(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(xtoken.ConfigError, match=reason):
        xtoken.TokenizerPair("a", "directory", **settings)


@pytest.mark.parametrize("records", ["a text", {"text": "a"}, [], [None], ["a", 5]])
def test_a_batch_is_a_list_of_texts_or_records(assets: TinyAssets, records: Any) -> None:
    pair = xtoken.TokenizerPair(*(AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher)))
    with pytest.raises(xtoken.InputError, match="a batch is a list of texts, or of records"):
        pair.collate(records)


def test_the_parts_for_ones_own_loop_load_no_service() -> None:
    code = """
import json, sys, xtoken
lazy = "torch" not in sys.modules
xtoken.TokenizerPair, xtoken.TokenAligner, xtoken.CrossTokenizerDistillationLoss
print(json.dumps([lazy, sorted(name for name in sys.modules if name.startswith("xtoken_services"))]))
"""
    assert json.loads(run_code(code)) == [True, []]


def test_settings_by_file_and_by_name_exclude_each_other(tmp_path: Path) -> None:
    for begin in (xtoken.distill, xtoken.dry_run):
        with pytest.raises(xtoken.ConfigError, match=r"replace them by `settings`"):
            begin(tmp_path / "run.toml", student="models/student")
    with pytest.raises(xtoken.XtokenError, match=r"distill.*: student: field required"):
        xtoken.distill(output=str(tmp_path / "out"), data="train.jsonl")


@cases(
    "settings, message",
    ({"data": None}, "data: field required"),
    ({"student": 5}, "student: it takes a table of settings"),
    ({"teacher": [object()]}, "teacher: it takes a table of settings"),
    ({"student": {"model": torch.nn.Linear(1, 1)}}, "student: a model in memory needs its tokenizer: student="),
    ({"student": {"model": PEFT, "tokenizer": "t"}}, "student.model: a model with adapters of PEFT: give what its"),
    ({"student": {"model": torch.nn.Linear(1, 1), "tokenizer": "t"}}, "student.model: "),
    ({"data": 7}, "data: it takes a table of settings"),
    ({"data": ["a text", "b"]}, "data: there is no file 'a text'; a text is a record"),
    ({"data": [{"text": "a"}, "b"]}, "data: record 1 is no JSON such as"),
    ({"data": [{"text": {1, 2}}]}, "data: record 0 is no JSON such as"),
    ({"teacher": torch.nn.Linear(1, 1)}, "teacher: a model in memory needs its tokenizer: teacher="),
    ({"student": ("m", "t")}, 'student: it takes one model: a path, or {"model": model, "tokenizer": tokenizer}'),
    ({"data": []}, 'data: there is no record in it: give some such as {"text": "..."}, or a path'),
    ({"eval": {"path": iter([])}}, "eval.path: there is no record in it"),
    ({"eval": 3}, "eval: it takes a table of settings"),
    ({"train": 5}, "train: it takes a table of settings"),
)
def test_wrong_objects_are_named_in_our_words(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = {"student": assets.student, "teacher": assets.teacher, "data": "train.jsonl", "output": tmp_path / "out"}
    document = {name: value for name, value in (given | settings).items() if value is not None}
    with pytest.raises(xtoken.XtokenError, match=re.escape(message)) as caught:
        xtoken.distill(**document)
    assert not any(word in str(caught.value) for word in ("instance of", "dictionary", "context_length", "\n"))
    assert not (tmp_path / "out").exists()
    objects = tmp_path / "cache" / "xtoken" / "objects"
    assert not (objects.exists() and list(objects.iterdir())), "nothing half-written"


class Streamed:
    """Records that are read one after the other, with the state that an `IterableDataset` has."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    def state_dict(self) -> dict[str, Any]:
        return {}


def test_objects_are_kept_once_by_their_content(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = AutoModelForCausalLM.from_pretrained(assets.student, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(assets.student)
    records = [{"text": "one"}, {"text": "zwei ß", "n": None}]
    document = {
        "student": {"model": model, "tokenizer": tokenizer}, "teacher": assets.teacher, "data": Streamed(records),
        "eval": {"path": records, "every": 3},
    }  # fmt: skip
    first = as_files(document)
    text = Path(first["data"])
    assert [json.loads(line) for line in text.read_text("utf-8").splitlines()] == records
    assert first["eval"] == {"path": str(text), "every": 3} and first["teacher"] == str(assets.teacher)
    kept = AutoModelForCausalLM.from_pretrained(first["student"]["model"], dtype="auto")
    assert all(torch.equal(value, kept.state_dict()[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(first["student"]["tokenizer"]).get_vocab() == tokenizer.get_vocab()

    def written(*_: Any, **__: Any) -> None:
        raise AssertionError("it is there already")

    with monkeypatch.context() as patched:
        patched.setattr(model, "save_pretrained", written)
        assert as_files({**document, "data": iter(records)}) == first
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 0] += 1
    second = as_files({**document, "data": iter(records[:1])})
    assert second["student"]["model"] != first["student"]["model"] and second["data"] != first["data"]
    assert second["student"]["tokenizer"] == first["student"]["tokenizer"]
    assert len(list((tmp_path / "cache" / "xtoken" / "objects").iterdir())) == 5


def test_events_of_a_resumed_run_begin_behind_its_checkpoint(tmp_path: Path) -> None:
    def write(name: str, steps: range) -> None:
        file = tmp_path / name
        file.unlink(missing_ok=True)  # as a trainer replaces it
        file.write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in steps), encoding="utf-8")

    seen = Seen()
    view = CallbackView(seen, tmp_path)
    status = RunStatus.model_validate(
        {"id": "a", "name": "a", "output": tmp_path, "created": "", "state": "running", "checkpoint": 4, "step": 4}
    )
    write("steps.jsonl", range(7))  # the steps behind the checkpoint are lost
    write("eval.jsonl", range(0, 7, 2))
    view.show(status)
    assert seen.calls == [("start", "running")]
    write("steps.jsonl", range(4))
    write("eval.jsonl", range(0, 5, 2))
    view.show(status)
    write("steps.jsonl", range(6))
    write("eval.jsonl", range(0, 7, 2))
    view.show(status.model_copy(update={"step": 6, "checkpoint": 6}))
    view.end(status.model_copy(update={"step": 6, "checkpoint": 6, "state": RunState.STOPPED}))
    assert seen.of("step") == [4, 5] and seen.of("evaluation") == [6] and seen.of("checkpoint") == [6]
    assert seen.calls[-1] == ("end", "stopped")


class Seen(xtoken.RunCallback):
    """What a run has called, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, status: dict[str, Any]) -> None:
        self.calls.append(("start", status["state"]))

    def on_step(self, metrics: dict[str, Any]) -> None:
        self.calls.append(("step", metrics["step"]))
        raise RuntimeError("a mistake of the user's")

    def on_evaluation(self, metrics: dict[str, Any]) -> None:
        self.calls.append(("evaluation", metrics["step"]))

    def on_checkpoint(self, step: int) -> None:
        self.calls.append(("checkpoint", step))

    def on_end(self, status: dict[str, Any]) -> None:
        self.calls.append(("end", status["state"]))

    def of(self, name: str) -> list[Any]:
        return [value for each, value in self.calls if each == name]


@pytest.mark.slow
def test_a_run_of_objects_calls_back_logs_and_returns_its_model(
    assets: TinyAssets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level("INFO", logger="xtoken")
    models = {
        name: {
            "model": AutoModelForCausalLM.from_pretrained(path),
            "tokenizer": AutoTokenizer.from_pretrained(path),
            "context_length": 64,
        }
        for name, path in (("student", assets.student), ("teacher", assets.teacher))
    }
    seen = Seen()
    settings = models | {
        "data": [{"text": text} for text in documents(32, seed=2)], "output": tmp_path / "out",
        "eval": {"path": [{"text": text} for text in documents(6, seed=5)], "every": 2},
        "workers": {"collators": 1, "device": "cpu"},
        "train": {"samples_per_step": 8, "micro_batch_tokens": 2048, "checkpoint_every": 2},
    }  # fmt: skip
    lines = xtoken.dry_run(**settings)
    for size in (
        "default: ",
        "text: 32 records",
        "models: student ",
        "memory of trainer-0",
        "memory of the run",
        "disk",
    ):
        assert any(line.startswith(size) for line in lines), lines
    assert not (tmp_path / "out").exists()
    settings["data"] = iter(settings["data"])
    result = xtoken.distill(**settings, callback=seen)
    assert result.summary["steps"] == 4 and result.summary["trained"] == 32
    assert seen.of("step") == [0, 1, 2, 3], "an error in one does not end the others"
    assert seen.of("evaluation") == [0, 2, 4] == [row["step"] for row in result.evaluations()]
    assert seen.of("checkpoint")[-1] == 4
    assert seen.calls[0][0] == "start" and seen.calls[-1] == ("end", "completed")
    assert any("completed after step 4 of 4" in line for line in caplog.messages)
    assert any(line.startswith("default: ") for line in caplog.messages)
    assert (result.model / "model.safetensors").is_file()
    assert len(list((tmp_path / "cache" / "xtoken" / "objects").iterdir())) == 6
    assert not list((tmp_path / "out").rglob("records.jsonl"))
