"""Web pages in a browser: start, watch, stop, resume and compare runs, download their files, align two tokenizers."""

from __future__ import annotations

import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import TOKEN, Plane, picture
from tests.browser.forms import NARROW, WHOLE_RUN_MS, WIDE, Open, fill, run_file

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=120_000)


def step_of(page: Any) -> int:
    """Return the number of steps on a run's page."""
    found = re.match(r"([\d,]+)\s*/", page.locator(".standing .num").inner_text())
    return int(found[1].replace(",", "")) if found else 0


def wait_for_step(page: Any, step: int) -> None:
    page.wait_for_function(
        """step => Number(
            document.querySelector('.standing .num')?.innerText.split('/')[0].replace(/[^0-9]/g, '')
        ) >= step""",
        arg=step,
    )


def ink(page: Any) -> str:
    """Return the picture of the loss chart."""
    drawn: str = page.locator("#curve-loss canvas").evaluate("canvas => canvas.toDataURL()")
    return drawn


def start_by_the_form(page: Any, plane: Plane) -> None:
    """Start a run from the list through the form, after checking it."""
    page.get_by_role("link", name="New run").last.click()
    tasks = {"path": str(plane.tasks), "match": "contains", "max_new_tokens": 4}
    evaluation = {"path": str(plane.held_out), "every": 20, "tasks": tasks}
    page.get_by_label("Run file").fill(run_file(plane, "first", eval=evaluation))
    picture(page, "02-form")
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("status").filter(has_text="The run is valid.")).to_contain_text("500")
    picture(page, "03-checked")
    page.get_by_role("button", name="Start").click()


def test_run_from_form_to_files(open_page: Open, plane: Plane, tmp_path: Path) -> None:
    page = open_page("/")
    start_by_the_form(page, plane)
    expect(page).to_have_url(re.compile(r"/runs/first-[0-9a-f]{8}$"))
    for worker in ("queue", "collator-0", "teacher-0-0", "trainer-0"):
        expect(page.locator(f"#worker-{worker}")).to_contain_text("running")
    expect(page.locator("#worker-trainer-0")).to_contain_text("ago")
    expect(page.locator("#held-out")).to_contain_text("bits per byte")
    expect(page.locator("#task-0")).to_contain_text("Task words")
    expect(page.locator("#curve-loss")).to_be_visible()
    wait_for_step(page, 5)
    seen = ink(page)
    wait_for_step(page, step_of(page) + 5)
    page.wait_for_function("before => document.querySelector('#curve-loss canvas').toDataURL() !== before", arg=seen)
    names = page.locator("#curve-loss .legend li")
    expect(names).to_have_text([re.compile(name) for name in ("total", "P-KL", "0.1 × cross-entropy")])
    for name in ("held-out", "mass", "gradient", "tasks"):
        expect(page.locator(f"#curve-{name}")).to_be_visible()
    page.locator("#speed > summary").click()
    for name in ("throughput", "waiting", "queue", "memory"):
        expect(page.locator(f"#curve-{name} canvas")).to_be_visible()
    expect(page.locator("#curve-gpu-use")).to_be_hidden()
    wait_for_step(page, 45)
    expect(page.locator("#held-out")).to_contain_text("since step 0")
    page.locator("#speed > summary").click()
    page.wait_for_timeout(2500)
    page.locator("#curve-loss .u-over").hover()
    expect(page.locator("#curve-loss")).to_have_attribute("data-at", re.compile(r"step \d+"))
    picture(page, "04-running")

    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#run-head .pill")).to_have_text("stopped")
    expect(page.locator("#notes")).to_contain_text("stopped")
    at = step_of(page)
    assert 0 < at < 500
    picture(page, "05-stopped")

    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#run-head .pill")).to_have_text("running")
    wait_for_step(page, at + 3)
    expect(page.locator("#notes")).to_contain_text("resumed")
    assert page.locator("#curve-loss").is_visible()

    look_at_log_and_configuration(page, plane)

    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#run-head .pill")).to_have_text("stopped")
    page.get_by_role("link", name="Files").click()
    picture(page, "08-files")
    with page.expect_download() as download:
        page.get_by_role("link", name="steps.jsonl").click()
    download.value.save_as(tmp_path / "steps.jsonl")
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) >= at + 3
    assert page.locator("#files h2").filter(has_text="checkpoints/step-").count() >= 1

    page.get_by_role("link", name="xtoken, runs").click()
    expect(page.get_by_role("row").filter(has_text="first")).to_contain_text("stopped")
    picture(page, "09-runs")


