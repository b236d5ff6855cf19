"""Text in every form that a run reads: packed, tables, lists, conversations of other shapes, at an address."""

import copy
import csv
import gzip
import importlib.util
import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from tests.support.cases import cases
from tests.support.tiny_run import TinyAssets, make_assets
from tests.unit.control.stored_runs import spec
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.config.spec import RunSpec
from xtoken_core.dataset import BadRecord, DataIndex, Record, unpacking
from xtoken_core.errors import InputError
from xtoken_core.tokenizing import NO_TEMPLATE
from xtoken_services.cli.data import data_app
from xtoken_services.common.files.allowed_paths import Roots
from xtoken_services.common.models.hub import fetch_inputs
from xtoken_services.common.run.defaults import fill_run_defaults
from xtoken_services.common.run.start_checks import check_start
from xtoken_services.control.validation import RefusedError, SpecValidator

TEXTS = ['a "quoted", comma', "two\nlines \u2028 日本", "  last ", "12345"]
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "xtoken" / "text"


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> TinyAssets:
    return make_assets(tmp_path_factory.mktemp("assets"), extra_rows=0)


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def table(rows: list[dict[str, Any]]) -> bytes:
    path = Path("table.csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path.read_bytes()


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write records in the form that the file's name says."""
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    kind = path.name.partition(".")[2]
    data = {
        "json": json.dumps(rows, indent=2, ensure_ascii=False).encode(),
        "lines.json": lines,
        "csv": table(rows) if "csv" in kind else b"",
    }.get(kind.removesuffix(".gz").removesuffix(".zst"), lines)
    path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else zstd(data) if kind.endswith(".zst") else data)
    return path


def indexed(path: Path) -> DataIndex:
    return DataIndex.build([path], field="text", cache_dir=path.parent / "index")


def values(path: Path) -> list[dict[str, Any]]:
    index = indexed(path)
    records = index.read(range(len(index)))
    assert all(isinstance(record, Record) for record in records), records
    return [record.value for record in records if isinstance(record, Record)]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.lines.json", "a.json.zst", "a.csv", "a.csv.gz"]
)
def test_every_form_gives_the_same_records(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / name, [{"number": str(n), "text": text} for n, text in enumerate(TEXTS)])
    assert values(path) == [{"text": text} for text in TEXTS]
    index = indexed(path)
    assert index.location(2) == f"{path}:3"  # as the user knows the file
    unpacked = list(cache.iterdir()) if cache.exists() else []
    assert len(unpacked) == (name != "a.jsonl")
    before = [file.stat().st_ino for file in unpacked]
    assert values(path) and [file.stat().st_ino for file in unpacked] == before  # unpacked once
    for file in unpacked:  # and as if it had always been there, should the cache be lost
        file.unlink()
    assert indexed(path).read([1]) == index.read([1]) and len(list((tmp_path / "index").iterdir())) == 1


def test_a_file_that_changes_is_unpacked_again(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl.gz", [{"text": "one"}])
    first = indexed(path).fingerprint
    written(path, [{"text": "one"}, {"text": "two"}])
    assert values(path) == [{"text": "one"}, {"text": "two"}] and indexed(path).fingerprint != first


def test_a_long_list_is_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "CHUNK", 7)
    rows = [{"text": "x" * n + '"],[{', "n": [n, {"m": -1.5e3}]} for n in range(1, 40)]
    assert values(written(tmp_path / "a.json", rows)) == [{"text": row["text"]} for row in rows]


