"""The demo's run files and its directory.

The demo's text.

The demo's models before their training.
"""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.examples import examples
from xtoken_core.config import load_run_spec
from xtoken_core.errors import InputError, XtokenError
from xtoken_services.demo.run import (
    CROSS_ENTROPY,
    DISTILLED,
    TEACHER,
    TEACHER_TRAINING,
    Training,
    _train,
    cut_at_lines,
    is_held_out,
    library_files,
    prepare_directory,
    write_corpus,
    write_model,
    write_run_files,
)
from xtoken_services.demo.vocabularies import train_teacher_tokenizer

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(200)]


def test_runs_differ_in_name_output_and_loss(tmp_path: Path) -> None:
    files = write_run_files(tmp_path, TEACHER_TRAINING, Training(steps=7, seed=3))
    plain, distilled = load_run_spec(files[CROSS_ENTROPY]), load_run_spec(files[DISTILLED])
    differing = {name for name in type(plain).model_fields if getattr(plain, name) != getattr(distilled, name)}
    assert differing == {"name", "output", "loss"}
    assert plain.loss.kl_loss_weight == 0 < distilled.loss.kl_loss_weight
    assert plain.loss.ce_loss_scale == distilled.loss.ce_loss_scale
    assert distilled.loss.mode == "chain"
    assert (plain.train.max_steps, plain.seed) == (7, 3)
    teacher = load_run_spec(files[TEACHER])
    assert (teacher.teacher, teacher.train.max_steps) == ((), TEACHER_TRAINING.steps)
    assert (teacher.data, teacher.eval.path, teacher.eval.max_bytes) == (
        plain.data,
        plain.eval.path,
        plain.eval.max_bytes,
    )
    assert plain.data.paths == (tmp_path / "corpus" / "train.jsonl",)


@pytest.mark.parametrize("training", [Training(), Training(steps=1, samples_per_step=1)])
def test_run_files_are_valid_whatever_the_size(tmp_path: Path, training: Training) -> None:
    for file in write_run_files(tmp_path, training, training).values():
        spec = load_run_spec(file)
        assert spec.train.max_steps == training.steps
        assert spec.train.learning_rate == training.learning_rate
        assert spec.train.min_learning_rate == 0.00015


def test_failed_run_ends_the_demo(tmp_path: Path) -> None:
    file = write_run_files(tmp_path, Training(), Training())[DISTILLED]
    with pytest.raises(XtokenError, match="cannot read") as ended:
        _train(file)
    assert ended.value.exit_code == InputError.exit_code


def test_only_the_demos_own_directory_is_cleared(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "new" / "out")
    (tmp_path / "new" / "out" / "old.txt").write_text("left by an earlier demo")
    prepare_directory(tmp_path / "new" / "out")
    assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == [".xtoken-demo"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="was not made by the demo"):
        prepare_directory(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_output_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"cannot write to .*file"):
            prepare_directory(place)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for name in ("test/a.py", "idlelib/b.py", "site-packages/c.py", "email/tests/d.py", "email/e.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("left = 'out'\n" * 100)
    for i in range(60):
        (root / f"module{i}.py").write_text("".join(f"value_{i}_{j} = {j * i}\n" for j in range(120)))
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (root / "notes.txt").write_text("no source")
    return root


def read(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_excluded_directories(library: Path) -> None:
    names = {path.relative_to(library).as_posix() for path in library_files(library)}
    assert names == {f"module{i}.py" for i in range(60)} | {"email/e.py", "latin.py"}


def test_held_out_files_are_not_trained_on(library: Path, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "out", library=library)
    held_out = {path for path in library_files(library) if is_held_out(path, library)}
    held = "".join(path.read_text() for path in held_out)
    assert 0 < len(held_out) < 20
    assert all(text in held for text in read(corpus.heldout))
    assert not any(text in held for text in read(corpus.train))
    assert corpus.heldout_bytes == sum(len(text.encode()) for text in read(corpus.heldout)) == len(held.encode())


def test_corpus_is_reproducible(library: Path, tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "one", library=library)
    second = write_corpus(tmp_path / "two", library=library)
    assert first.train.read_bytes() == second.train.read_bytes()
    assert first.heldout.read_bytes() == second.heldout.read_bytes()


def test_directory_without_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not hold the standard library's sources"):
        write_corpus(tmp_path / "out", library=tmp_path)


@examples(20, 60)
@given(lines=st.lists(st.integers(0, 1500), max_size=30))
def test_documents_end_at_line_ends(lines: list[int]) -> None:
    text = "".join("é" * (width // 2) + "\n" for width in lines)
    documents = list(cut_at_lines(text))
    for document in documents:
        assert document.endswith("\n")
        assert document.strip()
        assert len(document.encode()) <= 1000 or document.count("\n") == 1
    assert "".join("".join(documents).split()) == "".join(text.split())


def test_document_size() -> None:
    documents = list(cut_at_lines("".join(f"line {i} = {i * i}\n" for i in range(2000))))
    sizes = [len(document.encode()) for document in documents[:-1]]
    assert all(570 <= size <= 1000 for size in sizes)
    assert len(set(sizes)) > 10


def test_a_model_is_random_seeded_and_loads(tmp_path: Path) -> None:
    train_teacher_tokenizer(TEXTS, tmp_path / "tokenizer", vocabulary=400)
    state = torch.get_rng_state()
    models = [
        AutoModelForCausalLM.from_pretrained(
            write_model(tmp_path / name, tmp_path / "tokenizer", layers=1, hidden=64, seed=seed)
        )
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    weights = [model.get_input_embeddings().weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == weights[0].shape[0] == models[0].get_output_embeddings().weight.shape[0]
    assert models[0].config.pad_token_id == tokenizer.pad_token_id
