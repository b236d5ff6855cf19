"""Web pages without a browser: login, headers, page contents.

The page of completions: tokens of both sides, colours of the divergence, files of another shape.
"""

import io
import json
import math
import posixpath
import re
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.evaluations import measured
from tests.unit.control.stored_runs import HERE, put, spec
from xtoken_core.losses.chunk_classes import CLASSES, GENERATED
from xtoken_services.common.run.status import RunState
from xtoken_services.control.app import create_app
from xtoken_services.control.auth import COOKIE, Auth
from xtoken_services.control.runs import Runs
from xtoken_services.control.web.charts import charts_of
from xtoken_services.control.web.documents import documents

TOKEN = "a-token-that-is-long-enough"
SIDE = {
    "student": [["1+1", -1], ["=<", 4], ["2", 5]], "teacher": [["1", -1], ["+1", -1], ["=<", 4], ["2", 5]],
    "divergence": {"4": 0.005, "5": 2.5},
}  # fmt: skip


@pytest.fixture
def guarded(runs: Runs) -> TestClient:
    return TestClient(
        create_app(runs, Auth(token=TOKEN)), base_url=HERE, headers={"Origin": HERE}, follow_redirects=False
    )


RUN_PAGES = ["", "/log", "/log?worker=trainer-0", "/configuration", "/files", "/live"]


PAGES = [
    "/",
    "/compare?run=odd-1",
    "/runs/new",
    "/runs/new?from=odd-1",
    "/align",
    "/tables",
    "/docs",
    "/?sort=result",
    *(f"/runs/odd-1{page}" for page in RUN_PAGES),
]


@pytest.mark.parametrize("path", PAGES)
def test_page(client: TestClient, runs: Runs, path: str) -> None:
    put(runs, "odd-1", RunState.FAILED, error="<script>alert(1)</script>")
    page = client.get(path)
    assert page.status_code == 200
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["referrer-policy"] == "same-origin", "with no-referrer, forms are sent with Origin: null"
    assert "<script>alert" not in page.text, "values are escaped"
    assert " style=" not in page.text and " onclick=" not in page.text, "the policy forbids both"


@pytest.mark.parametrize("path", ["/runs/nothing", "/runs/not%20an%20id", "/nowhere"])
def test_missing_page(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_assets_are_served_from_here(client: TestClient) -> None:
    page = client.get("/runs/new").text + client.get("/static/base.css").text.replace('url("', 'src="/static/')
    named = set(re.findall(r'(?:src|href)="([^"#]+)', page))
    assert not [name for name in named if name.startswith(("http", "//"))]
    for name in named:
        assert client.get(name).status_code in (200, 303), name


def test_api_reference(client: TestClient) -> None:
    text = client.get("/docs").text
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', text)
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)', text):
        assert client.get(name).status_code == 200, name
    assert "/openapi.json" in client.get("/static/docs.js").text
    assert client.get("/openapi.json").json()["openapi"].startswith("3.")
    assert client.get("/redoc").status_code == 404


def test_cross_origin_forms_are_refused(client: TestClient, runs: Runs) -> None:
    put(runs, "old-1", RunState.STOPPED)
    for path in ("/runs/new", "/runs/old-1/resume", "/runs/old-1/remove", "/align", "/tables"):
        assert client.post(path, headers={"Origin": "http://evil.example"}).status_code == 403
        assert client.post(path, headers={"Origin": "null"}).status_code == 403
    assert runs.store.run("old-1") is not None


