"""What is said about a projection, and the commands that say it.

Coverage of a teacher's tokens and probability by a projection.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.support import vocabularies as v
from tests.support.alignments import table_of
from tests.support.cases import cases
from tests.support.tiny_run import documents, make_assets, write_jsonl
from xtoken_core.errors import InputError, XtokenError
from xtoken_core.projection import BuildOptions, build_projection, write_projection
from xtoken_core.projection.files import TopKProjection, read_topk
from xtoken_core.projection.report import category, inspect_projection
from xtoken_services.cli.align import align_app
from xtoken_services.cli.projection import projection_app
from xtoken_services.common.tables.coverage import (
    WINDOW,
    coverage_of_text,
    named_tokens,
    unnamed_fraction,
    unreachable_mass,
)

RUNNER = CliRunner()
PROJECTION = TopKProjection(torch.tensor([[0, 2], [2, -1], [3, 1]]), torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0]]))
NAMED = torch.tensor([True, False, True, True, False])
"""Token 1 has the weight 0 only, and no row has token 4."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("tokenizers")
    for name, tokenizer in (("student", v.unigram()), ("teacher", v.byte_level(bos=True))):
        tokenizer.save_pretrained(base / name)
    return base


def sides(directory, **tokenizers):
    """Options that name the tokenizers in a directory, in which the given ones are written first."""
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(directory / name)
    return ["--student", str(directory / "student"), "--teacher", str(directory / "teacher")]


def written(path, *records):
    """A file of records, of which a text has the field `text`."""
    records = [{"text": record} if isinstance(record, str) else record for record in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def checked(*words):
    """The total of an alignment check without an error."""
    done = RUNNER.invoke(align_app, ["check", *words, "--json"], catch_exceptions=False)
    return json.loads(done.stdout)["total"]


@cases(
    "piece, expected",
    (b" 7", "digits"),
    (b"2024", "multi-digit numbers"),
    (b"\n ", "whitespace"),
    (b"),", "punctuation"),
    (b" word", "latin words"),
    (b"\xe6\x97", "partial characters"),
    ("日本".encode(), "other scripts"),
    (b"x1", "mixed"),
)
def test_categories(piece, expected):
    assert category(piece) == expected


def test_numbers_that_a_teacher_splits_are_warned_about():
    student, teacher = table_of([b"12", b"345", b"a", b"1"]), table_of([b"1", b"2", b"3", b"4", b"5", b"a"])
    rows = [[0, 1], [2, 3], [5, -1], [0, -1]]
    weights = [[0.9, 0.1], [0.9, 0.1], [1.0, 0.0], [1.0, 0.0]]
    report = inspect_projection(TopKProjection(torch.tensor(rows), torch.tensor(weights)), student, teacher)
    assert (report.rows, report.exact, report.spread, report.empty) == (4, 2, 2, 0)
    assert (report.common_strict, report.common_relaxed, report.teacher_covered) == (2, 3, 5)
    assert report.categories["multi-digit numbers"] == (2, 2)
    (warning,) = report.warnings
    assert "multi-digit numbers" in warning and 'loss.mode = "chain"' in warning
    assert dict(report.samples["numerals"])["12"] == [("1", pytest.approx(0.9)), ("2", pytest.approx(0.1))]


def test_a_projection_wider_than_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="do not belong together"):
        inspect_projection(TopKProjection(torch.tensor([[9]]), torch.ones(1, 1)), table_of([b"a"]), table_of([b"a"]))


def test_the_projection_commands(directories, tmp_path):
    pair, out = sides(directories), str(tmp_path / "p.safetensors")
    done = RUNNER.invoke(projection_app, ["build", *pair, "--out", out], catch_exceptions=False)
    assert done.exit_code == 0 and out in done.output
    shown = RUNNER.invoke(projection_app, ["inspect", out, *pair, "--json"], catch_exceptions=False)
    found = json.loads(shown.stdout)
    built = build_projection(v.unigram(), v.byte_level(bos=True), BuildOptions())
    assert found["rows"] == len(built.indices)
    assert found["exact"] + found["spread"] + found["empty"] == found["rows"]
    text = RUNNER.invoke(projection_app, ["inspect", out, *pair], catch_exceptions=False).output
    assert f"rows               {found['rows']}" in text


