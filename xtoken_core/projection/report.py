"""Reports on a projection: coverage, kinds of rows, samples."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from xtoken_core.alignment.tables import SPECIAL, TEXT, UNKNOWN, TokenTable
from xtoken_core.errors import InputError
from xtoken_core.projection.exact_map import exact_token_map
from xtoken_core.projection.files import TopKProjection

CRITICAL_SHARE = 0.5
"""A critical category of which more than this fraction is uncommon is warned about."""


@dataclass(frozen=True)
class ProjectionReport:
    """Contents of a projection.

    Attributes:
        rows: Student tokens.
        top_k: Slots of a row.
        exact: Rows with one teacher token of weight 1.
        spread: Rows with several.
        empty: Rows without any.
        padding: How many of them are beyond the student's vocabulary: rows of a head that is wider than it.
        teacher_covered: Teacher ids that some row names.
        common_strict: Pairs of the strict exact-token map, specials among them.
        common_relaxed: Pairs of the relaxed one.
        categories: Per category of tokens: how many student tokens it has and how many of them are uncommon.
        warnings: What a user should know before training, with the loss mode that it suggests.
        samples: By kind of row, a few: (student token, [(teacher token, weight), …]).
    """

    rows: int
    top_k: int
    exact: int
    spread: int
    empty: int
    padding: int
    teacher_covered: int
    common_strict: int
    common_relaxed: int
    categories: Mapping[str, tuple[int, int]]
    warnings: tuple[str, ...]
    samples: Mapping[str, list[tuple[str, list[tuple[str, float]]]]]


def inspect_projection(
    projection: TopKProjection, student: TokenTable, teacher: TokenTable, *, samples: int = 5
) -> ProjectionReport:
    """Summarise a projection.

    Args:
        projection: The rows.
        student: The student's tokens.
        teacher: The teacher's.
        samples: Rows shown of each kind.

    Raises:
        InputError: The projection names ids that a tokenizer does not have.
    """
    indices, weights = projection.indices, projection.likelihoods
    V_t = len(teacher)
    if len(indices) < len(student) or int(indices.max()) >= V_t:
        raise InputError(
            f"the projection has {len(indices)} rows and teacher ids up to {int(indices.max())}, the tokenizers have "
            f"{len(student)} and {V_t} ids: they do not belong together"
        )
    filled = ((indices >= 0) & (weights > 0)).sum(dim=1)
    kinds = {"exact": filled == 1, "spread": filled > 1, "empty": filled == 0}
    strict, relaxed = (exact_token_map(indices, weights, relaxed=r, teacher_vocab_size=V_t) for r in (False, True))
    categories = _categories(student, strict["common_student"])
    return ProjectionReport(
        rows=len(indices),
        top_k=indices.shape[1],
        exact=int(kinds["exact"].sum()),
        spread=int(kinds["spread"].sum()),
        empty=int(kinds["empty"].sum()),
        padding=int(kinds["empty"][len(student) :].sum()),
        teacher_covered=int((torch.bincount(indices[(indices >= 0) & (weights > 0)]) > 0).sum()),
        common_strict=strict["common_student"].numel(),
        common_relaxed=relaxed["common_student"].numel(),
        categories=categories,
        warnings=_warnings(categories),
        samples={
            name: _samples(projection, student, teacher, chosen[: len(student)], samples)
            for name, chosen in _shown(kinds, student).items()
        },
    )


def category(piece: bytes) -> str:
    """Return the category of text that a token spells, as a user looks for them among uncommon tokens."""
    text = piece.decode("utf-8", "replace").strip()
    if "�" in text:
        return "partial characters"
    if not text:
        return "whitespace"
    if text.isdigit():
        return "multi-digit numbers" if len(text) > 1 else "digits"
    if all(unicodedata.category(char)[0] in "PS" for char in text):
        return "punctuation"
    if text.isascii():
        return "latin words" if text.isalpha() else "mixed"
    return "other scripts"


def _categories(student: TokenTable, common: torch.Tensor) -> dict[str, tuple[int, int]]:
    shared = set(common.tolist())
    counts: dict[str, list[int]] = {}
    for index, (piece, kind) in enumerate(zip(student.pieces, student.kinds.tolist(), strict=True)):
        if kind == TEXT and not piece:
            continue
        name = category(piece) if kind == TEXT else "specials"
        entry = counts.setdefault(name, [0, 0])
        entry[0] += 1
        entry[1] += index not in shared
    return {name: (total, uncommon) for name, (total, uncommon) in sorted(counts.items())}


def _warnings(categories: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    critical = ("digits", "multi-digit numbers", "whitespace", "punctuation")
    warnings = []
    for name in critical:
        total, uncommon = categories.get(name, (0, 0))
        if total and uncommon / total > CRITICAL_SHARE:
            warnings.append(
                f"{uncommon} of {total} student tokens of the category {name} have no exact counterpart: "
                'gold and H-KL compare them by sorted probabilities only; chain (loss.mode = "chain") suits better, or '
                "P-KL where `xtoken align check --projection FILE --mass` finds little unreachable mass"
            )
    return tuple(warnings)


def _shown(kinds: Mapping[str, torch.Tensor], student: TokenTable) -> dict[str, torch.Tensor]:
    """Return the kinds of rows that are shown by examples."""
    size = len(student)
    numeral = torch.tensor([piece.strip().isdigit() for piece in student.pieces])
    special = torch.from_numpy(student.kinds == SPECIAL)
    text = torch.from_numpy(student.pool.lengths > 0)
    rows = {f"{name} rows": mask[:size] & text for name, mask in kinds.items()}
    rows["empty rows"] = kinds["empty"][:size]  # those of specials too: they are few, and each is worth a look
    return rows | {"numerals": numeral, "specials": special}


def _samples(
    projection: TopKProjection, student: TokenTable, teacher: TokenTable, chosen: torch.Tensor, count: int
) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return rows spread evenly over the chosen ones."""
    ids = chosen.nonzero().squeeze(1)
    picked = ids[torch.linspace(0, len(ids) - 1, min(count, len(ids))).long()].tolist() if len(ids) else []
    rows = []
    for index in picked:
        entries = zip(projection.indices[index].tolist(), projection.likelihoods[index].tolist(), strict=True)
        named = [(_name(teacher, t), w) for t, w in entries if t >= 0 and w > 0]
        rows.append((_name(student, index), named))
    return rows


def _name(table: TokenTable, index: int) -> str:
    none = f"(the unknown token, id {index})" if table.kinds[index] == UNKNOWN else f"(no text, id {index})"
    return table.shown(index) or none


def as_json(report: ProjectionReport) -> dict[str, Any]:
    """Return the report as plain values."""
    return asdict(report) | {
        "categories": {name: {"tokens": t, "uncommon": u} for name, (t, u) in report.categories.items()},
        "samples": {
            kind: [{"student": name, "teacher": dict(row)} for name, row in rows]
            for kind, rows in report.samples.items()
        },
    }