def test_what_is_no_text_makes_its_record_unusable_only(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text,note\nfine,1\nb\xffd,2\n"",3\nshort\n')
    (tmp_path / "a.json").write_bytes(b'[{"text": "fine"}, {"text": "b\xffd"}, 7, {"text": "end"}]')
    for name, good in (("a.csv", [0, 3]), ("a.json", [0, 3])):
        records = indexed(tmp_path / name).read(range(4))
        assert [n for n, record in enumerate(records) if isinstance(record, Record)] == good
        assert isinstance(records[1], BadRecord) and records[1].reason.startswith("invalid UTF-8")


@cases(
    "name, data, message",
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 900)[:-9], "cannot be read into .*: Truncated"),
    ("a.jsonl.gz", b'{"text": "a"}\n', "a.jsonl.gz cannot be read into "),
    ("a.jsonl.zst", zstd(b'{"text": "a"}\n')[:-3], "a.jsonl.zst cannot be read into "),
    ("a.csv", b'text\n"open', "a.csv cannot be read into "),
    ("a.csv", b"text,n\na,1\nb,c,2\n", "line 3 has more cells than the first line"),
    ("a.json", b'[{"text": "a"}, {"text": "b"', "item 2 of its list is no whole JSON value"),
    ("a.json", b'[{"text": "a"}] [{"text": "b"}]', "its list does not end behind item 1"),
    ("a.json", b"[" * 100_000, "a.json cannot be read into "),
    ("a.json", b"[]", "there is no record in it"),
    ("a.parquet.gz", b"", r"has the ending '.gz': data is read from .jsonl"),
    ids=["cut-gz", "no-gz", "cut-zst", "open-quote", "cells", "cut-list", "two-lists", "deep", "empty", "parquet"],
)
def test_a_damaged_file_gets_one_line_and_leaves_nothing(
    tmp_path: Path, cache: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        indexed(tmp_path / name)
    assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert message.startswith("there is no") or not (cache.exists() and list(cache.iterdir()))


def test_a_bomb_is_refused_at_its_limit(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "%s"}\n' % (b"0" * 10_000) * 500))
    monkeypatch.setattr(unpacking, "_SMALL_BYTES", 1 << 20)
    with pytest.raises(InputError, match=r"decodes to \d+ bytes from"):
        indexed(path)
    assert not list(cache.iterdir())
    monkeypatch.setattr(unpacking, "_LARGEST_RATIO", 1 << 20)
    assert len(indexed(path)) == 500
    monkeypatch.setattr(unpacking, "MOST_TEXT_BYTES", 2 << 20)
    path.touch()
    with pytest.raises(InputError, match=r"decodes to \d+ bytes from"):
        indexed(path)


TURNS = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
ASKED, SAID = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


@cases(
    "record, value",
    ({"conversations": TURNS}, {"messages": [ASKED, SAID], "form": "ShareGPT"}),
    (
        {"conversations": TURNS, "system": "Be brief.", "tools": json.dumps([TOOL])},
        {"messages": [SYSTEM, ASKED, SAID], "tools": [TOOL], "form": "ShareGPT"},
    ),
    ({"conversations": [ASKED, SAID]}, {"messages": [ASKED, SAID], "form": "ShareGPT"}),
    ({"instruction": "2 + 2?", "input": "", "output": "4"}, {"messages": [ASKED, SAID], "form": "Alpaca"}),
    (
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        {"messages": [{"role": "user", "content": "Add.\n\n2 2"}, SAID], "form": "Alpaca"},
    ),
    ({"prompt": [SYSTEM, ASKED], "completion": [SAID]}, {"messages": [SYSTEM, ASKED, SAID], "form": "TRL"}),
    ({"prompt": "2 + 2?", "completion": "4"}, {"prompt": "2 + 2?", "completion": "4"}),
    ({"messages": [ASKED, SAID], "tools": [TOOL]}, {"messages": [ASKED, SAID], "tools": [TOOL]}),
    ({"text": "whole", "instruction": "x", "output": "y"}, {"text": "whole"}),
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_conversations_of_other_shapes_become_messages(
    tmp_path: Path, record: dict[str, Any], value: dict[str, Any], kind: str
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert values(path) == [value]
    form = value.get("form")
    assert list(indexed(path).conversations()) == ([(f"{path}:1", form)] if "messages" in value else [])


def test_a_turn_of_an_unknown_speaker_is_unusable(tmp_path: Path) -> None:
    rows = [{"conversations": TURNS}, {"conversations": [{"from": "narrator", "value": "x"}, *TURNS]}]
    first, second = indexed(written(tmp_path / "a.json", rows)).read([0, 1])
    assert isinstance(first, Record) and isinstance(second, BadRecord)
    assert second.reason.startswith("turn 0 of the conversation is from 'narrator', not human, ")


def test_tools_reach_the_templates_that_take_them(assets: TinyAssets) -> None:
    student, teacher = (AutoTokenizer.from_pretrained(path) for path in (assets.student, assets.teacher))
    student.chat_template, teacher.chat_template = TEMPLATE, TEMPLATE.partition("{% endif %}")[2]
    collator = CrossTokenizerCollator(
        student_tokenizer=student, teacher_tokenizer=teacher, aligner=None, ctx_length_student=256,
        ctx_length_teacher=256,
    )  # fmt: skip
    row = collator([{"messages": [ASKED, SAID], "tools": [TOOL]}])
    ours, theirs = student.decode(row["input_ids"][0]), teacher.decode(row["teacher_input_ids"][0])
    assert ours.startswith('TOOLS [{"type": "function", "function": {"name": "lookup"') and "TOOLS" not in theirs
    without = collator([{"messages": [ASKED, SAID]}])
    assert int(row["token_mask"].sum()) == int(without["token_mask"].sum()) > 0  # the answer, wherever it stands
    assert int(row["alignment_num_chunks"][0]) == int(without["alignment_num_chunks"][0]) > 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A server of a directory, and the requests that it has got."""
    directory, asked = tmp_path / "served", list[str]()
    directory.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path.startswith("/cut"):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"text": "a"}\n')
            else:
                super().do_GET()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(directory))) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", directory, asked
        http.shutdown()
        thread.join()


def test_remote_text_is_fetched_once(server: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    url, directory, asked = server
    written(directory / "a.jsonl.gz", [{"text": text} for text in TEXTS])
    local = str(written(tmp_path / "b.jsonl", [{"text": "here"}]))
    given = {"data": {"path": [f"{url}/a.jsonl.gz?key=secret", local]}, "eval": {"path": local}}
    document = copy.deepcopy(given)
    (note,) = fetch_inputs(document, tmp_path, {})
    remote, same = document["data"]["path"]
    assert same == local == document["eval"]["path"] and values(Path(remote)) == [{"text": text} for text in TEXTS]
    assert note == f"data.path: {url.rpartition(':')[0]}/a.jsonl.gz as it was fetched into {remote}"
    assert fetch_inputs(given, tmp_path, {}) == [note] and given == document and len(asked) == 1


@cases(
    "name, message",
    ("missing.jsonl?key=secret", "HTTP 404"),
    ("cut.jsonl", "cannot fetch"),
    ("page.html", "does not end like a text: name a .jsonl"),
)
def test_what_cannot_be_fetched_whole_is_refused(
    server: tuple[str, Path, list[str]], cache: Path, name: str, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        fetch_inputs({"data": {"path": f"{server[0]}/{name}"}}, Path(), {})
    assert str(caught.value).startswith("data.path: ") and "secret" not in str(caught.value)
    assert not (cache.exists() and list(cache.iterdir()))


def test_text_in_a_store_of_objects_is_fetched_by_fsspec(cache: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://bucket/a.jsonl", "wb") as file:
        file.write(b'{"text": "a"}\n')
    document = {"data": {"path": "memory://bucket/a.jsonl"}}
    fetch_inputs(document, Path(), {})
    assert values(Path(document["data"]["path"])) == [{"text": "a"}]
    if importlib.util.find_spec("s3fs") is None:
        with pytest.raises(InputError, match=r"data\.path: cannot fetch s3://bucket/b\.jsonl: Install s3fs"):
            fetch_inputs({"data": {"path": "s3://bucket/b.jsonl"}}, Path(), {})


def test_a_control_plane_refuses_remote_text(tmp_path: Path) -> None:
    validator = SpecValidator(roots=Roots.of([tmp_path], [tmp_path]), base=tmp_path)
    for address in ("https://example.org/a.jsonl", "s3://bucket/a.jsonl.gz"):
        with pytest.raises(
            RefusedError, match=r"data\.path: .* is an address: a control plane reads files of its machine alone"
        ):
            validator.validate(RunSpec.model_validate(spec(tmp_path, output="out", data={"path": address})))


def checked(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(data_app, ["check", *map(str, arguments), "--json"])
    found = json.loads(result.stdout)
    kinds = {what.partition(",")[0]: (kind["records"], kind["first"]) for what, kind in found["kinds"].items()}
    why = "" if kinds["used"][0] else "no record can be used: the lines above say why"
    assert str(result.exception or "") == why and bool(result.exit_code) == bool(why)
    return found["records"], found["form"], kinds


def test_a_check_counts_what_is_used_cut_and_skipped(assets: TinyAssets, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    long = [{"from": "human", "value": "say"}, {"from": "gpt", "value": "return " * 300}]
    rows: list[Any] = [
        {"conversations": TURNS}, {"conversations": long}, {"conversations": TURNS[:1]}, {"conversations": long},
        {"conversations": [{"from": "narrator 1", "value": "x"}]}, {"text": " "},
        {"conversations": [{"from": "narrator 2", "value": "x"}]}, {"conversations": TURNS},
    ]  # fmt: skip
    path = written(tmp_path / "a.json", rows)
    narrator = "skipped: turn 0 of the conversation is from 'narrator 1'"
    skipped = {narrator: (2, f"{path}:5"), "skipped: empty text": (1, f"{path}:6")}
    prompt = {"prompts without an answer": (1, f"{path}:3")}
    assert checked(path) == (8, "ShareGPT", {"used": (4, f"{path}:1"), "cut": (0, None), **prompt, **skipped})
    everything = {"used": (5, f"{path}:1"), "cut": (0, None), **skipped}
    assert checked(path, "--set", "data.train_on=all") == (8, "ShareGPT", everything), "of a prompt, too"
    models = ("--student", assets.student, "--teacher", assets.teacher, "--set", "student.context_length=64")
    no_template = f"skipped: the student's tokenizer {NO_TEMPLATE}"
    without = {no_template: (5, f"{path}:1"), **skipped}
    assert checked(path, *models) == (8, "ShareGPT", {"used": (0, None), "cut": (0, None), **without})
    models += tuple(word for side in ("student", "teacher") for word in ("--set", f"{side}.chat_template={template}"))
    expected = {"used": (4, f"{path}:1"), "cut": (2, f"{path}:2"), **prompt, **skipped}
    assert checked(path, *models) == (8, "ShareGPT", expected)
    run, alone = tmp_path / "run.toml", written(tmp_path / "b.json", rows[2:3])
    run.write_text(f'data = "{alone}"', encoding="utf-8")
    trained = ("--run", run)
    for of_run, fails in (((), False), (trained, True), ((*trained, "--set", "rollout.max_new_tokens=8"), False)):
        result = CliRunner().invoke(data_app, ["check", str(alone), *map(str, (*models, *of_run))])
        assert "  1  prompts without an answer, used with [rollout], else skipped; first" in result.stdout
        assert bool(result.exit_code) == fails, of_run
    names = written(tmp_path / "e.json", [{"text": "a"}, {"txet": "t"}, {"prompt": "p"}, {"txet": "u"}])
    told = CliRunner().invoke(data_app, ["check", str(names)]).stdout
    for count, name, first in ((2, "txet", 2), (1, "prompt", 3)):
        assert f"{count}  skipped: no field 'text', only '{name}'; first: {names}:{first}\n" in told
    weighed, table = [{"text": "a"}, {"text": "b", "loss_multiplier": 0}], tmp_path / "c.parquet"
    pq.write_table(pa.Table.from_pylist([weighed[1]]), table)
    for file, first in ((written(tmp_path / "d.json", weighed), 2), (table, 1)):
        assert checked(file)[2]["with a loss_multiplier"] == (1, f"{file}:{first}")
    done = CliRunner().invoke(data_app, ["check", str(path), *map(str, models)])
    assert done.stderr.startswith("loading the tokenizers: some seconds")
    shown = done.stdout
    assert shown.startswith(f"{path}: 8 records of ShareGPT, read as messages\n")
    run = tmp_path / "run.toml"
    side = 'model = "{}"\nchat_template = "template.jinja"\ncontext_length = 64\n'
    sources = f'[[data.sources]]\npath = "{tmp_path / "no.jsonl"}"\n[[data.sources]]\npath = "a.json"\n'
    run.write_text(f"[student]\n{side.format(assets.student)}[teacher]\n{side.format(assets.teacher)}{sources}")
    assert checked(path, "--run", run) == (8, "ShareGPT", expected)
    (tmp_path / "no.jsonl").write_text(json.dumps({"text": "return self " * 99}) + "\n", encoding="utf-8")
    both = CliRunner().invoke(data_app, ["check", "--run", str(run), "--set", "data.long=split", "--set", "eval=none"])
    assert "1  divided, of those used; first: " in both.stdout and both.stdout.endswith(shown.partition("\n")[2])
    assert f"cut, of those used; first: {path}:2\n" in shown and f"skipped: empty text; first: {path}:6\n" in shown


def test_a_check_counts_prompts_that_leave_no_room_for_a_completion(assets: TinyAssets, tmp_path: Path) -> None:
    template, long = tmp_path / "template.jinja", "return " * 60
    template.write_text(TEMPLATE, encoding="utf-8")
    rows = [{"text": "return 1"}, {"text": long}, {"prompt": long, "completion": "1"},
            {"prompt": "return", "completion": long}, {"messages": [{"role": "user", "content": long}]}]  # fmt: skip
    path, run = written(tmp_path / "a.json", rows), tmp_path / "run.toml"
    side = '[{}]\nmodel = "{}"\ncontext_length = 48\nchat_template = "template.jinja"\n'
    sides = "".join(side.format(name, getattr(assets, name)) for name in ("student", "teacher"))
    sides += "[train]\nsamples_per_step = 4\n[rollout]\nmax_new_tokens = 16\n"
    run.write_text(f'data = "a.json"\n{sides}', encoding="utf-8")
    found = checked(path, "--run", run)[2]
    (why,) = found.keys() - {"used", "cut"}
    assert re.fullmatch(
        r"skipped: its prompt has \d+ tokens: student.context_length and rollout.max_new_tokens leave room for 1 to 32",
        why,
    )
    assert found == {"used": (2, f"{path}:1"), "cut": (0, None), why: (3, f"{path}:2")}
    mixed = checked(path, "--run", run, "--set", "rollout.fraction=0.5")[2]
    assert mixed == {"used": (4, f"{path}:1"), "cut": (3, f"{path}:2"), "used as text alone": (2, f"{path}:2"),
                     why: (1, f"{path}:5")}  # fmt: skip


def test_a_run_that_ends_by_its_tasks_is_checked(assets: TinyAssets, tmp_path: Path) -> None:
    path, run = written(tmp_path / "a.json", [{"text": "return 1"}]), tmp_path / "run.toml"
    models = f'data = "a.json"\nstudent = "{assets.student}"\nteacher = "{assets.teacher}"\n'
    run.write_text(models + '[rollout]\nmax_new_tokens = 8\nstop_when_worse = 2\n[eval]\ntasks.path = "tasks.jsonl"\n')
    assert checked(path, "--run", run)[2]["used"] == (1, f"{path}:1")


@pytest.mark.slow
def test_a_run_says_which_form_it_has_recognised(assets: TinyAssets, tmp_path: Path) -> None:
    for side in (assets.student, assets.teacher):
        (side / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    data = written(tmp_path / "a.json", [{"instruction": f"say {n}", "output": "return 1"} for n in range(8)])
    run, _ = fill_run_defaults(
        {"student": str(assets.student), "teacher": str(assets.teacher), "data": str(data), "eval": "none",
         "output": str(tmp_path / "out"), "train": {"samples_per_step": 4}, "workers": {"device": "cpu"}},
        tmp_path, source="test",
    )  # fmt: skip
    _, lines = check_start(run)
    said = [line for line in lines if " is a record of " in line]
    assert said == [f"text: {data}:1 is a record of Alpaca, and is read as messages, as is every other such record"]
