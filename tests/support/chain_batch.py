"""A batch of real text under chain: its loss, tables and logits of both sides."""

from typing import Any

import torch

from tests.support import vocabularies
from tests.support.alignments import collator_of
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.config import LossConfig
from xtoken_core.losses import CrossTokenizerDistillationLoss, LossTeacher


def chain_on(records: list[dict[str, Any]]) -> tuple[Any, Any, dict[str, Any], list[torch.Tensor]]:
    """The run's loss, its tables, a padded batch of the records, and random logits of both sides."""
    student, teacher = vocabularies.byte_level(), vocabularies.unigram()
    tables = as_tensors(build_tables(student, teacher))
    sizes = len(tables.student.root), len(tables.teacher.root)
    batch = dict(collator_of(student, teacher, 64, 64, aligner=None).padded(records))
    loss = CrossTokenizerDistillationLoss(
        LossConfig(), student_vocab_size=sizes[0], teachers=[LossTeacher(sizes[1], tables=tables)]
    )
    generator = torch.Generator().manual_seed(3)
    logits = [
        3 * torch.randn(*batch[field].shape, width + 1, generator=generator, dtype=torch.float64)
        for field, width in (("input_ids", sizes[0]), ("teacher_0_input_ids", sizes[1]))
    ]
    return loss, tables, batch, logits