def look_at_log_and_configuration(page: Any, plane: Plane) -> None:
    """Open the tabs of a run's log and of its configuration."""
    page.get_by_role("navigation", name="Run", exact=True).get_by_role("link", name="Log").click()
    expect(page.get_by_role("log")).to_contain_text("ring 1 of the teacher is open")
    page.get_by_role("link", name="trainer-0", exact=True).click()
    expect(page.get_by_role("log")).not_to_contain_text("serving at")
    picture(page, "06-log")
    page.get_by_role("link", name="Configuration").click()
    expect(page.locator("#short")).to_contain_text(f'model = "{plane.assets.student}"')
    picture(page, "07-configuration")


@pytest.mark.timeout(900)
def test_baseline_and_distilled_are_compared(open_page: Open, plane: Plane) -> None:
    page = open_page("/runs/new")
    page.get_by_label("Run file").fill(run_file(plane, "pair", loss={"ce_loss_scale": 0.1}))
    fill(page, {"train.max_steps": "10", "loss.mode": "alm", "eval.every": "5"})
    held_out = page.get_by_label("Held-out text")
    held_out.press_sequentially("held")
    page.locator(".path-list li").filter(has_text="held-out.jsonl").click()
    expect(held_out).to_have_value(str(plane.held_out))
    assert f'path = "{plane.held_out}"' in page.get_by_label("Run file").input_value()
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#run-head .pill")).to_have_text("completed", timeout=WHOLE_RUN_MS)
    expect(page.locator("#run-head")).to_contain_text("by ALM and cross-entropy (weight 0.1)")

    page.locator("#download summary").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Model").click()
    with tarfile.open(download.value.path()) as archive:
        assert any(name.endswith("/model.safetensors") for name in archive.getnames())
    page.locator("#more summary").click()
    page.get_by_role("button", name="Train its baseline").click()
    expect(page).to_have_url(re.compile(r"/compare\?run=pair-[0-9a-f]{8}&run=pair-baseline-[0-9a-f]{8}$"))
    rows = page.locator("#results tbody tr")
    expect(rows.nth(1).locator(".pill")).to_have_text("completed", timeout=WHOLE_RUN_MS)
    expect(page.locator("#verdict")).to_contain_text("by cross-entropy only")
    expect(rows.nth(0)).to_contain_text("ALM and cross-entropy (weight 0.1)")
    for name in ("held-out", "ce", "agreement", "throughput"):
        expect(page.locator(f"#curve-{name} .legend li")).to_have_text(
            [re.compile("^pair "), re.compile("^pair-baseline ")]
        )
    page.wait_for_function("document.querySelector('#curve-held-out .legend b').textContent !== '–'")
    differing = page.locator("#differing")
    expect(differing.get_by_role("row").filter(has_text="loss.mode")).to_contain_text("alm")
    expect(differing).not_to_contain_text("student.model")
    picture(page, "16-compare")

    bits = rows.nth(1).locator("b").inner_text()
    rows.nth(1).get_by_role("link").click()
    page.locator("#more summary").click()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Remove from the list").click()
    page.get_by_role("link", name="pair", exact=True).click()
    page.locator("#more summary").click()
    page.get_by_role("button", name="Compare with its baseline").click()  # as made by `xtoken run --baseline`
    expect(rows.nth(1).locator(".pill")).to_have_text("completed", timeout=WHOLE_RUN_MS)
    expect(rows.nth(1).locator("b")).to_have_text(bits)
    compare_from_the_list(page, open_page, plane)