def test_login_redirects_back(guarded: TestClient, runs: Runs) -> None:
    put(runs, "old-1")
    redirect = guarded.get("/runs/old-1/files")
    assert (redirect.status_code, redirect.headers["location"]) == (303, "/login?next=%2Fruns%2Fold-1%2Ffiles")
    assert "REST: /docs" in redirect.text, "what curl shows"
    assert guarded.get("/", headers={"HX-Request": "true"}).headers["hx-redirect"] == "/login"
    assert guarded.get("/v1/runs").headers["www-authenticate"] == "Bearer", "API clients get a 401, not a redirect"
    assert guarded.get("/static/base.css").status_code == 200

    wrong = guarded.post("/login", data={"token": "wrong", "next": "/"})
    assert wrong.status_code == 403 and "Wrong token" in wrong.text
    assert "set-cookie" not in wrong.headers
    entered = guarded.post("/login", data={"token": TOKEN, "next": "/runs/old-1/files"})
    assert (entered.status_code, entered.headers["location"]) == (303, "/runs/old-1/files")
    cookie = entered.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=") and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert guarded.get("/runs/old-1/files").status_code == 200
    assert guarded.post("/logout").status_code == 303
    assert guarded.get("/").status_code == 303


@pytest.mark.parametrize("there", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)"])
def test_login_redirects_to_no_other_site(guarded: TestClient, there: str) -> None:
    assert guarded.post("/login", data={"token": TOKEN, "next": there}).headers["location"] == "/"


def test_list_pages_and_remove(client: TestClient, runs: Runs) -> None:
    for number in range(55):
        put(runs, f"r-{number}", RunState.STOPPED)
    page = client.get("/")
    assert page.text.count('id="row-') == 50
    assert len(re.findall(r'title="20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"', page.text)) == 50
    (older,) = set(re.findall(r"cursor=(\d+)", page.text))
    assert client.get(f"/?cursor={older}").text.count('id="row-') == 5
    assert client.get("/", headers={"HX-Request": "true"}).text.lstrip().startswith("<div")
    assert client.get("/?tab=active").text.count('id="row-') == 0
    assert client.post("/runs/r-3/remove").headers["location"] == "/"
    assert runs.store.run("r-3") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"student": "/etc"}, "lies under none of", id="outside"),
        pytest.param({"teacher": "relative"}, "absolute path", id="relative"),
        pytest.param({"teacher": "missing"}, "No such directory", id="missing"),
        pytest.param({"teacher": "x" * 300}, "No such directory", id="a name that no file system takes"),
        pytest.param({"text": "x" * 20_001}, "At most 20,000 characters", id="too-long"),
        pytest.param({"text": ""}, "Enter a text", id="no-text"),
        pytest.param({"special_tokens": "<a>=<b>\n<c>"}, "the pair &lt;c&gt;: it takes STUDENT=TEACHER", id="pair"),
    ],
)
def test_align_form_errors(client: TestClient, tmp_path: Path, change: dict[str, str], message: str) -> None:
    tokenizer = tmp_path / "data" / "tokenizer"
    tokenizer.mkdir()
    if "teacher" in change and change["teacher"] != "relative":
        change = {"teacher": str(tokenizer / change["teacher"])}
    fields = {"student": str(tokenizer), "teacher": str(tokenizer), "text": "a"}
    assert message in client.post("/align", data=fields | change).text


ONE_TEACHER = {
    "step": 3, "loss": 2.5, "kl_loss": 2.25, "ce_loss": 1.5, "kl_loss_scale": 1.0, "accuracy": 0.25,
    "num_valid_samples": 8.0, "weight_t0": 1.0, "kl_loss_t0": 2.25, "chunk_mass_t0": 0.98, "proj_accuracy_t0": 0.5,
    "grad_norm": 1.0, "nonfinite": True,
}  # fmt: skip


TWO_TEACHERS = ONE_TEACHER | {"kl_loss_t1": 3.0, "chunk_mass_t1": 0.875, "proj_accuracy_t1": 0.5, "weight_t1": 1.0}


BITS = {"step": 4, "bits_per_byte": 1.5, "loss": 3.0, "nll_nats": 90.0, "tokens": 30, "next_token_accuracy": 0.3125}


