"""The order in which a build reads its text: what its store holds first, so that it resumes behind that."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from xtoken_core.config.resolved import ResolvedRun
from xtoken_services.common.text.run_order import record_of

MOST_SPANS = 1 << 14
"""Most gaps of a store that stay apart: the order is a part of the document that the queue hands to every worker."""

Span = tuple[int, int]
"""Positions from the first number to before the second."""


def stored_first(run: ResolvedRun, missing: Collection[int]) -> ResolvedRun:
    """Return a build that reads the stored records first and only the missing ones after them.

    The missing ones begin a step, so that none of the stored ones is computed again: those that would fill this step up
    are left out. Of a store with more than `MOST_SPANS` gaps, the records between the closest gaps are computed too,
    which a writer does not store again.

    Args:
        run: The build, in the order of its text.
        missing: Records that its store lacks.
    """
    wanted = missing if isinstance(missing, (set, frozenset, dict)) else set(missing)
    lacks = np.fromiter((record_of(run, position) in wanted for position in range(run.positions)), bool, run.positions)
    gaps = _gaps(lacks)
    if not gaps:
        return run
    ends = [0, *itertools.chain.from_iterable(gaps), run.positions]
    stored = list(zip(ends[::2], ends[1::2], strict=True))
    count = sum(stop - start for start, stop in stored)
    kept = _first(stored, count - count % run.spec.train.samples_per_step)
    positions = run.positions - count % run.spec.train.samples_per_step
    return run.model_copy(update={"positions": positions, "order": _order([*kept, *gaps])})


def _gaps(lacks: np.ndarray) -> list[Span]:
    """Return the spans of positions whose records are missing, at most `MOST_SPANS`."""
    edges = np.flatnonzero(np.diff(lacks.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    if len(edges) > MOST_SPANS:
        between = edges[1:, 0] - edges[:-1, 1]
        kept = np.sort(np.argpartition(between, -(MOST_SPANS - 1))[-(MOST_SPANS - 1) :])
        starts, stops = np.append(0, kept + 1), np.append(kept, len(edges) - 1)
        edges = np.stack([edges[starts, 0], edges[stops, 1]], axis=1)
    return [(start, stop) for start, stop in edges.tolist()]


def _first(spans: Iterable[Span], count: int) -> list[Span]:
    """Return the first positions of some spans, as many as are asked for."""
    kept: list[Span] = []
    for start, stop in spans:
        stop = min(stop, start + count)
        kept.append((start, stop))
        count -= stop - start
    return kept


def _order(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return spans in this order as `ResolvedRun.order`; empty for one that changes nothing."""
    order: list[Span] = []
    at = 0
    for start, stop in spans:
        if stop > start and (not order or start - at != order[-1][1] - order[-1][0]):
            order.append((at, start))
        at += stop - start
    return () if order == [(0, 0)] else tuple(order)
