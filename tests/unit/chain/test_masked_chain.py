"""Masks on white space: which chunks they leave out, and that the others keep their values."""

import pytest
import torch

from experiments.losses.masked_chain import ChainWithoutLineEnds, ChainWithoutWhiteSpace
from tests.unit.chain.test_chain_loss import columns_of
from tests.unit.chain.test_divergence import batch_of, random_logits
from tests.unit.chain.tiny_tokenizers import TinyTokenizer
from xtoken_core.chain.build import build_tables
from xtoken_core.chain.tables import ChainTables
from xtoken_core.config import LossConfig
from xtoken_core.losses.chain_loss import ChainLoss
from xtoken_core.losses.common import EvalOptions, LossTeacher
from xtoken_core.schema import with_numbers

STUDENT = TinyTokenizer(b"ab \n", [(b" ", b"a"), (b"\n", b"\n")], "words")
TEACHER = TinyTokenizer(b"ab \n", [(b"a", b"b"), (b"\n", b" ")], "none")
DOCUMENTS = ["ab\n\nb a\n b", "a  b\n"]


@pytest.mark.parametrize(("masked", "left_out"), [(ChainWithoutLineEnds, b"\n"), (ChainWithoutWhiteSpace, b" \n")])
def test_masked_chunks_are_zero_and_others_unchanged(masked, left_out, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    batch = batch_of(STUDENT, TEACHER, DOCUMENTS)
    columns = with_numbers(columns_of(batch))
    student, teacher = random_logits(1, batch, STUDENT, TEACHER)
    tables = ChainTables.of(build_tables(STUDENT.fast, TEACHER.fast))
    of_teacher = LossTeacher(len(TEACHER.vocab), tables=tables, tokenizers=lambda: (STUDENT.fast, TEACHER.fast))
    found = {}
    for cls, mode in ((ChainLoss, "chain"), (masked, "custom")):
        loss = cls(
            LossConfig(mode=mode),
            of_teacher,
            index=0,
            student_vocab_size=len(STUDENT.vocab),
            device=torch.device("cpu"),
        )
        divergence = loss.evaluate(loss.pairing(columns), student, teacher, None, EvalOptions())
        found[cls] = sum(divergence.parts), loss.chunks(columns).valid
    (whole, usable), (values, valid) = found[ChainLoss], found[masked]
    spelled = [[b"" for _ in range(usable.shape[1])] for _ in DOCUMENTS]
    for texts, ids, chunks in zip(spelled, batch.student_ids, batch.student_chunk_id, strict=True):
        for token, chunk in zip(ids.tolist(), chunks.tolist(), strict=True):
            if chunk >= 0:
                texts[chunk] += STUDENT.bytes_of(token)
    dropped = torch.tensor(
        [[bool(text) and not text.strip() and any(b in left_out for b in text) for text in texts] for texts in spelled]
    )
    assert (dropped & usable).sum() >= 3
    assert torch.equal(valid, usable & ~dropped)
    torch.testing.assert_close(values, torch.where(dropped, 0.0, whole), rtol=1e-12, atol=0)
