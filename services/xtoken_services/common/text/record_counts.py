"""Counts of what a run would make of a text's records."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from xtoken_core import schema
from xtoken_core.collate import CrossTokenizerCollator
from xtoken_core.dataset import BadRecord, DataIndex, Record

BATCH = 64
_PARTICULARS = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
"""What differs between two reasons of one kind."""


def count_records(
    index: DataIndex, collator: CrossTokenizerCollator | None, progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Read every record of a file, and count.

    Args:
        index: The file's.
        collator: Tokenizes and aligns the records, as in a run; None: they are only read.
        progress: Called with the records read so far and in all.

    Returns:
        The numbers of `records`, `used` and `cut` ones and where the first one is cut; the `form` of the first
        conversation, if it was made into messages; and as `skipped` for each kind of reason its `records`, where the
        `first` is, and the `reason` there.
    """
    found = {"records": len(index), "form": next((form for _, form in index.conversations()), None)}
    used, cuts = 0, []
    skipped: dict[str, dict[str, Any]] = {}

    def skip(location: str, reason: str) -> None:
        new = {"records": 0, "first": location, "reason": reason}
        skipped.setdefault(_PARTICULARS.sub("", reason), new)["records"] += 1

    for begin in range(0, len(index), BATCH):
        records = index.read(range(begin, min(begin + BATCH, len(index))))
        readable = [record for record in records if isinstance(record, Record)]
        rows = collator.rows([record.value for record in readable]) if collator else None
        refused = {readable[at].number: reason for at, reason in rows.refused.items()} if rows else {}
        for record in records:
            if isinstance(record, BadRecord):
                skip(record.location, record.reason)
            elif record.number in refused:
                skip(index.location(record.number), refused[record.number])
            else:
                used += 1
        if rows and rows.records:
            flags = zip(rows.records, rows.columns[schema.TRUNCATED.name].values.cast("?"), strict=True)
            cuts += [readable[at].number for at, is_cut in flags if is_cut]
        progress(begin + len(records), len(index))
    first = index.location(cuts[0]) if cuts else None
    return {**found, "used": used, "cut": len(cuts), "first_cut": first, "skipped": list(skipped.values())}