def page_of(client: TestClient, runs: Runs, name: str, step: dict[str, float], read: dict[str, float]) -> str:
    """Return the page of a run with these last metrics."""
    output = put(runs, name)
    (output / "steps.jsonl").write_text(json.dumps(step) + "\n")
    (output / "eval.jsonl").write_text(json.dumps(read) + "\n")
    return client.get(f"/runs/{name}").text


def tiles(page: str) -> dict[str, tuple[str, str]]:
    """Return the tiles of a run's page by title."""
    shown = re.findall(r"<dt>(.*?)</dt><dd><b>(.*?)</b><span>(.*?)</span>", page)
    return {title: (value, unit.replace("&#39;", "'")) for title, value, unit in shown}


def test_tiles_show_available_metrics(client: TestClient, runs: Runs) -> None:
    bare = tiles(page_of(client, runs, "bare-1", {"step": 3, "loss": 2.5}, {"step": 4, "bits_per_byte": 1.5}))
    assert bare == {"Loss": ("2.5", "nats")}
    one = tiles(page_of(client, runs, "one-1", ONE_TEACHER | {"kl_fraction": 0.9}, BITS))
    assert one["Held-out accuracy"] == ("31.2 %", "next token")
    assert one["Loss"] == ("2.5", "nats, 90.0 % of it chain")
    slow = tiles(page_of(client, runs, "slow-1", {"step": 3, "data_wait": 0.1, "teacher_wait": 0.4}, BITS))
    assert slow["Waiting"] == ("40.0 %", "of the last step, for the teacher")