def test_align_check_counts_files_and_total(directories, tmp_path):
    texts, plain = [*v.TEXTS.values()], tmp_path / "code.py"
    lines = written(tmp_path / "texts.jsonl", *({"body": text} for text in texts))
    plain.write_text("def f():\n    return '日本'\n", encoding="utf-8")
    done = RUNNER.invoke(align_app, ["check", *sides(directories), lines, str(plain), "--field", "body", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    student = v.unigram()
    assert found["files"][lines]["student_tokens"] == sum(len(student.encode(text)) for text in texts)
    for counts in (*found["files"].values(), found["total"]):
        assert counts["correct_chunks"] == counts["chunks"] >= counts["exact_chunks"] > 0
        assert counts["unchunked_student_tokens"] < 0.1 * counts["student_tokens"]
        assert counts["tokens_per_second"] > 0
    assert found["total"]["chunks"] == sum(counts["chunks"] for counts in found["files"].values())


def test_align_check_prints_the_counts_of_one_file_once(directories, tmp_path):
    plain = tmp_path / "code.py"
    plain.write_text("def f():\n    return 1\n", encoding="utf-8")
    done = RUNNER.invoke(align_app, ["check", *sides(directories), str(plain)])
    assert done.output.count("correct_chunks") == 2, "correct and incorrect chunks"
    assert "total" not in done.output


def test_align_check_counts_decomposed_text_with_a_composing_teacher(tmp_path):
    """One token per byte: all chunks have one token a side but that of `e` and its accent, which the teacher joins."""
    for name, form in (("student", None), ("teacher", "NFC")):
        v.byte_level(257, form=form).save_pretrained(tmp_path / name)
    text = tmp_path / "text.txt"
    text.write_text("cafe\u0301 now", encoding="utf-8")
    for student, teacher in (("student", "teacher"), ("teacher", "student")):
        counts = checked("--student", str(tmp_path / student), "--teacher", str(tmp_path / teacher), str(text))
        assert {counts["student_tokens"], counts["teacher_tokens"]} == {10, 9}
        assert [counts[f"{kind}chunks"] for kind in ("", "correct_", "exact_", "incorrect_")] == [8, 8, 7, 0]
        assert (counts["unchunked_student_tokens"], counts["unchunked_teacher_tokens"]) == (0, 0)
        assert counts["records_with_misfits"] == 0


def test_align_check_says_where_the_first_chunk_is_that_does_not_fit(directories, tmp_path):
    lines = written(tmp_path / "texts.jsonl", "low lower", "newest", "low \u2603 lower", "\u2603")
    done = RUNNER.invoke(
        align_app, ["check", *sides(tmp_path, student=v.byte_level(bos=True), teacher=v.wordpiece()), lines]
    )
    assert done.exit_code == 1
    assert f"the first in {lines}:3:" in str(done.exception)
    assert "incorrect_chunks" in done.output


def test_align_check_counts_records_and_says_where_the_first_skipped_one_is(directories, tmp_path):
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"text": "low lower"}\n\n{"text": "newest"}\n{"body": 3}\n', encoding="utf-8")
    done = RUNNER.invoke(align_app, ["check", *sides(directories), str(lines), "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    for counts in (found["files"][str(lines)], found["total"]):
        assert (counts["records"], counts["skipped"]) == (4, 2)
        assert counts["first_skipped"] == {"location": f"{lines}:2", "reason": "empty line"}
        assert (counts["records_with_misfits"], counts["first_misfit"]) == (0, None)
    shown = RUNNER.invoke(align_app, ["check", *sides(directories), str(lines)], catch_exceptions=False).output
    assert f"first: {lines}:2: empty line" in shown


@pytest.mark.parametrize("context", [(), ("--context", "24")], ids=["whole", "cut"])
def test_align_check_says_where_the_first_token_is_that_has_no_counterpart(directories, tmp_path, context):
    """Neither BOS on one side, nor a space before the text, nor what a cut leaves is one; dropped lines are."""
    long = " new newer newest" * 9
    texts = ["low lower", "newest" + long, "low\n\n\nlower" + long, "low\nlow"]
    lines = written(tmp_path / "texts.jsonl", *texts)
    pair = sides(tmp_path, student=v.unigram(), teacher=v.wordpiece())
    found = checked(*pair, lines, *context)
    assert found["unchunked_teacher_tokens"] > len(texts)
    assert found["records_with_misfits"] == 2
    first = {"location": f"{lines}:3", "student_tokens": 3, "teacher_tokens": 0, "cause": ""}
    assert found["first_misfit"] == first
    shown = RUNNER.invoke(align_app, ["check", *pair, lines, *context]).output
    assert f"first: {lines}:3: 3 of the student" in shown


def without_alphabet():
    """A byte-level BPE that drops the bytes which its training text did not have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(["low lower <lowest>/"], trainer)
    return v.fast(tokenizer, eos_token="</s>")


LACKS = "the {}'s tokenizer has no token for '☃' (U+2603)"


@pytest.mark.parametrize("make", [without_alphabet, v.wordpiece, lambda: v.unigram(byte_fallback=False)])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_align_check_names_the_character_that_a_tokenizer_has_no_token_for(tmp_path, make, side):
    other = {"student": "teacher", "teacher": "student"}[side]
    lines = written(tmp_path / "texts.jsonl", "low lower", "low ☃ lower", "low ☃")
    done = RUNNER.invoke(align_app, ["check", *sides(tmp_path, **{side: make(), other: v.byte_level()}), lines])
    assert isinstance(done.exception, XtokenError)
    assert f"the first in {lines}:2: {LACKS.format(side)};" in str(done.exception)


def test_align_check_names_the_special_token_in_a_text(tmp_path):
    lines = written(tmp_path / "texts.jsonl", "low", "low<s>")
    done = RUNNER.invoke(align_app, ["check", *sides(tmp_path, student=v.unigram(), teacher=v.byte_level()), lines])
    cause = "the text holds the name '<s>' of a special token"
    assert f"{lines}:2: 1 of the student and 3 of the teacher in no chunk: {cause}" in done.output


@cases(
    "make, records, reason",
    (without_alphabet, ["☃", "☃☃"], LACKS.format("student")),
    (lambda: v.unigram(byte_fallback=False, unknown=False), ["low ☃"], LACKS.format("student")),
    (v.byte_level, [{"messages": [{"role": "assistant", "content": "low"}]}], "has no chat template"),
    ids=["dropped", "refused", "skipped"],
)
def test_align_check_fails_where_no_text_can_be_used(tmp_path, make, records, reason):
    lines = written(tmp_path / "texts.jsonl", *records)
    done = RUNNER.invoke(align_app, ["check", *sides(tmp_path, student=make(), teacher=v.byte_level()), lines])
    assert done.exit_code == 1
    assert isinstance(done.exception, XtokenError)
    assert f"none of {len(records)} texts has a chunk that both sides spell: {lines}:1: " in str(done.exception)
    assert reason in str(done.exception)


def test_align_check_goes_on_behind_a_text_without_tokens(tmp_path):
    pair = sides(tmp_path, student=v.unigram(byte_fallback=False, unknown=False), teacher=v.byte_level())
    total = checked(*pair, written(tmp_path / "texts.jsonl", "low ☃", "low"))
    assert (total["records"], total["skipped"], total["incorrect_chunks"]) == (2, 1, 0)
    assert LACKS.format("student") in total["first_skipped"]["reason"]


@pytest.mark.parametrize("app", [projection_app, align_app], ids=["projection", "align"])
def test_what_is_no_directory_is_never_looked_up_as_a_name(app, directories, tmp_path, monkeypatch):
    """Neither in a cache of the hub's, which here holds a tokenizer of that name, nor on the network."""
    kept = tmp_path / "cache" / "models--some--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    shutil.copytree(directories / "student", kept / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    words = ["build", "--out", "p.safetensors"] if app is projection_app else ["show", "a text"]
    for missing in ("some/name", str(tmp_path / "nowhere")):
        done = RUNNER.invoke(app, [*words, "--student", missing, "--teacher", str(directories / "teacher")])
        assert str(done.exception) == f"the student has no tokenizer: {missing} is not a directory"
        assert isinstance(done.exception, InputError)


def test_a_directory_without_a_tokenizer_is_named(directories, tmp_path):
    done = RUNNER.invoke(
        align_app, ["show", "a", "--student", str(tmp_path), "--teacher", str(directories / "teacher")]
    )
    assert "holds no tokenizer (tokenizer.json" in str(done.exception)


def test_inspect_names_every_empty_row_and_escapes_bytes_once(tmp_path):
    pair = sides(tmp_path, student=v.unigram(byte_fallback=False), teacher=v.byte_level(bos=True))
    out = str(tmp_path / "p.pt")
    built = build_projection(v.unigram(byte_fallback=False), v.byte_level(bos=True), BuildOptions())
    indices, weights = (
        torch.cat([x, torch.full((2, x.shape[1]), fill)]) for x, fill in ((built.indices, -1), (built.likelihoods, 0.0))
    )
    indices[7], weights[7] = torch.tensor([0, -1, -1, -1]), torch.tensor([1.0, 0, 0, 0])
    write_projection(TopKProjection(indices, weights), out)
    shown = RUNNER.invoke(projection_app, ["inspect", out, *pair, "--samples", "500"], catch_exceptions=False).output
    unknown = v.unigram(byte_fallback=False).unk_token_id
    none = int((indices < 0).all(dim=1).sum())
    assert f"none             {none}, 2 of them rows of the head beyond the vocabulary" in shown
    empty = shown.partition("empty rows:\n")[2].partition(":\n")[0]
    assert f"(the unknown token, id {unknown})' -> nothing" in empty
    assert empty.count("-> nothing") == none - 2
    assert "'\\x" in shown and "\\\\x" not in shown


def test_align_show_prints_both_sides_and_writes_a_page(directories, tmp_path):
    pair, page = sides(directories), tmp_path / "page.html"
    done = RUNNER.invoke(align_app, ["show", *pair, "<b> lower 日本", "--html", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "student:" in done.output and "teacher:" in done.output
    written = page.read_text(encoding="utf-8")
    assert "<b>" not in written and "&lt;" in written
    assert 'title="chunk 0"' in written and "teacher: " in written
    nothing = RUNNER.invoke(align_app, ["show", *pair])
    assert nothing.exit_code != 0 and "give either a text or --file" in str(nothing.exception)


def test_align_check_measures_what_a_projection_leaves_out(tmp_path):
    assets = make_assets(tmp_path)
    pair = ["--student", str(assets.student), "--teacher", str(assets.teacher)]
    text = write_jsonl(tmp_path / "text.jsonl", documents(4, seed=0))
    sides = [AutoTokenizer.from_pretrained(directory) for directory in (assets.student, assets.teacher)]
    whole = build_projection(*sides)
    for name, weights in (("whole", whole.likelihoods), ("empty", torch.zeros_like(whole.likelihoods))):
        write_projection(replace(whole, likelihoods=weights), tmp_path / f"{name}.safetensors")
    measured = {}
    for name in ("whole", "empty"):
        options = ["--projection", str(tmp_path / f"{name}.safetensors"), "--mass", "--json"]
        done = RUNNER.invoke(align_app, ["check", *pair, str(text), *options], catch_exceptions=False)
        measured[name] = json.loads(done.stdout)
    assert measured["whole"]["unreachable_mass"] < measured["empty"]["unreachable_mass"] == pytest.approx(1.0)
    assert measured["empty"]["unnamed_tokens_of_text"] == 1.0
    assert RUNNER.invoke(align_app, ["check", *pair, str(text), "--mass"]).exit_code == 1


def test_tokens_with_a_weight_are_named() -> None:
    assert torch.equal(named_tokens(PROJECTION, 5), NAMED)
    assert unnamed_fraction(NAMED, torch.tensor([0, 1, 2, 4])) == 0.5
    assert unnamed_fraction(NAMED, torch.tensor([], dtype=torch.int64)) == 0.0


def test_unreachable_mass_is_the_mean_over_positions() -> None:
    uniform, certain = torch.zeros(1, 7), torch.tensor([[0.0, 90.0, 0.0, 0.0, 0.0, 99.0, 0.0]])
    mass = unreachable_mass(NAMED, [uniform, certain])
    torch.testing.assert_close(torch.tensor(mass), torch.tensor((0.4 + 1.0) / 2))


def test_windows_of_a_text_begin_as_the_teachers_texts_do(tmp_path: Path) -> None:
    assets = make_assets(tmp_path)
    projection = read_topk(assets.projection)
    weights = projection.likelihoods * (torch.arange(len(projection.likelihoods)) % 3 == 0)[:, None]
    write_projection(replace(projection, likelihoods=weights), tmp_path / "part.safetensors")
    text = "".join(documents(30, seed=0))
    found = coverage_of_text(tmp_path / "part.safetensors", assets.teacher, text, mass=True)
    tokenizer, model = (each.from_pretrained(assets.teacher) for each in (AutoTokenizer, AutoModelForCausalLM))
    ids, size = tokenizer(text, add_special_tokens=False)["input_ids"], WINDOW - 1
    windows = [[tokenizer.bos_token_id, *ids[at : at + size]] for at in range(0, len(ids), size)]
    assert len(windows) > 2
    named = named_tokens(read_topk(tmp_path / "part.safetensors"), len(tokenizer))
    with torch.no_grad():
        mass = unreachable_mass(named, (model(torch.tensor([window])).logits[0] for window in windows))
    assert found["unreachable_mass"] == pytest.approx(mass, rel=1e-6)
