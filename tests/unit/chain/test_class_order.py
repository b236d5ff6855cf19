"""A teacher whose tokens are renumbered by class gives the same divergence."""

from dataclasses import replace

import torch

from tests.unit.chain.test_divergence import batch_of, random_logits
from tests.unit.chain.test_edges import DOCUMENTS, SPLIT, WHOLE
from xtoken_core.chain.build import build_tables
from xtoken_core.chain.class_order import class_order, in_class_order
from xtoken_core.chain.tables import ChainTables
from xtoken_core.losses.chain import chain_divergence


def test_divergence_is_the_same():
    for pair in ((WHOLE, SPLIT), (SPLIT, WHOLE)):
        batch = batch_of(*pair, DOCUMENTS)
        student, teacher = random_logits(3, batch, *pair)
        tables = ChainTables.of(build_tables(*(side.fast for side in pair)))
        order = class_order(tables)
        assert torch.equal(order.sort().values, torch.arange(len(order)))
        roots = tables.student.root.long(), tables.teacher.root.long()
        sizes = [root.bincount(minlength=tables.classes + 1) for root in roots]
        plain = (sizes[0] == 1) & (sizes[1] == 1) & (torch.arange(tables.classes + 1) < tables.classes)
        both = min(map(len, roots))
        columns = plain[roots[0][:both]]
        assert torch.equal(roots[1][order][:both][columns], roots[0][:both][columns])
        new = torch.empty_like(order)
        new[order] = torch.arange(len(order))
        renumbered = replace(batch, teacher_ids=new[batch.teacher_ids])
        found = chain_divergence(student, teacher[..., order], renumbered, in_class_order(tables, order))
        expected = chain_divergence(student, teacher, batch, tables)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
