"""Pages that are rendered once for many readers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from xtoken_services.control.store import Store
from xtoken_services.control.web import rendered
from xtoken_services.control.web.rendered import RenderedPages


def test_pages_are_rendered_again_after_a_change_and_after_a_while() -> None:
    store = Store(None)
    pages, calls = RenderedPages(store), []

    def render() -> bytes:
        calls.append(threading.get_ident())
        time.sleep(0.02)
        return f"{len(calls)}".encode()

    with ThreadPoolExecutor(8) as threads:
        bodies = list(threads.map(lambda _: pages.get("list", render), range(16)))
    assert bodies == [b"1"] * 16 and len(calls) == 1
    store.change("no-run", step=1)
    assert pages.get("list", render) == b"2"
    assert pages.get("other", render) == b"3"
    time.sleep(rendered.KEPT_S + 0.05)
    assert pages.get("list", render) == b"4"
    for number in range(rendered.KEPT_PAGES):
        pages.get(number, lambda: b"")
    assert pages.get("list", render) == b"5"
    store.close()
