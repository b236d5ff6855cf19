"""A control plane of its own process, a Chromium that reaches nothing else, and pictures of what was seen."""

from __future__ import annotations

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = sorted(PICTURES.glob("*.png"))
    if found:
        terminalreporter.write_line(f"{len(found)} pictures of the page are in {PICTURES}")


@dataclass(frozen=True)
class Plane:
    """A control plane, and what its runs may read."""

    url: str
    assets: TinyAssets
    text: Path
    held_out: Path
    runs: Path


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


def serve(place: Path, assets: TinyAssets, *arguments: str) -> Iterator[Plane]:
    data = assets.student.parent
    text, held_out = data / "train.jsonl", data / "held-out.jsonl"
    if not text.exists():
        write_jsonl(text, documents(RECORDS, seed=2))
        write_jsonl(held_out, documents(20, seed=3))
    log = place / "control.log"
    command = [sys.executable, "-m", "services.cli", "control", "--port", "0", "--runs-dir", str(place / "runs")]
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
        yield Plane(found[0], assets, text, held_out, place / "runs")
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
    if not CHROMIUM:
        pytest.skip("needs a Chromium: install one, or name it by CHROMIUM")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for old in PICTURES.glob("*.png"):
        old.unlink()
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, plane: Plane) -> Iterator[Callable]:  # type: ignore[no-untyped-def]
    """Opens a page of a control plane; at the end no error may have come up, and nothing else been asked for."""
    contexts, said, elsewhere = [], [], []

    def make(path: str = "/", *, at: Plane = plane, width: int = 1280, colours: str = "light"):  # type: ignore[no-untyped-def]
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=colours, base_url=at.url, locale="en-GB"
        )
        contexts.append(context)
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
    assert elsewhere == [], "the page needs something from elsewhere"


def picture(page, name: str) -> None:  # type: ignore[no-untyped-def]
    """Keep what the whole page looks like, in a window that is as tall: what sticks to an edge is at the page's."""
    seen = page.viewport_size
    tall = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": seen["width"], "height": max(seen["height"], tall)})
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
    page.set_viewport_size(seen)
