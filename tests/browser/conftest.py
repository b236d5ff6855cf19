"""Fixtures: control planes in processes of their own, a Chromium, and screenshots."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tiny_run import TinyAssets, documents, make_assets, write_jsonl
from tests.unit.control.stored_runs import make_runs, put, spec
from xtoken_services.common.files.private_files import control_token_file

PICTURES = Path(__file__).parents[2] / "build" / "browser"
CHROMIUM = os.environ.get("CHROMIUM", "") or shutil.which("chromium") or shutil.which("google-chrome") or ""
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-gpu",
    "--disable-component-update",
    "--disable-sync",
]
DEADLINE_S = 120.0
DEADLINE_MS = DEADLINE_S * 1000
TOKEN = "a-token-for-the-test-of-the-page"
RECORDS = 4000
STARTED = time.time()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = sorted(PICTURES.glob("*.png"))
    if found:
        terminalreporter.write_line(f"{len(found)} screenshots are in {PICTURES}")


@dataclass(frozen=True)
class Plane:
    """A control plane, and files that its runs may read; pages of one with the default token are signed in."""

    url: str
    assets: TinyAssets
    text: Path
    held_out: Path
    tasks: Path
    runs: Path
    token: str


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> TinyAssets:
    return make_assets(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory, assets: TinyAssets) -> Iterator[Plane]:
    yield from serve(tmp_path_factory.mktemp("plane"), assets)


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, assets: TinyAssets) -> Iterator[Plane]:
    """A control plane with a token."""
    place = tmp_path_factory.mktemp("guarded")
    token = place / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    yield from serve(place, assets, "--token-file", str(token))


@pytest.fixture(scope="session")
def remembered(tmp_path_factory: pytest.TempPathFactory, assets: TinyAssets) -> Iterator[Plane]:
    """A control plane with finished runs of one teacher and of two."""
    place = tmp_path_factory.mktemp("remembered")
    runs = make_runs(place)
    for teachers in (1, 2):
        output = put(runs, f"of-{teachers}")
        stored = spec(place, output=str(output), loss={"mode": "p_kl", "ce_loss_scale": 0.1})
        runs.store.change(f"of-{teachers}", spec={**stored, "teacher": stored["teacher"] * teachers})
        for file, line, steps in (("steps", step_line, range(200)), ("eval", read_line, range(0, 201, 20))):
            lines = [json.dumps(line(step, teachers)) + "\n" for step in steps]
            (output / f"{file}.jsonl").write_text("".join(lines))
    output = put(runs, "on-policy")
    stored = spec(place, output=str(output), loss={"mode": "chain"}, rollout={"fraction": 0.5})
    runs.store.change("on-policy", spec=stored)
    for file, line, steps in (("steps", class_line, range(200)), ("eval", read_line, range(0, 201, 20))):
        (output / f"{file}.jsonl").write_text("".join(json.dumps(line(step, 1)) + "\n" for step in steps))
    runs.close()
    yield from serve(place, assets)


def class_line(step: int, teachers: int) -> dict[str, float]:
    """Return a synthetic line of `steps.jsonl` with the divergence of each class of chunk, of text and completions."""
    falls = math.exp(-step / 80) + 0.05 * math.sin(step)
    classes = ("1to1", "1ton", "nto1", "mton", "numerals", "whitespace")
    kinds = [(number, prefix + name) for number, name in enumerate(classes) for prefix in ("", "generated_")]
    return {**step_line(step, teachers), **{f"chunk_kl_{name}_t0": (1 + n / 2) * (0.3 + falls) for n, name in kinds}}


def step_line(step: int, teachers: int) -> dict[str, float]:
    """Return a synthetic line of `steps.jsonl`."""
    falls = math.exp(-step / 80) + 0.05 * math.sin(step)
    each = {f"kl_loss_t{i}": 1.0 + (1 + 0.4 * i) * falls for i in range(teachers)}
    mass = {f"chunk_mass_t{i}": 0.97 - 0.1 * i + 0.01 * math.sin(step / 7) for i in range(teachers)}
    agree = {f"proj_accuracy_t{i}": 0.6 - 0.15 * i - 0.3 * falls for i in range(teachers)}
    kl, ce = sum(each.values()), 2.0 + 2 * falls
    loss = {"loss": kl + ce, "kl_loss": kl, "ce_loss": ce, "accuracy": 0.5 - 0.3 * falls, "kl_loss_scale": 1.0}
    return {"step": step, **loss, **each, **mass, **agree, "grad_norm": 1.0 + falls, "tokens_per_second": 30_000.0}


def read_line(step: int, teachers: int) -> dict[str, float]:
    """Return a synthetic line of `eval.jsonl`."""
    return {"step": step, "bits_per_byte": 1 + math.exp(-step / 80), "next_token_accuracy": 0.4, "loss": 2.0}


def serve(place: Path, assets: TinyAssets, *arguments: str) -> Iterator[Plane]:
    data = assets.student.parent
    text, held_out, tasks = data / "train.jsonl", data / "held-out.jsonl", data / "words.jsonl"
    if not text.exists():
        write_jsonl(text, documents(RECORDS, seed=2))
        write_jsonl(held_out, documents(20, seed=3))
        tasks.write_text("".join(f'{{"prompt": "def {name}", "answer": ["(", "="]}}\n' for name in "abcdef"))
    log = place / "control.log"
    command = [sys.executable, "-m", "xtoken_services.cli", "control", "--port", "0", "--runs-dir", str(place / "runs")]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--root", str(data), "--on-exit", "stop", *arguments], stdout=output, stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(r"http://\S+:\d+", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        token = "" if "--token-file" in arguments else control_token_file().read_text().strip()
        yield Plane(found[0], assets, text, held_out, tasks, place / "runs", token)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    if not CHROMIUM:
        pytest.skip("needs a Chromium: install one, or set CHROMIUM")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.png"):
        with contextlib.suppress(FileNotFoundError):  # another process of these tests removes them too
            if old.stat().st_mtime < STARTED:
                old.unlink()
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, plane: Plane) -> Iterator[Callable]:  # type: ignore[no-untyped-def]
    """Return a function that opens a page; checks at the end that no errors were logged and no other host was used."""
    contexts, said, elsewhere = [], [], []

    def make(path: str = "/", *, at: Plane = plane, width: int = 1280, colours: str = "light"):  # type: ignore[no-untyped-def]
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=colours, base_url=at.url, locale="en-GB"
        )
        contexts.append(context)
        if at.token:  # a session, as users have: Chromium's downloads carry its cookie, and no other header
            context.request.post("/login", form={"token": at.token})
        context.set_default_timeout(DEADLINE_MS)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: None if request.url.startswith(at.url) else elsewhere.append(request.url))
        page.goto(path)
        return page

    yield make
    for context in contexts:
        context.close()
    assert said == []
    assert elsewhere == [], "requests to other hosts"


def picture(page, name: str) -> None:  # type: ignore[no-untyped-def]
    """Take a screenshot of the whole page, in a window as tall as the page because of sticky elements."""
    seen = page.viewport_size
    tall = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": seen["width"], "height": max(seen["height"], tall)})
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
    page.set_viewport_size(seen)
