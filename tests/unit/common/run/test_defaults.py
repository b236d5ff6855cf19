"""The shortest run file, what it leaves out, odd configurations of models, and what a resume reads back."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.control.stored_runs import spec
from tests.unit.dataset.test_dataset_index import write_saved_dataset
from xtoken_core.config.spec import RunSpec, padded_length
from xtoken_core.dataset.held_out import is_held_out
from xtoken_core.errors import ConfigError, InputError, XtokenError
from xtoken_services.cli.starter import find_inputs, starter_text
from xtoken_services.common.models.packable import why_not_packed
from xtoken_services.common.run import resolve
from xtoken_services.common.run.defaults import LEAST_EVALUATION, load_run
from xtoken_services.common.run.machine import Machine
from xtoken_services.common.text.training_text import open_held_out, open_text, scored_documents
from xtoken_services.supervisor.run_record import SPEC, write_json

CPU, GPU_24 = Machine(cores=2), Machine(cores=16, gpu_bytes=24 << 30)
SHORT = 'student = "small"\nteacher = "large"\ndata = "text.jsonl"\n'
LLAMA_1B = {"vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "max_position_embeddings": 131072}
QWEN3_4B = {"vocab_size": 151936, "hidden_size": 2560, "num_hidden_layers": 36, "max_position_embeddings": 40960}


def make_model(directory: Path, config: dict[str, Any], weights: int = 64) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(weights)}, directory / "model.safetensors")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    make_model(tmp_path / "small", {"vocab_size": 90, "hidden_size": 4, "max_position_embeddings": 516})
    make_model(tmp_path / "large", {"vocab_size": 99, "hidden_size": 8, "max_position_embeddings": 4096}, weights=128)
    lines = "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(400))
    (tmp_path / "text.jsonl").write_text(lines)
    (tmp_path / "short.toml").write_text(SHORT)
    return tmp_path


def records_of(spec: RunSpec) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    """Return the documents to train on, those that are held out, and the fingerprint of the former."""
    index = open_text(spec, 0)
    return tuple(index.documents()), tuple(open_held_out(spec).documents()), index.fingerprint


def test_three_lines_are_a_run(workspace: Path) -> None:
    spec, notes = load_run(workspace / "short.toml", machine=CPU)
    assert (spec.name, spec.output) == ("short", workspace / "runs" / "short")
    assert (spec.student.context_length, spec.teacher[0].context_length) == (512, 640)
    assert spec.student.dtype == spec.teacher[0].dtype == "float32"
    assert spec.eval is not None and spec.eval.max_bytes == LEAST_EVALUATION
    assert spec.holds_back and spec.data.paths == (workspace / "text.jsonl",) and not spec.output.exists()
    trained, held_out, _ = records_of(spec)
    assert 0 < len(held_out) < 40 and len(held_out) + len(trained) == 400
    lines = {part: [json.dumps({"text": text}).encode() for text in part] for part in (trained, held_out)}
    assert all(map(is_held_out, lines[held_out])) and not any(map(is_held_out, lines[trained]))
    assert any(note.startswith("student.context_length = 512") for note in notes)
    assert any(note.startswith("teacher.context_length") for note in notes)


def test_evaluations_on_a_cpu_read_half_of_what_is_trained_between_them(workspace: Path) -> None:
    records = (json.dumps({"text": f"{number:01011}"}) + "\n" for number in range(1000))
    (workspace / "text.jsonl").write_text("".join(records))  # of 1 KiB each

    def most(*settings: str, machine: Machine = CPU) -> int:
        spec, _ = load_run(workspace / "short.toml", settings, machine=machine)
        assert spec.eval is not None
        return spec.eval.max_bytes

    steps = ("train.max_steps=50", "train.samples_per_step=8")  # evaluated every 5
    assert most(*steps) == 5 * 8 * 1024 / 2
    assert "eval.every = 5 (11 times in the run)" in load_run(workspace / "short.toml", steps, machine=CPU)[1]
    assert most(*steps, "eval.every=10") == 10 * 8 * 1024 / 2
    assert most(*steps, "student.context_length=64") == 5 * 8 * 64 * 4 / 2, "what is cut is not trained"
    assert most("train.max_steps=1", "train.samples_per_step=1") == LEAST_EVALUATION
    assert most() == 500 << 10, "the whole text once, as it has fewer than 100 steps"
    assert most(*steps, machine=GPU_24) == 1 << 20


@pytest.mark.parametrize(
    ("settings", "teachers"),
    [
        (("loss.kl_loss_weight=0",), 0),
        (("loss.kl_loss_weight=0", "loss.kl_loss_weight_end=none", "loss.mode=gold", "loss.ce_loss_scale=0.5"), 0),
        (("loss.kl_loss_weight=0", "loss.kl_loss_weight_end=1.0"), 1),
        (("loss.kl_loss_weight=0", "loss.mode=custom"), 1),
        ((), 1),
    ],
    ids=str,
)
def test_a_weight_of_0_to_the_end_starts_no_teacher(workspace: Path, settings: tuple[str, ...], teachers: int) -> None:
    spec, notes = load_run(workspace / "short.toml", settings, machine=CPU)
    assert len(spec.teacher) == teachers
    assert any(note.startswith("teacher: none, since loss.kl_loss_weight") for note in notes) == (not teachers)
    if not teachers:
        assert spec.loss.ce_loss_scale == (0.5 if "loss.ce_loss_scale=0.5" in settings else 1.0)


@pytest.mark.parametrize("table", ["eval.tasks", "train.lora"])
def test_a_table_of_the_file_is_set_to_none(workspace: Path, table: str) -> None:
    tasks = '[eval.tasks]\npath = "sums.jsonl"\n'
    (workspace / "run.toml").write_text(f"{SHORT}{tasks}[train.lora]\nrank = 4\n")
    settings = {}
    for given in ((), (f"{table}=none",)):
        spec, _ = load_run(workspace / "run.toml", given, machine=CPU)
        assert spec.eval is not None
        settings[given] = {"eval.tasks": spec.eval.tasks, "train.lora": spec.train.lora}
    whole, without = settings.values()
    assert None not in whole.values() and without == {**whole, table: None}


def test_answers_alone_are_scored_where_they_alone_are_learnt(workspace: Path) -> None:
    talk = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}]
    rows = [{"text": "plain"}, {"prompt": "one? ", "completion": "1"}, {"messages": talk}]
    (workspace / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = {}
    for learnt in ("completions", "all"):
        run = f'{SHORT}[eval]\npath = "held-out.jsonl"\n[data]\npath = "text.jsonl"\ntrain_on = "{learnt}"\n'
        (workspace / "run.toml").write_text(run.replace('data = "text.jsonl"\n', "", 1))
        spec, _ = load_run(workspace / "run.toml", machine=CPU)
        scored[learnt] = list(scored_documents(spec, open_held_out(spec)))
    assert scored == {"completions": ["plain", *rows[1:]], "all": ["plain", "one? 1", "two?\n2"]}


def test_named_settings_stay(workspace: Path) -> None:
    file = workspace / "full.toml"
    file.write_text(
        'output = "there"\neval = "none"\ndata = "text.jsonl"\n'
        '[student]\nmodel = "small"\ncontext_length = 64\ndtype = "bfloat16"\n'
    )
    spec, notes = load_run(file, machine=GPU_24)
    assert (spec.output, spec.eval, spec.data.paths) == (workspace / "there", None, (workspace / "text.jsonl",))
    assert (spec.student.context_length, spec.student.dtype, spec.teacher) == (64, "bfloat16", ())
    assert not any("student" in note for note in notes if "micro" not in note)


def test_a_resume_reads_the_first_starts_defaults(workspace: Path) -> None:
    first = started(workspace)
    assert load_run(workspace / "short.toml", machine=GPU_24)[0] == first


def started(workspace: Path, **settings: Any) -> RunSpec:
    """Return the specification of a first start, whose output has its settings."""
    spec, _ = load_run(workspace / "short.toml", [f"{name}={value}" for name, value in settings.items()], machine=CPU)
    spec.output.mkdir(parents=True, exist_ok=True)
    write_json(spec.output / SPEC, spec.model_dump(mode="json"))
    return spec


def test_a_resume_reads_the_text_that_the_run_file_names_now(workspace: Path) -> None:
    first = started(workspace)
    (workspace / "text.jsonl").rename(workspace / "other.jsonl")
    spec, _ = load_run(workspace / "short.toml", ["data.path=other.jsonl"], machine=CPU)
    assert spec.data.paths == (workspace / "other.jsonl",) and spec.eval == first.eval
    missing, _ = load_run(workspace / "short.toml", machine=CPU)
    assert missing.data == first.data and missing.eval is None  # the check of the files names what is missing


def test_a_moved_run_is_resumed_without_its_cache(workspace: Path) -> None:
    before = records_of(started(workspace, **{"eval.patience": 3}))
    moved = workspace / "moved"
    moved.mkdir()
    for name in ("small", "large", "text.jsonl", "short.toml", "runs"):
        (workspace / name).rename(moved / name)
    shutil.rmtree(moved / "runs" / "short" / "cache")
    spec, _ = load_run(moved / "short.toml", ["eval.patience=3"], machine=CPU)
    assert records_of(spec) == before and spec.data.paths == (moved / "text.jsonl",)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_rows_get_an_evaluation_as_lines_do(workspace: Path, form: str) -> None:
    texts = [f"document {number}" for number in range(400)]
    if form == "parquet":
        pq.write_table(pa.table({"text": texts}), workspace / "text.parquet", row_group_size=64)
    else:
        write_saved_dataset(workspace / "text.arrow", texts)
    spec, notes = load_run(workspace / "short.toml", [f"data.path=text.{form}"], machine=CPU)
    assert spec.holds_back and "eval: 2% of the records of data.path, chosen by a hash of their content" in notes
    trained, held_out, _ = records_of(spec)
    assert 0 < len(held_out) < 40 and sorted([*trained, *held_out]) == sorted(texts)


def test_a_resume_takes_the_evaluation_of_the_first_start_and_the_text_of_the_run_file(workspace: Path) -> None:
    (workspace / "other.jsonl").write_text((workspace / "text.jsonl").read_text())
    first = started(workspace, **{"eval.path": "other.jsonl"})
    spec, notes = load_run(workspace / "short.toml", ["data.path=other.jsonl"], machine=CPU)
    assert spec.eval == first.eval and "eval: as at the first start" in notes
    assert spec.data.paths == (workspace / "other.jsonl",)


def test_settings_of_the_command_line(workspace: Path) -> None:
    settings = ["train.learning_rate=1e-5", "teacher.weight=2", "student.context_length=32", "loss.mode=chain"]
    spec, _ = load_run(workspace / "short.toml", settings, machine=CPU)
    assert (spec.train.learning_rate, spec.student.context_length, spec.loss.mode) == (1e-5, 32, "chain")
    assert not (workspace / "runs").exists()
    for wrong, reason in (
        ("seed", "takes table.key=value"),
        ("name.x=1", "is no table"),
        ("train.rate=1", "toml --set name=other --set train.rate=1: train.rate: there is no such"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_run(workspace / "short.toml", ["name=other", wrong], machine=CPU)


def test_special_tokens_of_the_one_teacher_on_the_command_line(workspace: Path) -> None:
    for name in ("teacher", "teacher.0"):
        spec, _ = load_run(workspace / "short.toml", [f"{name}.special_tokens.x=y"], machine=CPU)
        assert spec.teacher[0].special_tokens == {"x": "y"}
    with pytest.raises(ConfigError, match="is no table of the run file"):
        load_run(workspace / "short.toml", ["teacher.1.special_tokens.x=y"], machine=CPU)


def test_values_that_no_setting_has_are_named(workspace: Path) -> None:
    deep = "[" * 5000 + "]" * 5000
    for wrong, reason in (
        ("output=~nouser/x", "no home directory of that user"),
        ("student=~nouser/x", "no home directory of that user"),
        (f"seed={deep}", "--set seed: its value is nested too deeply"),
        (f"data.path={'[' * 150}{']' * 150}", r"data\.path"),
        ('data.path=["text.jsonl", 5]', r"data\.path"),
        ('loss.mode=["chain"]', r"loss\.mode"),
        ("loss.teacher_modes=[{a = 1}]", r"loss\.teacher_modes"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_run(workspace / "short.toml", [wrong], machine=CPU)
    (workspace / "deep.toml").write_text(SHORT + f"[{'.'.join('a' * 5000)}]\n")
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_run(workspace / "deep.toml", machine=GPU_24)


def test_an_evaluation_without_text(workspace: Path) -> None:
    (workspace / "few.txt").write_text("one\n")
    few = ["data=few.txt", "name=few"]
    spec, notes = load_run(workspace / "short.toml", few, machine=CPU)
    why = "no record is in the 2% held back by their content: it takes some hundred: name a text in eval"
    assert spec.eval is None and f"eval: none, since {why}.path, or the teacher is not compared" in notes
    with pytest.raises(ConfigError, match=rf"eval\.every is set without eval\.path, and {why}"):
        load_run(workspace / "short.toml", [*few, "eval.every=2"], machine=CPU)


def test_llama_1b_from_qwen3_4b_fits_24_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "small", LLAMA_1B)
    make_model(tmp_path / "large", QWEN3_4B)
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n' * 9)
    (tmp_path / "run.toml").write_text(SHORT)
    counts = {"small": 1_235_814_400, "large": 4_022_468_096}
    monkeypatch.setattr(
        "xtoken_services.common.run.memory_estimate.weight_count", lambda directory: counts[directory.name]
    )
    spec, _ = load_run(tmp_path / "run.toml", machine=GPU_24)
    assert not spec.train.master_weights and spec.student.blockwise_head
    assert spec.content_of(0) == "hidden"
    assert 1280 <= spec.train.micro_batch_tokens < 16384
    roomy, _ = load_run(tmp_path / "run.toml", machine=Machine(16, 80 << 30))
    assert roomy.train.master_weights and roomy.train.micro_batch_tokens >= 1280
    for name, setting in (("small", "logits_scaling"), ("large", "final_logit_softcapping")):
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {setting: 8.0}))
    adjusted, _ = load_run(tmp_path / "run.toml", machine=GPU_24)
    assert adjusted.content_of(0) == "logits" and not adjusted.student.blockwise_head, "both would be refused"
    assert adjusted.student.checkpoint_activations and not adjusted.train.master_weights


@pytest.mark.parametrize("machine", [Machine(cores=2, memory_bytes=24 << 30), GPU_24], ids=["cpu", "gpu"])
def test_a_micro_batch_has_no_more_tokens_than_a_step(workspace: Path, machine: Machine) -> None:
    sizes = ["student.context_length=64", "teacher.0.context_length=100", "train.samples_per_step=3"]
    spec, _ = load_run(workspace / "short.toml", sizes, machine=machine)
    assert spec.train.micro_batch_tokens == 3 * padded_length(100)
    spec, _ = load_run(workspace / "short.toml", [*sizes, "workers.ranks=2"], machine=machine)
    assert spec.train.micro_batch_tokens == 2 * padded_length(100)


def test_init_finds_models_and_text(workspace: Path) -> None:
    inputs = find_inputs(workspace, student=None, teacher=None, data=None)
    assert (inputs.student, inputs.teacher, inputs.data) == ("small", "large", "text.jsonl")
    text = starter_text(inputs)
    settings = [line for line in text.splitlines() if re.match(r"(# )?(\w+ = |\[)", line)]
    assert len(settings) == 18 and all(line.count("  # ") == 1 for line in settings), "each says what it is"
    (workspace / "run.toml").write_text("\n".join(line.removeprefix("# ") for line in settings))
    assert load_run(workspace / "run.toml", machine=CPU)[0].train.max_steps == 1000, "each may be taken in"
    (workspace / "run.toml").write_text(text)
    assert load_run(workspace / "run.toml", machine=CPU)[0].teacher[0].model == workspace / "large"
    with pytest.raises(InputError, match="name them with --student and --teacher"):
        find_inputs(workspace / "small", student=None, teacher=None, data=None)


def test_init_takes_nothing_that_a_run_has_written_while_there_are_other_models(workspace: Path) -> None:
    for copy in ("at-300", "first/model"):
        shutil.copytree(workspace / "small", workspace / copy)
    (workspace / "at-300" / "README.md").write_text(
        "---\nbase_model: small\ntags: [distillation, xtoken]\n---\n# first\n"
    )
    for name in ("run.json", "spec.json", "steps.jsonl"):
        (workspace / "first" / name).write_text('{"step": 1}\n' * 10_000)
    inputs = find_inputs(workspace, student=None, teacher=None, data=None)
    assert (inputs.student, inputs.teacher, inputs.data) == ("small", "large", "text.jsonl")
    assert find_inputs(workspace, student=workspace / "at-300", teacher=None, data=None).student == "at-300"
    shutil.rmtree(workspace / "small")
    assert find_inputs(workspace, student=None, teacher=None, data=None).student == "at-300", "there is no other"


def test_models_and_text_are_found_through_links_once(
    workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    project = tmp_path_factory.mktemp("project")
    (project / "a").symlink_to(workspace)
    (project / "b").symlink_to(workspace)
    (workspace / "upwards").symlink_to(project)
    inputs = find_inputs(project, student=None, teacher=None, data=None)
    assert {Path(inputs.student).name, Path(inputs.teacher).name} == {"small", "large"}
    assert Path(inputs.data).name == "text.jsonl" and (project / inputs.student / "config.json").is_file()
    assert find_inputs(project, student=workspace / "small", teacher=None, data=None).teacher.endswith("large")


ODD: list[Any] = [None, True, -1, 10**30, 1e999, "x" * 1000, [], [[]], {}, {"vocab_size": []}]
KEYS = ("model_type", "vocab_size", "text_config", "n_positions", "max_position_embeddings", "rope_scaling",
        "attn_logit_softcapping", "hidden_size", "original_max_position_embeddings")  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: json.dumps(odd)[:20])
@pytest.mark.parametrize("key", KEYS)
def test_odd_value(tmp_path: Path, key: str, odd: Any) -> None:
    model = RunSpec.model_validate(spec(tmp_path)).student
    model.model.mkdir(parents=True)
    config = {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64, "rope_scaling": {"type": odd}}
    (model.model / "config.json").write_text(json.dumps({**config, key: odd}))
    assert "\n" not in str(why_not_packed({**config, key: odd}, 64))
    with pytest.raises(XtokenError) as refused:  # there are neither weights nor a tokenizer
        resolve._model("student", model)
    assert "\n" not in str(refused.value)
    try:
        for scaling in (
            {"rope_scaling": odd},
            {"rope_scaling": {"factor": odd, "original_max_position_embeddings": odd}},
        ):
            resolve._check_context("student", model, {**config, key: odd, **scaling})
    except XtokenError as error:
        assert "\n" not in str(error)
