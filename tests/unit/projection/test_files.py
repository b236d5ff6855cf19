"""Projection files of every format, read, cached, refused.

Limits and edges of building, reading and writing projections.
"""

import os
import pickle
import struct
import zipfile
from contextlib import nullcontext
from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import vocabularies as v
from tests.support.alignments import table_of
from tests.support.cases import cases
from xtoken_core import projection as p
from xtoken_core.alignment.tables import token_table
from xtoken_core.errors import InputError, XtokenError
from xtoken_core.projection.build import (
    ROW_LIMIT,
    BuildOptions,
    _reference_last_slot,
    build_projection,
    similarity,
    special_entries,
)
from xtoken_core.projection.files import TopKProjection, check_entries, read_topk
from xtoken_core.projection.fingerprint import ProjectionFileError, _digest, is_sparse
from xtoken_core.projection.report import inspect_projection
from xtoken_core.projection.retokenize import Retokenizer, _without_prepend
from xtoken_core.projection.stored_tensors import safetensors_bytes
from xtoken_core.user_cache import user_cache
from xtoken_services.common.tables.pair_files import check_projection_pair

CPU = torch.device("cpu")


@pytest.fixture
def built():
    indices = torch.tensor([[5, -1], [2, 7], [-1, -1]])
    return p.TopKProjection(
        indices, torch.tensor([[1.0, 0.0], [0.75, 0.25], [0.0, 0.0]]), "s" * 64, "t" * 64, {"k": "v"}
    )


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_dense_files_come_back(built, tmp_path, suffix):
    path = tmp_path / f"p{suffix}"
    p.write_projection(built, path)
    indices, values, rows, columns = p.parse_projection_file(path)
    assert indices.tolist() == [[0, 0, 1, 1, 2, 2], [5, -1, 2, 7, -1, -1]]
    assert values.tolist() == [1.0, 0.0, 0.75, 0.25, 0.0, 0.0]
    assert (indices.dtype, values.dtype, rows, columns) == (torch.int64, torch.float32, 3, 8)
    again = read_topk(path)
    assert torch.equal(again.indices, built.indices)
    assert (again.student_fingerprint == "s" * 64) == (suffix == ".safetensors")
    assert again.about == ({"k": "v"} if suffix == ".safetensors" else {})
    assert [f.name for f in tmp_path.iterdir()] == [path.name]


@cases(
    "content, indices, values, rows, columns",
    (
        {"indices": torch.tensor([[3], [-1]], dtype=torch.int32), "likelihoods": torch.ones(2, 1).bfloat16()},
        [[0, 1], [3, -1]], [1.0, 1.0], 2, 4,
    ),
    ({(4, 9): 2, (0, 1): 0.5}, [[4, 0], [9, 1]], [2.0, 0.5], 5, 10),
    ({"indices": torch.full((2, 1), -1), "likelihoods": torch.zeros(2, 1)}, [[0, 1], [-1, -1]], [0.0, 0.0], 2, 0),
    ({(0, -5): 1.0}, [[0], [-5]], [1.0], 1, 0),
    ids=["dense", "sparse", "no teacher ids", "below the empty sign"],
)  # fmt: skip
def test_the_public_files_are_read(tmp_path, content, indices, values, rows, columns):
    torch.save(content, tmp_path / "p.pt")
    found = p.parse_projection_file(tmp_path / "p.pt")
    assert (found[0].tolist(), found[1].tolist(), *found[2:]) == (indices, values, rows, columns)


def test_writing_twice_gives_the_same_bytes(built, tmp_path):
    contents = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        for name in ("p.pt", "p.safetensors"):
            p.write_projection(built, tmp_path / place / name)
            contents.append((tmp_path / place / name).read_bytes())
    assert contents[:2] == contents[2:]


def test_safetensors_itself_reads_our_file(built, tmp_path):
    from safetensors.torch import load_file

    p.write_projection(built, tmp_path / "p.safetensors", bfloat16=True)
    tensors = load_file(tmp_path / "p.safetensors")
    assert torch.equal(tensors["indices"], built.indices)
    assert tensors["likelihoods"].dtype == torch.bfloat16


class Payload:
    def __reduce__(self):
        return os.system, ("touch /tmp/xtoken-must-not-exist",)


