"""The form of a new run in a browser: errors by field, and a run that takes the defaults of a run file."""

from __future__ import annotations

import re

import pytest

from tests.browser.conftest import Plane, picture
from tests.browser.forms import NARROW, WHOLE_RUN_MS, WIDE, Open, fill, settings

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]
expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=120_000)


def test_form_errors(open_page: Open, plane: Plane) -> None:
    page = open_page("/runs/new")
    values = {**settings(plane, "second"), "student.context_length": "1", "teacher.0.projection": "/etc/passwd"}
    fill(page, values)
    page.get_by_role("button", name="Start", exact=True).last.click()
    wrong = page.get_by_label("Context length").first
    expect(wrong).to_have_attribute("aria-invalid", "true")
    expect(wrong).to_be_focused()
    assert "greater than or equal to 2" in page.locator("#f-student-context_length-error").inner_text()
    assert page.locator("[name='output']").input_value() == "second"
    picture(page, "10-field-error")

    fill(page, {"student.context_length": "64"})
    page.get_by_role("button", name="Start", exact=True).last.click()
    expect(page.locator("#f-teacher-0-projection-error")).to_contain_text("lies under none of")

    page.get_by_role("button", name="Run file").click()
    text = page.get_by_label("Run file").input_value()
    assert "[student]" in text and "[[teacher]]" in text and 'name = "second"' in text
    page.get_by_label("Run file").fill(text.replace("[student]", "[student]\nsise = 3"))
    page.get_by_role("button", name="Validate").click()
    expect(page.locator("#errors")).to_contain_text("student.sise")
    picture(page, "11-run-file")
    page.get_by_label("Run file").fill(text.replace("/etc/passwd", str(plane.assets.projection)))
    page.get_by_role("button", name="Fields").click()
    expect(page.locator("[name='teacher.0.projection']")).to_have_value(str(plane.assets.projection))
    page.get_by_role("button", name="Add a teacher").click()
    expect(page.locator("[name='teacher.1.model']")).to_be_visible()
    page.get_by_role("button", name="Remove").last.click()
    expect(page.locator("[name='teacher.1.model']")).to_have_count(0)


def test_run_from_three_fields(open_page: Open, plane: Plane) -> None:
    page = open_page("/runs/new")
    expect(page.locator("[name='output']")).to_have_attribute("placeholder", f"{plane.runs}/run")
    expect(page.locator("[name='push_to']")).to_have_count(0)
    models = {"student.model": str(plane.assets.student), "teacher.0.model": str(plane.assets.teacher)}
    fill(page, {**models, "data.path": str(plane.text)})
    page.locator("[name='train.max_steps']").fill("40")
    page.locator("[name='train.samples_per_step']").fill("8")
    page.locator("[name='train.learning_rate']").fill("3e-3")
    page.locator("#part-eval > summary").click()
    expect(page.locator("[name='eval.every']")).to_have_attribute("placeholder", "4")
    expect(page.locator("[name='eval.path']")).to_have_attribute("placeholder", re.compile("of the text, held back"))
    expect(page.locator("[name='student.context_length']")).to_have_attribute("placeholder", re.compile(r"^\d+$"))
    picture(page, "21-three-fields")
    page.get_by_role("button", name="Validate").click()
    checked = page.get_by_role("status").filter(has_text="The run is valid.")
    expect(checked).to_contain_text(f"{plane.runs}/run")
    checked.locator("summary").click()
    picture(page, "22-defaults")
    page.get_by_role("button", name="Start", exact=True).last.click()
    expect(page).to_have_url(re.compile(r"/runs/run-[0-9a-f]{8}$"))
    expect(page.locator("#run-head")).to_contain_text("Stop takes the current step to its end")
    expect(page.locator("#run-head")).to_contain_text(f"{plane.runs}/run/model")
    expect(page.locator("#curve-loss canvas")).to_be_visible()
    picture(page, "23-running")
    expect(page.locator("#run-head .pill")).to_have_text("completed", timeout=WHOLE_RUN_MS)
    expect(page.locator("#run-head")).to_contain_text("by (1 to 0) × chain + cross-entropy")
    expect(page.locator("#notes")).to_contain_text("defaults: output =")
    expect(page.locator("#held-out")).to_contain_text("since step 0")
    for width, colours in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
        shown = open_page(page.url.partition(plane.url)[2], width=width, colours=colours)
        expect(shown.locator("#curve-held-out canvas")).to_be_visible()
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        picture(shown, f"20-{'narrow' if width == NARROW else 'wide'}-{colours}-chain")
