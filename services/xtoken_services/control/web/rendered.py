"""Rendered pages that many readers have open: rendered once for all of them, and again when the database changes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from xtoken_services.control.metric_log import POLL_S
from xtoken_services.control.store import Store

KEPT_S = POLL_S
"""Longest use of a page: values from metric files are not newer than that either."""
KEPT_PAGES = 64


@dataclass
class _Page:
    """Body of a page, the version of the database it shows, and when it was rendered (monotonic clock)."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    body: bytes = b""
    version: int = -1
    at: float = 0.0


class RenderedPages:
    """Cache of pages by key; holds the most recently used.

    Args:
        store: The database that the pages show.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pages: OrderedDict[Hashable, _Page] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, render: Callable[[], bytes]) -> bytes:
        """Return the body of a page, rendered now or by another call lately; concurrent calls render it once."""
        with self._lock:
            page = self._pages.setdefault(key, _Page())
            self._pages.move_to_end(key)
            while len(self._pages) > KEPT_PAGES:
                self._pages.popitem(last=False)
        with page.lock:
            version = self._store.version
            if page.version != version or time.monotonic() - page.at > KEPT_S:
                page.body, page.version, page.at = render(), version, time.monotonic()
            return page.body