WHOLE, NARROW, META = (torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), torch.ones(1, 1, device="meta"))
SAVED = {
    "code": {"indices": Payload(), "likelihoods": 1},
    "wide": {"indices": WHOLE.expand(1 << 20, 1 << 12), "likelihoods": NARROW.expand(1 << 20, 1 << 12)},
    "meta": {"indices": META.long(), "likelihoods": META},
    "shape": {"indices": torch.zeros(3, 2, dtype=torch.long), "likelihoods": torch.zeros(2, 2)},
    "nan": {"indices": WHOLE, "likelihoods": NARROW * torch.nan},
    "ids": {"indices": WHOLE + 2**40, "likelihoods": NARROW},
    "sparse ids": {(-1, 0): 1.0},
    "sparse values": {(0, 0): "x"},
    "list": [1, 2],
}
WRITTEN = {
    "pickle": pickle.dumps({(0, 0): 1}),
    "garbage": bytes(range(256)),
    "empty": b"",
    "header": (2**62).to_bytes(8, "little") + b"{" + b"[" * 5000,
}


def hostile(kind, path, built):
    if kind in SAVED:
        torch.save(SAVED[kind], path)
    elif kind in WRITTEN:
        path.write_bytes(WRITTEN[kind])
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    else:
        whole = path.with_suffix(".safetensors") if kind == "safetensors" else path
        p.write_projection(built, whole)
        path.write_bytes(whole.read_bytes()[: 400 if kind == "cut" else -9])


@pytest.mark.parametrize("kind", [*SAVED, *WRITTEN, "zip", "cut", "safetensors"])
def test_a_hostile_or_damaged_file_is_refused_in_one_line(kind, built, tmp_path):
    path = tmp_path / "p.pt"
    hostile(kind, path, built)
    with pytest.raises(ValueError) as caught:
        p.get_sparse_projection_matrix(path, CPU, student_vocab_size=1, teacher_vocab_size=1)
    assert isinstance(caught.value, XtokenError)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not os.path.exists("/tmp/xtoken-must-not-exist")  # noqa: PTH110


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_the_parser_returns_entries_that_only_its_callers_refuse(form, tmp_path):
    path = tmp_path / "p.pt"
    dense = {"indices": torch.tensor([[-5], [1 << 40]]), "likelihoods": torch.tensor([[-1.0], [float("nan")]])}
    torch.save(dense if form == "dense" else {(0, -5): -1.0, (1, 1 << 40): float("nan")}, path)
    indices, values, rows, columns = p.parse_projection_file(path)
    assert (indices.tolist(), rows, columns) == ([[0, 1], [-5, 1 << 40]], 2, (1 << 40) + 1)
    assert values[0] == -1 and values[1].isnan()
    for read in (
        lambda: p.get_sparse_projection_matrix(path, CPU, student_vocab_size=1, teacher_vocab_size=1),
        lambda: p.get_topk_projection(path, CPU),
    ):
        with pytest.raises(ValueError, match=r"damaged|sparse"):
            read()


@cases(
    "read",
    p.parse_projection_file,
    lambda path: p.get_topk_projection(path, CPU),
    lambda path: p.get_sparse_projection_matrix(path, CPU, student_vocab_size=1, teacher_vocab_size=1),
    lambda path: p.build_exact_token_map(path, CPU, xtoken_loss=False, teacher_vocab_size=1),
)
def test_a_missing_file_is_a_file_not_found(read, tmp_path):
    with pytest.raises(FileNotFoundError, match="xtoken projection build") as caught:
        read(tmp_path / "none.pt")
    assert isinstance(caught.value, InputError)


def test_the_sparse_matrix_keeps_teacher_id_0(tmp_path):
    path = tmp_path / "p.pt"
    torch.save(
        {"indices": torch.tensor([[0, -1], [2, 0]]), "likelihoods": torch.tensor([[1.0, 0.0], [0.5, 0.5]])}, path
    )
    matrix = p.get_sparse_projection_matrix(path, CPU, student_vocab_size=2, teacher_vocab_size=3)
    assert matrix.to_dense().tolist() == [[1.0, 0.0, 0.0], [0.5, 0.0, 0.5]]


def test_the_sparse_form_is_recognized_without_unpickling(built, tmp_path):
    for name in ("dense.pt", "own.safetensors"):
        p.write_projection(built, tmp_path / name)
        assert not is_sparse(tmp_path / name)
    torch.save({(0, 1): 2.0}, tmp_path / "sparse.pt")
    assert is_sparse(tmp_path / "sparse.pt")
    with pytest.raises(InputError, match=r"cannot read the projection .*none\.pt"):
        is_sparse(tmp_path / "none.pt")


def test_the_sparse_matrix_drops_empty_slots_grows_and_is_cached(built, tmp_path):
    path = tmp_path / "p.pt"
    p.write_projection(built, path)
    matrix = p.get_sparse_projection_matrix(path, CPU, student_vocab_size=5, teacher_vocab_size=4)
    assert matrix.is_coalesced() and matrix.dtype == torch.float32 and matrix.shape == (5, 8)
    dense = torch.zeros(5, 8)
    dense[0, 5], dense[1, 2], dense[1, 7] = 1.0, 0.75, 0.25
    assert torch.equal(matrix.to_dense(), dense)
    assert p.get_sparse_projection_matrix(str(path), CPU, student_vocab_size=5, teacher_vocab_size=4) is matrix
    keys = [key for key in p._SPARSE_PROJECTION_CACHE if key[0] == str(path)]
    assert [key[:4] for key in keys] == [(str(path), CPU, 5, 4)]
    assert keys[0][4:] == (path.stat().st_size, path.stat().st_mtime_ns)


