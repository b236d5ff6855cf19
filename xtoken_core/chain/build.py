"""Build the chain tables of a pair of tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xtoken_core.alignment.special_tokens import SpecialTokens, with_special_tokens
from xtoken_core.alignment.tables import TEXT, TokenTable, token_table
from xtoken_core.alignment.token_arrays import BOS, BOS_OR_EOS, EOS, UNKNOWN_ROLE, build_token_arrays
from xtoken_core.chain.files import read_tables, write_tables
from xtoken_core.chain.live_sets import LiveSets, everything_live, live_sets
from xtoken_core.chain.models import bpe_model, is_unigram
from xtoken_core.chain.paths import PieceTrie, build_piece_trie
from xtoken_core.chain.roots import Roots, find_roots, special_pairs
from xtoken_core.chain.spelling import REASONS, Spellings, compared_pieces, spellings, word_start_texts
from xtoken_core.chain.tables import ChainTables, LiveTable, SideTable
from xtoken_core.errors import InputError
from xtoken_core.projection.fingerprint import tokenizer_fingerprint
from xtoken_core.projection.pair_cache import PairCache
from xtoken_core.projection.retokenize import Retokenizer


@dataclass(frozen=True)
class BuiltSide:
    """One side's part of the tables.

    Attributes:
        spelled: Its tokens' spellings by the other side.
        paths: The nodes of its tokens.
        live: Which of its tokens may follow a token of the other side.
    """

    spelled: Spellings
    paths: PieceTrie
    live: LiveSets


@dataclass(frozen=True)
class BuiltTables:
    """Everything static about a pair of tokenizers.

    Attributes:
        roots: The classes of both sides' tokens.
        student: The student's part.
        teacher: The teacher's part.
        fingerprints: Those of the student's and the teacher's tokenizer.
    """

    roots: Roots
    student: BuiltSide
    teacher: BuiltSide
    fingerprints: tuple[str, str]


PARTS = {"tables": 0.11, "writers": 0.31, "spellings": 0.46, "classes": 0.49, "student": 0.92, "teacher": 1.0}
"""Part of the time after which each part is built, for a student's 49,152 tokens and a teacher's 262,145."""


def build_tables(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    special_tokens: SpecialTokens | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> BuiltTables:
    """Spell both vocabularies with each other's tokenizer and derive classes, paths and live sets.

    Args:
        student_tokenizer: Hugging Face fast or slow, or mistral-common's.
        teacher_tokenizer: Likewise.
        special_tokens: Special tokens of the student and their partners, as the aligner takes them.
        progress: Called with the part (0 to 1) that is done.

    Raises:
        ConfigError: `special_tokens` names a token that is not special.
        InputError: The two have no token in common; the text names one and the reason.
    """
    tokenizers = (student_tokenizer, teacher_tokenizer)
    fingerprints = tokenizer_fingerprint(student_tokenizer), tokenizer_fingerprint(teacher_tokenizer)
    tables: tuple[TokenTable, TokenTable] = with_special_tokens(
        token_table(student_tokenizer), token_table(teacher_tokenizer), special_tokens or {}
    )
    progress(PARTS["tables"])
    drops = any(table.drops_whitespace for table in tables)
    # By both normalisers, so that tokens that differ in case or accents only count as one text.
    compared = [compared_pieces(table, [each.normalizer for each in tables], drops) for table in tables]
    writers = [Retokenizer(tokenizer, table) for tokenizer, table in zip(tokenizers, tables, strict=True)]
    progress(PARTS["writers"])
    texts = [word_start_texts(tokenizer, table) for tokenizer, table in zip(tokenizers, tables, strict=True)]
    spelled = [spellings(tables[k], texts[k], compared[k], writers[1 - k], compared[1 - k]) for k in (0, 1)]
    progress(PARTS["spellings"])
    arrays = build_token_arrays(tables[0], tables[1], compared[0], compared[1])
    # Unknown tokens have no role to pair by; the absent token at the end is no token at all.
    roles = [np.where(side.role == UNKNOWN_ROLE, 0, side.role)[:-1] for side in (arrays.student, arrays.teacher)]
    specials = special_pairs(roles[0], roles[1], both=BOS_OR_EOS, end=EOS, begin=BOS)
    roots = find_roots(spelled[0], spelled[1], specials)
    if not roots.common:
        raise InputError(_no_common_token(tables[0], spelled[0]))
    progress(PARTS["classes"])
    sides = []
    for k, other_roots in ((0, roots.teacher), (1, roots.student)):
        spaces = np.flatnonzero([text == b" " for text in compared[1 - k]])
        paths = build_piece_trie(spelled[k], other_roots, spaces, end_terms=not is_unigram(tokenizers[k]))
        if fingerprints[0] == fingerprints[1]:  # the other side's cuts are this side's own
            live = everything_live(len(tables[1 - k]), len(tables[k]))
        else:
            model = bpe_model(tokenizers[1 - k], writers[1 - k])
            live = live_sets(model, writers[1 - k], texts[k], spelled[k])
        sides.append(BuiltSide(spelled[k], paths, live))
        progress(PARTS["student" if k == 0 else "teacher"])
    return BuiltTables(roots, sides[0], sides[1], fingerprints)


def as_tensors(built: BuiltTables) -> ChainTables:
    """Return the built arrays as tensors on the CPU, which share their memory where the types are equal."""
    student = _side(built.student, built.roots.student)
    return ChainTables(student, _side(built.teacher, built.roots.teacher), built.roots.count, built.roots.common)


def cached_tables(
    student_tokenizer: Any,
    teacher_tokenizer: Any,
    directory: Path | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> ChainTables:
    """Read the tables of two tokenizers, and build and write them first if there are none.

    A file of another version, of another pair or a damaged one is built again, and the log says so.

    Args:
        student_tokenizer: A tokenizer, see `build_tables`.
        teacher_tokenizer: Likewise.
        directory: Where the files are; None: the user's cache.
        special_tokens: Special tokens of the student and their partners, as for `build_tables`.

    Raises:
        OutputError: The file cannot be written.
    """
    prints = tokenizer_fingerprint(student_tokenizer), tokenizer_fingerprint(teacher_tokenizer)
    cache = PairCache(directory)

    def write(path: Path) -> None:
        built = build_tables(student_tokenizer, teacher_tokenizer, special_tokens)
        write_tables(as_tensors(built), path, prints, special_tokens)

    return read_tables(cache.file("chain", prints, write, special_tokens))


def _side(built: BuiltSide, roots: np.ndarray) -> SideTable:
    live = {field.name: _tensor(getattr(built.live, field.name)) for field in fields(LiveTable)}
    nodes = {field.name: _tensor(getattr(built.paths, field.name)) for field in fields(built.paths)}
    return SideTable(
        root=_narrow(roots),
        spelling_start=_narrow(built.spelled.start),
        piece=_narrow(built.spelled.piece),
        status=torch.from_numpy(built.spelled.status),
        live=LiveTable(**live),
        **nodes,
    )


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _narrow(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _no_common_token(student: TokenTable, spelled: Spellings) -> str:
    """Return the message for a pair without common tokens, with the first token of text and its reason."""
    text = np.flatnonzero(np.asarray(student.kinds) == TEXT)
    example = "the student's tokenizer has no token of text"
    if len(text):
        token = int(text[0])
        piece = student.pieces[token].decode("utf-8", "backslashreplace")
        example = f"token {token} of the student ({piece!r}): {REASONS[int(spelled.status[token])]}"
    return f"the two tokenizers have no token in common, so that nothing can be compared; {example}"
