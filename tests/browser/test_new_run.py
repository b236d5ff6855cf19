"""The page of a new run in a browser: form and run file as one text, errors at their lines, a run by three fields."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from tests.browser.conftest import Plane, picture
from tests.browser.forms import NARROW, WHOLE_RUN_MS, WIDE, Open, fill, run_file
from xtoken_services.control.web.new_run import START

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
expect = pytest.importorskip("playwright.sync_api").expect
TEACHER = next(line for line in START.splitlines() if line.startswith("[[teacher]]"))
expect.set_options(timeout=120_000)


def text_of(page: Any) -> str:
    """Return the run file on the page."""
    return page.get_by_label("Run file").input_value()  # type: ignore[no-any-return]


def wrong_lines(page: Any) -> list[str]:
    """Return the numbers of the lines that are marked."""
    return [number.strip() for number in page.locator("#lines b").all_inner_texts()]


def test_errors_at_their_lines(open_page: Open, plane: Plane) -> None:
    page = open_page("/runs/new")
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("alert")).to_contain_text("3 errors")
    assert wrong_lines(page) == [
        str(text_of(page).splitlines().index(line) + 1) for line in ("[student]", TEACHER, "[data]")
    ]
    fill(page, {"student.context_length": "1"})
    text = run_file(plane, "second")
    page.get_by_label("Run file").fill(text.replace("context_length = 64", "context_length = 1 # too few\nsise = 3"))
    page.get_by_role("button", name="Start").click()
    wrong = page.get_by_label("Context length")
    expect(wrong).to_have_attribute("aria-invalid", "true")
    expect(wrong).to_be_focused()
    assert "greater than or equal to 2" in page.locator("#e-student-context_length").inner_text()
    lines = text_of(page).splitlines()
    assert [lines[int(line) - 1] for line in wrong_lines(page)] == ["context_length = 1 # too few", "sise = 3"]
    picture(page, "10-errors")
    page.get_by_role("button", name="Line").last.click()
    expect(page.get_by_label("Run file")).to_be_focused()
    assert page.evaluate("getSelection().toString()") == "sise = 3"

    page.keyboard.press("Delete")
    fill(page, {"student.context_length": "64", "teacher.0.model": "/etc/passwd"})
    assert "context_length = 64 # too few" in text_of(page), "comments are kept"
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_role("alert")).to_contain_text("lies under none of")
    expect(page.get_by_label("Teacher")).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Run file").fill('name = "a"\nseed = = 1')
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("alert")).to_contain_text("Line 2 Invalid TOML")
    picture(page, "11-invalid")


SETTINGS = (
    "student.model",
    "student.context_length",
    "teacher.0.model",
    "data.path",
    "loss.mode",
    "eval.every",
    "name",
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('student = "s"\nteacher = \'t\' # c\ndata = "d"', ["s", "", "t", "d", "", "", ""]),
        ('student.model = "s#"\n[teacher]\nmodel = "t\\u0020"', ["s#", "", "t ", "", "", "", ""]),
        ('[[teacher]]\nmodel = "t"\n[[teacher]]\nmodel = "u"\nname = "v"', ["", "", "t", "", "", "", ""]),
        ('[data]\npath = [\n  "a", # ]\n  "b",\n]\n[eval]\nevery = 3', ["", "", "", "in line 2", "", "3", ""]),
        ('loss = {mode = "alm"}\neval = "none"\nname = "n"', ["", "", "", "", "in line 1", "in line 2", "n"]),
        ('name = """\n[student]\nmodel = "x"\n"""\n[student]\nmodel = "y"', ["y", "", "", "", "", "", "in line 1"]),
        ("[student\nmodel = ", [""] * 7),
    ],
    ids=["short", "dotted", "two teachers", "list", "inline", "several lines", "unfinished"],
)
def test_form_shows_what_the_text_has(open_page: Open, text: str, shown: list[str]) -> None:
    page = open_page("/runs/new")
    page.get_by_label("Run file").fill(text)
    for name, value in zip(SETTINGS, shown, strict=True):
        field = page.locator(f"[data-setting='{name}']")
        elsewhere = value.startswith("in line")
        expect(field).to_be_enabled(enabled=not elsewhere)
        if not elsewhere:
            expect(field).to_have_value(value)
        elif name == "loss.mode":
            expect(field.locator("option").first).to_have_text(value)
        else:
            expect(field).to_have_attribute("placeholder", value)


def test_form_writes_into_the_text(open_page: Open) -> None:
    page = open_page("/runs/new")
    short = '# mine\nstudent = "s"  # small\n\n[train] # t\nmax_steps = 5 # few\n# end'
    page.get_by_label("Run file").fill(short)
    fill(page, {"train.max_steps": "7", "train.learning_rate": "3e-4", "student.model": 'a "b" \\'})
    fill(page, {"loss.mode": "alm", "student.context_length": "48", "teacher.0.model": "t", "eval.every": "x"})
    assert tomllib.loads(text_of(page)) == {
        "student": {"model": 'a "b" \\', "context_length": 48},
        "teacher": [{"model": "t"}],
        "train": {"max_steps": 7, "learning_rate": 3e-4},
        "loss": {"mode": "alm"},
        "eval": {"every": "x"},
    }
    assert text_of(page).startswith("# mine\n\n[train] # t\nmax_steps = 7 # few\nlearning_rate = 3e-4\n# end\n")
    fill(page, {"loss.mode": "", "name": "n", "eval.every": ""})
    page.get_by_label("Name").press("Tab")
    document = tomllib.loads(text_of(page))
    assert (document["name"], document["loss"], document["eval"]) == ("n", {}, {})
    page.get_by_label("Run file").fill(
        'student.model = "s"\nteacher.model = "t"\n[data]\npath = "d"\n[eval.tasks]\npath = "p"'
    )
    fill(page, {"student.context_length": "48", "data.epochs": "2", "eval.every": "3"})
    assert text_of(page).startswith('student.model = "s"\nstudent.context_length = 48\nteacher')
    assert tomllib.loads(text_of(page))["eval"] == {"tasks": {"path": "p"}, "every": 3}
    page.get_by_label("Run file").fill(document["name"])
    page.reload()
    expect(page.get_by_label("Name")).to_have_value("run")


def test_run_from_three_fields(open_page: Open, plane: Plane) -> None:
    page = open_page("/runs/new")
    models = {"student.model": str(plane.assets.student), "teacher.0.model": str(plane.assets.teacher)}
    fill(page, {**models, "data.path": str(plane.text)})
    fill(page, {"train.max_steps": "40", "train.samples_per_step": "8", "train.learning_rate": "3e-3"})
    picture(page, "21-three-fields")
    page.get_by_label("Learning rate").press("Enter")
    checked = page.get_by_role("status").filter(has_text="The run is valid.")
    expect(checked).to_contain_text(f"{plane.runs}/run")
    expect(page.get_by_label("Output directory")).to_have_attribute("placeholder", f"{plane.runs}/run")
    expect(page.get_by_label("Steps between evaluations")).to_have_attribute("placeholder", "5")
    expect(page.get_by_label("Context length")).to_have_attribute("placeholder", re.compile(r"^\d+$"))
    checked.locator("summary").click()
    expect(checked.locator("pre")).to_contain_text(
        re.compile(r"# default: eval: 2% of the records.*\[eval\]\n", re.DOTALL)
    )
    picture(page, "22-defaults")
    page.get_by_role("button", name="Start").click()
    expect(page).to_have_url(re.compile(r"/runs/run-[0-9a-f]{8}$"))
    expect(page.locator("#run-head")).to_contain_text("Stop takes the current step to its end")
    expect(page.locator("#run-head")).to_contain_text(f"{plane.runs}/run/model")
    expect(page.locator("#curve-loss canvas")).to_be_visible()
    picture(page, "23-running")
    expect(page.locator("#run-head .pill")).to_have_text("completed", timeout=WHOLE_RUN_MS)
    expect(page.locator("#run-head")).to_contain_text("by chain and cross-entropy")
    expect(page.locator("#notes")).to_contain_text("defaults: output =")
    expect(page.locator("#held-out")).to_contain_text("since step 0")
    for width, colours in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
        shown = open_page(page.url.partition(plane.url)[2], width=width, colours=colours)
        expect(shown.locator("#curve-held-out canvas")).to_be_visible()
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        picture(shown, f"20-{'narrow' if width == NARROW else 'wide'}-{colours}-chain")