def test_a_file_built_anew_is_read_anew(built, tmp_path):
    path = tmp_path / "p.pt"
    p.write_projection(built, path)
    first = p.get_topk_projection(path, CPU)
    assert p.get_topk_projection(path, CPU) is first
    assert any(key[:2] == (str(path), CPU) for key in p._TOPK_PROJECTION_CACHE)
    p.write_projection(p.TopKProjection(built.indices[:1], built.likelihoods[:1]), path)
    assert len(p.get_topk_projection(path, CPU)[0]) == 1


def test_the_exact_token_map_is_cached_by_rule_and_width(tmp_path):
    path = tmp_path / "p.pt"
    indices = torch.tensor([[5, -1], [5, -1], [2, 3], [4, 1]])
    weights = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.7, 0.3], [0.5, 0.5]])
    p.write_projection(p.TopKProjection(indices, weights), path)
    strict = p.build_exact_token_map(path, CPU, xtoken_loss=False, teacher_vocab_size=7)
    assert {name: ids.tolist() for name, ids in strict.items()} == {
        "common_student": [0],
        "common_teacher": [5],
        "uncommon_student": [1, 2, 3],
        "uncommon_teacher": [0, 1, 2, 3, 4, 6],
    }
    relaxed = p.build_exact_token_map(path, CPU, xtoken_loss=True, teacher_vocab_size=7)
    assert relaxed["common_student"].tolist() == [0, 2]
    assert p.build_exact_token_map(path, CPU, xtoken_loss=True, teacher_vocab_size=7) is relaxed
    narrow = p.build_exact_token_map(path, CPU, xtoken_loss=True, teacher_vocab_size=5)
    assert narrow["common_teacher"].tolist() == [2]
    keys = [key[:4] for key in p._EXACT_TOKEN_MAP_CACHE if key[0] == str(path)]
    assert sorted(keys, key=str) == sorted(
        [(str(path), CPU, False, 7), (str(path), CPU, True, 7), (str(path), CPU, True, 5)], key=str
    )


def test_a_matrix_of_another_pair_is_refused(tmp_path):
    student, teacher, other = v.byte_level(), v.unigram(), v.byte_level(500)
    path = tmp_path / "p.safetensors"
    p.write_projection(p.build_projection(student, teacher), path)
    check_projection_pair(path, student, teacher)
    for wrong, name in (((other, teacher), "student"), ((student, other), "teacher")):
        with pytest.raises(InputError, match=f"built for another {name}'s tokenizer"):
            check_projection_pair(path, *wrong)
    for name, tokenizer in (("s", student), ("t", teacher)):
        tokenizer.save_pretrained(tmp_path / name)
    check_projection_pair(path, tmp_path / "s", tmp_path / "t")


def test_a_matrix_of_another_version_is_refused(built, tmp_path):
    p.write_projection(built, path := tmp_path / "old.safetensors")
    path.write_bytes(path.read_bytes().replace(b"xtoken-projection-3", b"xtoken-projection-2"))
    with pytest.raises(InputError, match=r"has the format xtoken-projection-2, this version reads .* build it again"):
        read_topk(path)


def test_a_disk_that_refuses_leaves_the_old_file(built, tmp_path):
    with pytest.raises(InputError, match="cannot write the projection"):
        p.write_projection(built, tmp_path / "missing" / "p.pt")


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


@cases(
    "teacher, student, refused",
    (-1, 0, ""),
    (-2, 0, "teacher ids must be from -1"),
    (0, (1 << 26) - 1, ""),
    (0, 1 << 26, "student ids must be from 0 to 67108863"),
)
def test_bounds_of_ids(teacher, student, refused):
    with pytest.raises(ProjectionFileError, match=refused) if refused else nullcontext():
        check_entries("p.pt", torch.tensor([teacher, 3]), torch.ones(2), students=torch.tensor([student, 0]))


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


@pytest.mark.parametrize("note", ["", "1", "12345"])
def test_a_files_header_ends_at_a_multiple_of_eight(note: str):
    data = safetensors_bytes({"x": torch.arange(3)}, {"note": note})
    (size,) = struct.unpack("<Q", data[:8])
    assert size % 8 == 0 and data[8 + size :] == torch.arange(3).numpy().tobytes()


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