def compare_from_the_list(page: Any, open_page: Open, plane: Plane) -> None:
    """Choose both runs in the list, and look at their comparison in every width and colour."""
    page.goto("/")
    row = page.get_by_role("row").filter(has_text="pair-baseline")
    expect(row).to_contain_text("cross-entropy")
    expect(row.locator(".change")).to_be_visible()
    for width in (WIDE, NARROW):
        picture(open_page("/", width=width), f"24-{'narrow' if width == NARROW else 'wide'}-runs")
    for name in ("pair-baseline", "pair"):
        page.get_by_role("checkbox", name=f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare the selected runs").click()
    expect(page.locator("#results tbody tr")).to_have_count(2)
    for width, colours in ((NARROW, "light"), (NARROW, "dark"), (WIDE, "dark")):
        shown = open_page(page.url.partition(plane.url)[2], width=width, colours=colours)
        expect(shown.locator("#curve-held-out canvas")).to_be_visible()
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        picture(shown, f"20-{'narrow' if width == NARROW else 'wide'}-{colours}-compare")


def test_charts_of_teachers(open_page: Open, remembered: Plane) -> None:
    page = open_page("/runs/of-2", at=remembered)
    for name, labels in (
        ("loss", ["total", "P-KL, teacher 0", "P-KL, teacher 1", "0.1 × cross-entropy"]),
        ("mass", ["compared, teacher 0", "compared, teacher 1"]),
        ("agreement", ["next token", "with teacher 0", "with teacher 1"]),
    ):
        curve = page.locator(f"#curve-{name}")
        expect(curve.locator("canvas")).to_be_visible()
        legend = curve.locator(".legend li")
        expect(legend).to_have_text([re.compile(rf"^{label} [\d.]+$") for label in labels])
    picture(page, "14-two-teachers")

    page.goto("/runs/of-1")
    expect(page.locator("#curve-mass .legend li")).to_have_text([re.compile(r"^compared 9\d\.?\d*$")])
    expect(page.locator("#curve-loss .legend li")).to_have_count(3)
    expect(page.locator("#curve-weights")).to_be_hidden()
    picture(page, "15-one-teacher")


def test_charts_of_completions(open_page: Open, remembered: Plane) -> None:
    classes = ["1 to 1", "1 to n", "n to 1", "m to n", "numerals", "white space"]
    for width, colours in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
        page = open_page("/runs/on-policy", at=remembered, width=width, colours=colours)
        for name in ("classes", "classes-generated"):
            curve = page.locator(f"#curve-{name}")
            expect(curve.locator("canvas")).to_be_visible()
            expect(curve.locator(".legend li")).to_have_text([re.compile(rf"^{label} [\d.]+$") for label in classes])
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        picture(page, f"20-{'narrow' if width == NARROW else 'wide'}-{colours}-completions")


def test_notes_order_checkpoints_and_documents(open_page: Open, remembered: Plane) -> None:
    checkpoints = remembered.runs / "of-1" / "checkpoints"
    for step in ("step-00000010", "step-00000020"):
        (checkpoints / step).mkdir(parents=True, exist_ok=True)
        (checkpoints / step / "index.json").write_text("{}")
    page = open_page("/runs/of-1", at=remembered)
    page.get_by_label("Notes").fill("twice the text")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#run-head")).to_contain_text("twice the text")
    expect(page.get_by_label("Notes")).to_have_value("twice the text")
    expect(page.locator("#workers")).to_be_hidden()

    page.get_by_role("navigation", name="Run", exact=True).get_by_role("link", name="Files").click()
    expect(page.locator("#disk")).to_contain_text("of it checkpoints")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_label("More actions").click()
    page.get_by_role("button", name="Free checkpoints").click()
    expect(page.locator("#files h2").filter(has_text="checkpoints/")).to_have_count(1)
    expect(page.locator("#files h2").filter(has_text="step-00000020")).to_be_visible()

    page.get_by_role("link", name="xtoken, runs").click()
    page.get_by_role("link", name="Best first").click()
    expect(page.get_by_role("link", name="Best first")).to_have_attribute("aria-current", "page")
    expect(page.get_by_role("row").filter(has_text="twice the text")).to_be_visible()
    page.get_by_role("link", name="Docs").click()
    page.get_by_role("link", name="REST", exact=True).click()
    expect(page.get_by_role("heading", name="REST interface")).to_be_visible()
    bar = page.get_by_role("navigation", name="Documents")
    expect(bar.get_by_role("link", name="REST")).to_have_css("font-weight", "600")
    expect(bar.get_by_role("link", name="Sizing")).to_have_css("font-weight", "400")
    assert page.evaluate("scrollY") == 0
    page = open_page("/guide/docs/quickstart.md", at=remembered, width=NARROW)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture(page, "24-document")


def test_the_first_step_is_a_point(open_page: Open, remembered: Plane) -> None:
    curves, evaluations = (remembered.runs / "on-policy" / f"{name}.jsonl" for name in ("steps", "eval"))
    kept = {file: file.read_text() for file in (curves, evaluations)}
    try:
        curves.write_text("")
        evaluations.write_text('{"step": 0, "bits_per_byte": 2.5, "next_token_accuracy": 0.4}\n')
        page = open_page("/runs/on-policy", at=remembered)
        expect(page.locator("#curve-held-out canvas")).to_be_visible()
        curves.write_text('{"step": 0, "loss": 3.5, "ce_loss": 3.5, "grad_norm": 1.5}\n')
        expect(page.locator("#curve-gradient canvas")).to_be_visible(timeout=30_000)
        page.wait_for_timeout(500)
        widths = "plots => plots.filter(plot => plot.scrollWidth > plot.clientWidth + 1).length"
        assert page.locator(".curve:not([hidden]) .plot").evaluate_all(widths) == 0, "as wide as their place has become"
        coloured = """canvas => {
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            let found = 0;
            for (let i = 0; i < data.length; i += 4) found += data[i + 3] > 0 && data[i + 2] > data[i] + 60;
            return found;
        }"""
        assert page.locator("#curve-gradient canvas").evaluate(coloured) > 4
    finally:
        for file, text in kept.items():
            file.write_text(text)


def test_no_token_lies_under_the_hint_at_420_px(open_page: Open, plane: Plane) -> None:
    page = open_page("/align", width=NARROW)
    fill(page, {"student": str(plane.assets.student), "teacher": str(plane.assets.teacher)})
    page.get_by_label("Text").fill("def number(self): return 2024\n" * 30)
    page.get_by_role("button", name="Align").click()
    page.locator("[data-side='student'] .token").nth(3).click()
    expect(page.locator("#pointed-at")).to_contain_text("↔")
    under = """hint => {
        let found = 0;
        for (let place = 0; place < document.documentElement.scrollHeight; place += 50) {
            scrollTo(0, place);
            const own = hint.getBoundingClientRect();
            for (const token of document.querySelectorAll('.aligned .token')) {
                const { left, width, top, height } = token.getBoundingClientRect();
                const [x, y] = [left + width / 2, top + height / 2];
                found += x > own.left && x < own.right && y > own.top && y < own.bottom
                    && y < token.closest('.tokens').getBoundingClientRect().bottom;
            }
        }
        return found;
    }"""
    assert page.locator("#pointed-at").evaluate(under) == 0
    assert page.locator("[data-side='teacher']").evaluate("side => side.getBoundingClientRect().height") < 500
    picture(page, "25-narrow-align")


def test_align(open_page: Open, plane: Plane) -> None:
    page = open_page("/align")
    page.get_by_label("Student").fill(str(plane.assets.student))
    page.get_by_label("Teacher").fill("/etc")
    page.get_by_role("button", name="Align").click()
    expect(page.locator("[data-field='teacher']")).to_contain_text("lies under none of")
    page.get_by_label("Teacher").fill(str(plane.assets.teacher))
    page.get_by_label("Text").fill("def naïve(number): return number + 2024")
    page.get_by_role("button", name="Align").click()
    student, teacher = (page.locator(f"[data-side='{side}'] .token") for side in ("student", "teacher"))
    expect(student.first).to_be_visible()
    assert page.locator(".token.differs:visible").count() == 1, "the key's own"
    spelled = {side: "".join(tokens.all_inner_texts()) for side, tokens in (("s", student), ("t", teacher))}
    assert "naïve(number):·return" in spelled["s"] and "naïve(number):·return" in spelled["t"]
    assert student.count() != teacher.count()
    student.nth(2).hover()
    chunk = student.nth(2).get_attribute("data-chunk")
    expect(page.locator(f"[data-side='teacher'] .token[data-chunk='{chunk}']").first).to_have_class(
        re.compile("pointed")
    )
    expect(page.locator("#pointed-at")).to_contain_text("↔")
    expect(page.locator(".pairing")).to_contain_text(re.compile(r"\d+\.\d % one to one"))
    page.get_by_label("Text").fill("return 7")
    began = time.monotonic()
    page.get_by_role("button", name="Align").click()
    expect(page.locator("[data-side='student']")).not_to_contain_text("naïve")
    assert time.monotonic() - began < 2.0, "its tokenizers are loaded"
    page.get_by_text("Pairs of special tokens").click()
    page.get_by_label("One pair a line").fill("<none>=<s>")
    page.get_by_role("button", name="Align").click()
    expect(page.get_by_role("alert")).to_contain_text("'<none>' is no special token of the student's tokenizer")
    page.get_by_label("One pair a line").fill("")
    page.get_by_role("button", name="Align").click()
    expect(page.locator("[data-side='student']")).to_be_visible()
    picture(page, "12-align")


def test_tables(open_page: Open, plane: Plane) -> None:
    page = open_page("/")
    page.get_by_role("link", name="Tables").click()
    expect(page.locator("#builds")).to_be_hidden()
    fill(page, {"student": str(plane.assets.student), "teacher": "/etc"})
    page.get_by_role("button", name="Build").click()
    expect(page.locator("[data-field='teacher']")).to_contain_text("lies under none of")
    fill(page, {"teacher": str(plane.assets.teacher)})
    page.get_by_role("button", name="Build").click()
    newest = page.locator("#builds li").first
    expect(newest.get_by_role("progressbar")).to_be_visible()
    picture(page, "17-building")
    expect(newest).to_contain_text("ready")
    expect(newest).to_contain_text(re.compile(r"common tokens.*have a root"))
    fill(page, {"student": str(plane.assets.student), "teacher": str(plane.assets.teacher), "kind": "projection"})
    page.get_by_role("button", name="Build").click()
    expect(newest).to_contain_text(re.compile("Projection.*ready.*with one partner", re.DOTALL))
    picture(page, "18-tables")


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_page_width_and_theme(open_page: Open, remembered: Plane, width: int, colours: str) -> None:
    page, run = open_page("/", at=remembered, width=width, colours=colours), "/runs/of-2"
    for name, path in (
        ("runs", "/"), ("run", run), ("log", f"{run}/log"), ("configuration", f"{run}/configuration"),
        ("files", f"{run}/files"), ("new", "/runs/new"), ("align", "/align"), ("tables", "/tables"), ("api", "/docs"),
    ):  # fmt: skip
        page.goto(path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the screen"
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (colours == "dark")
        picture(page, f"20-{'narrow' if width == NARROW else 'wide'}-{colours}-{name}")


def test_keyboard(open_page: Open, remembered: Plane) -> None:
    page = open_page("/", at=remembered)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.get_by_role("button", name="Colours").focus()
    for colours in ("light", "dark"):
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == colours
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark", "it is remembered"
    page.locator("a.through").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#run-head")).to_be_visible()
    page.locator("#more summary").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="New run with these settings")).to_be_visible()
    page.wait_for_timeout(1000)
    page.keyboard.press("Escape")
    expect(page.get_by_role("link", name="New run with these settings")).to_be_hidden()
    expect(page.locator("#more summary")).to_be_focused()


def test_login(open_page: Open, guarded: Plane) -> None:
    page = open_page("/align", at=guarded)
    expect(page).to_have_url(re.compile("/login"))
    picture(page, "13-sign-in")
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Align two tokenizers")).to_be_visible()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert TOKEN not in cookie["value"]
    page.goto("/")
    expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
    picture(page, "01-no-runs")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token", exact=True)).to_be_visible()
    assert page.context.cookies() == []