def test_result_stands_first_with_its_change(client: TestClient, runs: Runs) -> None:
    output = put(runs, "better-1")
    last = measured(1.5, 4, apart=0.125, standard_error=0.0625, task_accuracy_sums=0.5)
    rows = [measured(2.0, task_accuracy_sums=0.25), last]
    (output / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = client.get("/runs/better-1").text
    headline = page[page.index('id="held-out"') : page.index('id="tiles"')]
    assert page.index('id="held-out"') < page.index('id="curves"')
    assert "1.5000 ± 0.0625" in headline and "4 documents, 3.9 KiB" in headline
    assert "−0.5000" in headline and "better by 0.5000 ± 0.07" in headline
    assert "50.0" in headline and "+25.0" in headline
    assert "train its baseline" in headline
    listed = client.get("/").text
    assert all(text in listed for text in ("1.5000", "−0.5000", "from model", "chain"))


def test_page_has_every_chart(client: TestClient, runs: Runs) -> None:
    page = page_of(client, runs, "two-1", TWO_TEACHERS, BITS)
    figures = dict(re.findall(r'<figure [^>]*id="curve-([^"]+)"(.*?)</figure>', page, re.DOTALL))
    charts = {chart.name: chart for chart in sum(charts_of(TWO).values(), ())}
    assert figures.keys() == charts.keys()
    for name in figures.keys() - {"loss"}:  # the stored run has one teacher
        keys = re.findall(r'data-key="([^"]+)"', figures[name])
        assert keys == [line.key for line in charts[name].lines]
        assert f'data-min-lines="{charts[name].min_lines}"' in figures[name]


def drawn(source: str, row: dict[str, float], spec: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the lines of a row by chart and label, as the page's script selects and weighs them."""
    shown: dict[str, dict[str, float]] = {}
    for chart in sum(charts_of(spec).values(), ()):
        lines = {}
        for line in chart.lines if chart.source == source else ():
            for name in sorted(row):
                if name == line.key or (line.key.endswith("*") and name.startswith(line.key[:-1])):
                    factors = [row.get(key, 1.0) for key in line.factor_keys]
                    lines[
                        f"{line.label} {name.removeprefix(line.key[:-1])}" if line.key.endswith("*") else line.label
                    ] = row[name] * line.factor * math.prod(factors)
        shown |= {chart.name: lines} if len(lines) >= chart.min_lines else {}
    return shown


ONE = {"teacher": [{}], "loss": {"mode": "chain", "kl_loss_weight": 1.0, "ce_loss_scale": 0.1}}


TWO = {"teacher": [{}, {"weight": 2.0}], "loss": {"mode": "gold", "teacher_modes": [None, "alm"], "ce_loss_scale": 0.1}}


def test_charts_by_class_of_chunk_have_completions_apart() -> None:
    row = {f"chunk_kl_{kind}{name}_t0": 1.0 for kind in ("", GENERATED) for name in CLASSES}
    shown = drawn("steps", row, ONE | {"rollout": {"fraction": 1.0}})
    assert [len(shown[name]) for name in ("classes", "classes-generated")] == [len(CLASSES)] * 2
    assert not any(name.startswith("classes") for name in drawn("steps", row, ONE))


def test_teachers_of_different_samples_have_lines_of_their_own() -> None:
    row = {"samples_t0": 3.0, "samples_t1": 5.0}
    assert drawn("steps", row, TWO)["samples"] == {"teacher 0": 3.0, "teacher 1": 5.0}
    bits = {f"teacher_bits_per_byte{text}": 1.0 for text in ("", "_german", "_german_t0", "_t1")}
    shown = {"teacher", "teacher: german", "teacher: german_t0", "teacher: t1"}
    assert set(drawn("eval", bits, TWO)["held-out"]) == shown


def test_losses_have_their_names_and_weights() -> None:
    one = drawn("steps", ONE_TEACHER, ONE)["loss"]
    assert one == pytest.approx({"total": 2.5, "chain": 2.25, "0.1 × cross-entropy": 0.15})
    two = drawn("steps", TWO_TEACHERS | {"weight_t1": 2.0}, TWO)
    assert list(two["loss"]) == ["total", "gold, teacher 0", "ALM, teacher 1", "0.1 × cross-entropy"]
    assert two["loss"]["ALM, teacher 1"] == 6.0
    assert "weights" in two and "weights" not in drawn("steps", ONE_TEACHER, ONE)
    fading = drawn(
        "steps", ONE_TEACHER | {"kl_loss_scale": 0.5}, ONE | {"loss": ONE["loss"] | {"kl_loss_weight_end": 0.0}}
    )
    assert fading["loss"]["(1 to 0) × chain"] == 1.125, "as the step weighed it"
    alone = {"teacher": [], "loss": {"kl_loss_weight": 0.0, "ce_loss_scale": 1.0}}
    assert drawn("steps", {"step": 1, "loss": 1.5, "ce_loss": 1.5}, alone)["loss"] == {"cross-entropy": 1.5}
    assert drawn("eval", BITS, ONE).keys() == {"held-out", "held-out-agreement"}


def test_a_teachers_store_has_hits_misses_bytes_and_waits() -> None:
    row = {"store_hits": 23, "store_misses": 1, "store_bytes": 2 << 20, "store_wait_seconds": 0.01}
    shown = drawn("steps", row, ONE)
    assert shown["store-records"] == {"read": 23, "missing, skipped": 1}
    assert shown["store"] == {"read": 2 << 20}
    assert shown["store-wait"] == {"waited": 0.01}
    assert not any(name.startswith("store") for name in drawn("steps", ONE_TEACHER, ONE))


def test_completions_of_an_evaluation(client: TestClient, runs: Runs) -> None:
    put(runs, "b")
    assert 'id="samples" hidden' in client.get("/runs/b").text
    output = put(runs, "a")
    sample = {"prompt": "2 + 2 = ", "completion": "<b>4</b>"}
    (output / "eval.jsonl").write_text(json.dumps({"step": 2, "bits_per_byte": 1.5, "samples": [sample, 7]}) + "\n")
    page = client.get("/runs/a").text
    assert "<b>2 + 2 = </b>&lt;b&gt;4&lt;/b&gt;" in page and 'id="samples" hidden' not in page


def test_the_list_is_sorted_by_result(client: TestClient, runs: Runs) -> None:
    for name, bits in (("a", 1.5), ("b", None), ("c", 1.25), ("d", 2.0)):
        output = put(runs, name)
        if bits is not None:
            (output / "eval.jsonl").write_text(json.dumps(measured(bits, 4)) + "\n")

    def order(query: str) -> list[str]:
        return re.findall(r'id="row-(\w)"', client.get(f"/?{query}").text)

    assert order("") == ["d", "c", "b", "a"]
    assert order("sort=result") == ["c", "a", "d", "b"]
    assert order("sort=result&tab=active") == []
    assert client.get("/?sort=other").status_code == 404


def test_tasks_without_held_out_text_are_shown(client: TestClient, runs: Runs) -> None:
    lines = [{"step": 0, "task_accuracy_sums": 0.25}, {"step": 4, "task_accuracy_sums": 0.5}]
    (put(runs, "a") / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = client.get("/runs/a").text
    assert "Task sums" in page and "+25.0" in page and 'id="held-out"' not in page


def test_files_have_sizes_and_checkpoints_are_freed_once_a_run_is_over(client: TestClient, runs: Runs) -> None:
    for name, state in (("a", RunState.STOPPED), ("b", RunState.RUNNING)):
        output = put(runs, name, state)
        for step in ("step-00000001", "step-00000002"):
            (output / "checkpoints" / step).mkdir(parents=True)
            (output / "checkpoints" / step / "rank-0.safetensors").write_bytes(bytes(1536))
    assert "<b>3.0 KiB</b> of it checkpoints" in client.get("/runs/a/files").text
    put(runs, "c")
    offers = ["Free checkpoints" in client.get(f"/runs/{name}/files").text for name in "abc"]
    assert offers == [True, False, False], "not while it runs, nor without a checkpoint"
    assert client.post("/runs/a/free").headers["location"] == "/runs/a/files"
    assert "<b>1.5 KiB</b> of it checkpoints" in client.get("/runs/a/files").text


def test_notes_of_a_user_are_shown_with_the_run(client: TestClient, runs: Runs) -> None:
    put(runs, "a")
    assert client.post("/runs/a/description", data={"text": " for <b>\r\nme "}).headers["location"] == "/runs/a"
    for path in ("/", "/runs/a", "/runs/a/log"):
        assert "for &lt;b&gt;\nme" in client.get(path).text


def test_documents_are_served_and_lead_to_each_other(client: TestClient) -> None:
    first = client.get("/").text
    start = re.search(r'href="(/guide/[^"]+)"', first)
    assert start and "<h1" in client.get(start[1]).text
    for name in documents():
        answer = client.get(f"/guide/{name}")
        assert answer.status_code == 200, name
        if not name.endswith(".md"):
            continue
        assert " style=" not in answer.text, "the policy forbids it"
        for link in re.findall(r'(?:href|src)="([^"]+)"', answer.text.partition("<article")[2]):
            file, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name
            if not link.startswith("http") and target.startswith("docs/"):
                assert target in documents(), (name, link)
                assert not anchor or f'id="{anchor}"' in client.get(f"/guide/{target}").text, (name, link)
    for name in ("docs/none.md", "docs/../pyproject.toml", "docs/generate.py", "CONTRIBUTING.md"):
        assert client.get("/guide/" + name.replace("..", "%2e%2e")).status_code == 404


def test_download_of_the_model(client: TestClient, runs: Runs) -> None:
    output = put(runs, "done-1")
    assert client.get("/runs/done-1/download/model").status_code == 404
    (output / "model").mkdir()
    contents = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 9}
    for name, content in contents.items():
        (output / "model" / name).write_bytes(content)
    (output / "model" / "link").symlink_to("/etc/passwd")
    answer = client.get("/runs/done-1/download/model")
    assert len(answer.content) == int(answer.headers["content-length"])
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert members == {f"done-1/{name}": content for name, content in contents.items()}
    text = client.get("/runs/done-1/download/run-file").text
    assert tomllib.loads(text)["student"]["context_length"] == 8


def test_a_stopped_run_names_the_way_to_a_model(client: TestClient, runs: Runs) -> None:
    output = put(runs, "half-1", RunState.STOPPED)
    assert "xtoken export" not in client.get("/runs/half-1").text
    (output / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert f"xtoken export {output}" in client.get("/runs/half-1").text


def test_pages_show_the_evaluation_of_the_student_that_is_kept(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    rows = "".join(json.dumps(measured(bits, step)) + "\n" for step, bits in enumerate((3.0, 2.0, 2.75)))
    for name, keeps in (("kept-1", True), ("last-1", False)):
        output = put(runs, name)
        (output / "eval.jsonl").write_text(rows)
        evaluation = {"path": str(tmp_path / "data.txt"), "keep_best": keeps}
        runs.store.change(name, spec=spec(tmp_path, output=str(output), eval=evaluation))
    kept, last = (client.get(f"/runs/{name}").text for name in ("kept-1", "last-1"))
    assert "2.0000" in kept and "best step 1" in kept and "2.7500" not in kept
    assert "2.7500" in last and "best step 1" not in last
    compared = client.get("/compare?run=kept-1&run=last-1").text
    assert (
        "with 2.0000 (4 documents, 4,000 bytes) bits per byte after 1 steps; beside last-1: better by 0.7500 ± 0.0"
        in compared
    )
    assert client.get("/v1/runs/kept-1").json()["best_evaluation"] == measured(2.0, 1)


def test_tokens_have_the_colour_of_their_chunks_divergence(runs: Runs, client: TestClient) -> None:
    output = put(runs)
    (output / "rollouts.json").write_text(json.dumps({"samples": [{"step": 7, "version": 6, "teachers": [SIDE]}]}))
    text = client.get("/runs/old-1/rollouts").text
    assert "Step 7" in text
    assert "by the weights of step 6" in text
    assert '<span class="token h0" title="0.005 nats">=&lt;</span>' in text
    assert '<span class="token h5" title="2.500 nats">2</span>' in text
    assert '<span class="token none">1+1</span>' in text
    part = client.get("/runs/old-1/rollouts", headers={"HX-Request": "true"}).text
    assert part.lstrip().startswith('<div id="rollouts"')


@pytest.mark.parametrize(
    "content", [{}, {"samples": 1}, {"samples": [{"step": 1, "version": 0, "teachers": [{**SIDE, "student": [1]}]}]}]
)
def test_a_file_of_another_shape_shows_none(runs: Runs, client: TestClient, content: dict[str, Any]) -> None:
    (put(runs) / "rollouts.json").write_text(json.dumps(content))
    found = client.get("/runs/old-1/rollouts")
    assert found.status_code == 200
    assert "No completion yet." in found.text


def test_only_runs_with_rollouts_have_the_tab(runs: Runs, client: TestClient) -> None:
    put(runs)
    assert 'href="/runs/old-1/rollouts"' not in client.get("/runs/old-1").text


def test_completions_that_run_away_are_on_the_page(client: TestClient, runs: Runs) -> None:
    for name, last in (("stable-1", 0.2), ("random-1", 1.8)):
        entropies = [0.13] * 8 + [last] * 8
        lines = [{"step": step, "completions": 8, "entropy": entropy} for step, entropy in enumerate(entropies)]
        (put(runs, name) / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "at random" not in client.get("/runs/stable-1").text
    assert "its completions have 1.80 nats a token, 0.13 at first (entropy)" in client.get("/runs/random-1").text
    means = client.get("/v1/runs/random-1").json()["completions"]
    assert means == {"first": {"entropy": pytest.approx(0.13)}, "last": {"entropy": pytest.approx(1.8)}}
