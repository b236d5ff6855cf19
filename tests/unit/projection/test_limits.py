"""Limits and edges of building, reading and writing projections."""

import struct
import zipfile
from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import vocabularies as v
from tests.support.alignments import table_of
from xtoken_core.alignment.tables import token_table
from xtoken_core.projection.build import (
    ROW_LIMIT,
    BuildOptions,
    _reference_last_slot,
    build_projection,
    similarity,
    special_entries,
)
from xtoken_core.projection.files import TopKProjection, check_entries, parse_projection_file
from xtoken_core.projection.fingerprint import ProjectionFileError, _digest, is_sparse
from xtoken_core.projection.report import inspect_projection
from xtoken_core.projection.retokenize import Retokenizer, _without_prepend
from xtoken_core.projection.stored_tensors import safetensors_bytes
from xtoken_core.user_cache import user_cache


def test_rows_of_the_limit_are_built():
    tokenizers = v.byte_level(300), v.byte_level(280)
    assert build_projection(*tokenizers, BuildOptions(top_k=ROW_LIMIT)).indices.shape[1] == ROW_LIMIT


def test_the_last_slot_of_the_reference_takes_the_lowest_free_id():
    indices = np.full((3, 4), -1, dtype=np.int64)
    weights = np.zeros((3, 4))
    indices[0, :2], weights[0, :2] = (0, 1), (0.5, 0.5)
    indices[1], weights[1] = (5, 3, 2, 0), 0.25
    indices, weights = _reference_last_slot(indices, weights)
    assert indices[:, -1].tolist() == [2, 0, -1]
    assert weights[0, -1] == pytest.approx(0.2 / 1.2) and not weights[2].any()


def test_a_row_of_31_leaves_the_last_slot_to_the_32nd_id():
    indices = np.append(np.arange(ROW_LIMIT - 1), -1)[None]
    weights = np.append(np.ones(ROW_LIMIT - 1), 0.0)[None]
    assert _reference_last_slot(indices, weights)[0][0].tolist() == list(range(ROW_LIMIT))


@pytest.mark.parametrize(("lowest", "refused"), [(-1, False), (-2, True)])
def test_teacher_ids_begin_at_the_empty_slots_sign(lowest, refused):
    def check():
        check_entries("p.pt", torch.tensor([lowest, 3]), torch.ones(2))

    if refused:
        with pytest.raises(ProjectionFileError, match="teacher ids must be from -1"):
            check()
    else:
        check()


def test_an_archive_without_a_pickle_is_not_sparse(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "p.pt", "w") as archive:
        archive.writestr("p/other", b"")
    assert not is_sparse(tmp_path / "p.pt")


def test_the_users_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere/xtoken")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache() == Path("/home/user/.cache/xtoken")


def test_only_added_spaces_are_taken_from_a_normalizer():
    prepend, form = {"type": "Prepend", "prepend": "_"}, {"type": "NFC"}
    assert _without_prepend(prepend) is None and _without_prepend(None) is None
    assert _without_prepend(form) == form
    both = {"type": "Sequence", "normalizers": [prepend, form]}
    assert _without_prepend(both) == {"type": "Sequence", "normalizers": [form]}


def test_long_names_are_compared_letter_by_letter():
    name = "tool " * 60
    assert similarity(name, name) == 1.0


def test_the_most_similar_special_is_kept_among_many():
    theirs = {0: b"<tool_call>"} | {n: f"<tool_call_{n:02}>".encode() for n in range(1, ROW_LIMIT + 8)}
    _, teachers, weights = special_entries({7: b"<tool_call>"}, theirs)
    assert len(teachers) == ROW_LIMIT
    assert weights[teachers == 0] == pytest.approx(0.8)


@pytest.mark.parametrize("note", ["", "1", "12345"])
def test_a_files_header_ends_at_a_multiple_of_eight(note: str):
    data = safetensors_bytes({"x": torch.arange(3)}, {"note": note})
    (size,) = struct.unpack("<Q", data[:8])
    assert size % 8 == 0 and data[8 + size :] == torch.arange(3).numpy().tobytes()


def test_the_largest_student_id():
    def check(student: int) -> None:
        check_entries("p.pt", torch.tensor([0]), torch.ones(1), students=torch.tensor([student]))

    check((1 << 26) - 1)
    with pytest.raises(ProjectionFileError, match="student ids must be from 0 to 67108863"):
        check(1 << 26)


def test_teacher_ids_below_the_empty_sign_make_no_column(tmp_path: Path):
    torch.save({(0, -5): 1.0}, tmp_path / "p.pt")
    assert parse_projection_file(tmp_path / "p.pt")[3] == 0


def test_a_digest_depends_on_names_and_contents():
    digests = {_digest([part]) for part in (("a", b"1"), ("a", b"2"), ("b", b"1"))}
    assert len(digests) == 3


def test_texts_that_a_teacher_cannot_write_have_no_pieces():
    tokenizer = v.characters()
    ids, counts = Retokenizer(tokenizer, token_table(tokenizer))([b"a", "\u1e9e\u4dff".encode(), b"b"])
    assert counts.tolist() == [1, 0, 1] and len(ids) == 2


def test_the_best_special_is_kept_among_equal_bounds():
    names = [f"<{''.join(p)}>" for p in islice(permutations("12345678"), 41)]
    _, teachers, weights = special_entries({0: b"<12345678>"}, dict(enumerate(name.encode() for name in names)))
    assert len(teachers) == 32 and dict(zip(teachers.tolist(), weights.tolist(), strict=True))[0] == max(weights)
    assert sorted(weights, reverse=True)[0] == pytest.approx(0.8 * 0.6)


def test_weights_of_zero_are_no_entries():
    table = table_of([b"a", b"b", b"", b"c"])
    projection = TopKProjection(
        torch.tensor([[0, 1], [1, 0], [-1, -1], [3, -1]]),
        torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),
    )
    report = inspect_projection(projection, table, table)
    assert (report.exact, report.spread, report.empty) == (2, 0, 2)
    assert report.categories["latin words"][0] == 3
    assert dict(report.samples["exact rows"]) == {"a": [("a", 1.0)], "c": [("c", 1.0)]}
    assert report.samples["specials"] == []
