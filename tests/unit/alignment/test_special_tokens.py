"""Pairs of special tokens that are set by hand, in the aligner, the projection and the chain tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import vocabularies as v
from xtoken_core.alignment import TokenAligner
from xtoken_core.chain.build import build_tables, cached_tables
from xtoken_core.errors import ConfigError
from xtoken_core.projection import build_projection
from xtoken_core.projection.fingerprint import SPECIAL_TOKENS_KEY, projection_header
from xtoken_services.common.tables.build_pair_file import build_pair_file

PAIRS = {"<gh_stars>": "", "<user_turn>": "<speaker>"}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    student, teacher = v.byte_level(400), v.byte_level(280)
    student.add_special_tokens({"additional_special_tokens": ["<gh_stars>", "<user_turn>", "<both>"]})
    teacher.add_special_tokens({"additional_special_tokens": ["<|gh_stars|>", "<speaker>", "<user_turn>", "<both>"]})
    return student, teacher


def ids_of(tokenizer: Any, *names: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(name) for name in names]


def row_of(projection: Any, index: int) -> dict[int, float]:
    row = zip(projection.indices[index].tolist(), projection.likelihoods[index].tolist(), strict=True)
    return {token: weight for token, weight in row if weight}


def partners(aligner: TokenAligner, student: list[int], teacher: list[int]) -> list[tuple[int, int]]:
    """The pairs of tokens that are a chunk of one and one."""
    ids = torch.tensor([student]), torch.tensor([teacher])
    masks = [torch.ones_like(side) for side in ids]
    batch = aligner.align(*ids, student_attention_mask=masks[0], teacher_attention_mask=masks[1])
    ours, theirs = (chunk[0].tolist() for chunk in (batch.student_chunk_id, batch.teacher_chunk_id))
    return [(s, teacher[theirs.index(c)]) for s, c in zip(student, ours, strict=True) if c >= 0 and c in theirs]


def test_alignment(pair: tuple[Any, Any]) -> None:
    student, teacher = pair
    user, both = ids_of(student, "<user_turn>", "<both>")
    speaker, same_name, theirs = ids_of(teacher, "<speaker>", "<user_turn>", "<both>")
    by_name, by_hand = TokenAligner(*pair), TokenAligner(*pair, PAIRS)
    for aligner, wanted, other in ((by_name, same_name, speaker), (by_hand, speaker, same_name)):
        assert partners(aligner, [user, both], [wanted, theirs]) == [(user, wanted), (both, theirs)]
        assert partners(aligner, [user, both], [other, theirs]) == [(both, theirs)]


def test_projection(pair: tuple[Any, Any]) -> None:
    student, teacher = pair
    stars, user, both = ids_of(student, "<gh_stars>", "<user_turn>", "<both>")
    speaker, theirs = ids_of(teacher, "<speaker>", "<both>")
    alike, by_hand = build_projection(*pair), build_projection(*pair, special_tokens=PAIRS)
    assert row_of(alike, stars) and not row_of(by_hand, stars)
    assert row_of(by_hand, user) == {speaker: 1.0} and row_of(by_hand, both) == {theirs: 1.0}
    named = (by_hand.indices == speaker) & (by_hand.likelihoods > 0)
    assert named.any(dim=1).nonzero().flatten().tolist() == [user]
    changed = ((alike.indices != by_hand.indices) | (alike.likelihoods != by_hand.likelihoods)).any(dim=1)
    assert set(changed.nonzero().flatten().tolist()) <= set(student.all_special_ids)


def test_chain_tables(pair: tuple[Any, Any], tmp_path: Path) -> None:
    student, teacher = pair
    stars, user, both = ids_of(student, "<gh_stars>", "<user_turn>", "<both>")
    speaker, same_name, theirs = ids_of(teacher, "<speaker>", "<user_turn>", "<both>")
    roots = build_tables(*pair, PAIRS).roots
    assert roots.student[user] == roots.teacher[speaker] < roots.count
    assert roots.student[both] == roots.teacher[theirs] < roots.count
    assert roots.student[stars] == roots.teacher[same_name] == roots.count
    plain, by_hand = cached_tables(*pair, tmp_path), cached_tables(*pair, tmp_path, PAIRS)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2
    assert plain.student.root[user] == plain.teacher.root[same_name]
    assert np.array_equal(by_hand.student.root.numpy(), roots.student)


def test_a_file_names_its_pairs(pair: tuple[Any, Any], tmp_path: Path) -> None:
    for name, tokenizer in zip(("student", "teacher"), pair, strict=True):
        tokenizer.save_pretrained(tmp_path / name)
    for pairs in (PAIRS, {}):
        file = tmp_path / f"{len(pairs)}.safetensors"
        build_pair_file("projection", tmp_path / "student", tmp_path / "teacher", file, pairs)
        header = projection_header(file)
        assert json.loads(header.get(SPECIAL_TOKENS_KEY, "{}")) == pairs


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"<nothing>": "<both>"}, "'<nothing>' is no special token of the student's tokenizer"),
        ({"<both>": "the"}, "'the' is no special token of the teacher's tokenizer"),
        ({"<both>": "<speaker>", "<user_turn>": "<speaker>"}, "'<speaker>' of the teacher is named twice"),
        ({"<both>": "<|endoftext|>"}, "begins or ends a text of the teacher"),
    ],
)
def test_impossible_pairs(pair: tuple[Any, Any], pairs: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenAligner(*pair, pairs)
    with pytest.raises(ConfigError, match=message):
        build_projection(*pair, special_tokens=pairs)
