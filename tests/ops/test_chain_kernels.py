"""The kernels of the chain divergence beside the reference, with several blocks, slices and segments each."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from benchmarks.chain_tables import side_tokens
from tests.ops.tolerances import GRADIENT, OUTPUT, assert_within
from tests.support.cases import cases
from tests.support.device import without_waiting
from tests.unit.chain.test_divergence import BETAS, GIVEN, QUICK, batch_of, by_loops, random_logits
from tests.unit.chain.test_edges import DOCUMENTS, SPLIT, WHOLE
from tests.unit.chain.tiny_tokenizers import BY_THREE, UNGROUPED
from xtoken_core.chain import class_layout
from xtoken_core.chain.build import as_tensors, build_tables
from xtoken_core.chain.tables import ChainTables
from xtoken_core.losses.masks import whole_chunks
from xtoken_core.ops.chain.divergences import Generated
from xtoken_core.ops.chain.reference import ChainOptions, ChainSettings, NativeChainOp

pytest.importorskip("triton")
launch = pytest.importorskip("xtoken_core.ops.chain.launch")
from xtoken_core.ops.chain import gradient_launch, layout  # noqa: E402
from xtoken_core.ops.chain.triton import TritonChainOp  # noqa: E402

slow = pytest.mark.slow
FORWARD = 0.0
"""For `beta`: all text is given."""
every_form = pytest.mark.parametrize("beta", [FORWARD, None, 0.3], ids=["forward", "reverse", "jsd"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = {
    "TEACHER_LANES": 2, "STUDENT_LANES": 2, "BLOCK": 16, "SLOTS": 2, "CHUNKS": 2,
    "TERMS": 2,
    "WORDS": 2, "RULES": 4, "TOKENS": 2, "SPLITS": 2, "POINTS": 2, "AT_POINT": 2,
}  # fmt: skip
GRADIENT_SIZES = {"GRADIENT_LANES": 2, "GRADIENT_PARTS": 2}
NARROW_AND_WIDE = {"HEIGHTS": (1, 2, 2), "LENGTHS": (2, 2, 2, 2), "TILE": 4}
MEDIUM = {"HEIGHTS": (1, 1, 1), "LENGTHS": (2, 4, 4, 4), "TILE": 4}


@pytest.fixture
def small(monkeypatch):
    sizes_of = (launch, SIZES), (gradient_launch, GRADIENT_SIZES), (layout, {"NODE_SEGMENT": 2})
    for module, sizes in (*sizes_of, (class_layout, NARROW_AND_WIDE)):
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


def inputs(pair, device, dtype=torch.float32):
    batch = batch_of(*pair, ["12.12 1", "1"] if BY_THREE in pair else DOCUMENTS)
    generator = torch.Generator().manual_seed(3)
    logits = [
        (3 * torch.randn(*ids.shape, len(side.vocab) + wider, generator=generator)).to(device, dtype)
        for ids, side, wider in ((batch.student_ids, pair[0], 3), (batch.teacher_ids, pair[1], 2))
    ]
    P = batch.usable.shape[1]
    chunk_ids = batch.student_chunk_id, batch.teacher_chunk_id
    usable = batch.usable & whole_chunks(chunk_ids[0], P) & whole_chunks(chunk_ids[1], P)
    sides = [
        side_tokens(ids.to(device), chunk.to(device), usable.to(device))
        for ids, chunk in zip((batch.student_ids, batch.teacher_ids), chunk_ids, strict=True)
    ]
    tables = as_tensors(build_tables(*(side.fast for side in pair))).to(device)
    return *logits, *sides, tables, P


def every_other(student, beta):
    """The form of every other sample, the first one's among them; None: all text is given."""
    at = (torch.arange(len(student), device=student.device) % 2 == 0).unsqueeze(1).expand(student.shape[:2])
    return None if beta == FORWARD else Generated(at, beta)


def results(op, given, options, temperature, upcast=False, overwrite=False, beta=FORWARD):
    student, teacher, *sides, tables, P = given
    leaf = (student.float() if upcast else student).clone().requires_grad_()
    generated = every_other(student, beta)
    settings = ChainSettings(P, options, temperature, generated=generated, overwrite=overwrite)
    found = op(leaf, teacher.float() if upcast else teacher, *sides, tables, settings)
    generator = torch.Generator().manual_seed(5)
    total = sum((part * torch.rand(part.shape, generator=generator).to(part)).sum() for part in found[:4])
    gradient = torch.autograd.grad(total, leaf)[0]
    assert (gradient.data_ptr() == leaf.data_ptr()) == overwrite
    return found, gradient


def check(given, options, temperature=1.0, overwrite=False, beta=FORWARD):
    dtype = given[0].dtype
    found, gradient = results(TritonChainOp(), given, options, temperature, overwrite=overwrite, beta=beta)
    expected, truth = results(NativeChainOp(), given, options, temperature, upcast=True, beta=beta)
    slack = 2.0 if dtype == torch.bfloat16 and given[0].device.type == "cpu" else 1.0
    for name, actual, wanted in zip(found._fields, found, expected, strict=True):
        assert_within(actual, wanted, OUTPUT["chunk", dtype], name, slack=slack)
    assert_within(gradient, truth, GRADIENT["chunk", dtype], "gradient", slack=slack)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@cases(
    "pair, options, temperature, overwrite",
    pytest.param((WHOLE, SPLIT), ChainOptions(), 1.0, True, id="student_is_whole", marks=slow),
    pytest.param((SPLIT, WHOLE), ChainOptions(), 2.0, True, id="teacher_is_whole", marks=slow),
    pytest.param((UNGROUPED, BY_THREE), ChainOptions(), 1.0, True, id="words_end_inside_tokens"),
    pytest.param((WHOLE, SPLIT), ChainOptions(False, True, True), 1.0, False, id="unconditioned", marks=slow),
    pytest.param((SPLIT, WHOLE), ChainOptions(True, False, True), 1.0, False, id="no_end_terms", marks=slow),
    pytest.param((WHOLE, WHOLE), ChainOptions(), 1.0, False, id="one_tokenizer", marks=slow),
)
def test_values_and_gradient_are_the_references(device, pair, options, temperature, overwrite):
    check(inputs(pair, device), options, temperature, overwrite)


BY_DEFAULT = ("words_end_inside_tokens", "jsd")


def in_both_forms(rows):
    """Rows by name with each form of generated text; one by default: the interpreter takes half a minute for one."""
    for name, row in rows.items():
        for form, beta in (("reverse", None), ("jsd", 0.3)):
            yield pytest.param(*row, beta, id=f"{name}-{form}", marks=[slow] * ((name, form) != BY_DEFAULT))


GENERATED = {
    "student_is_whole": ((WHOLE, SPLIT), ChainOptions(), 1.0, True),
    "teacher_is_whole": ((SPLIT, WHOLE), ChainOptions(), 2.0, False),
    "words_end_inside_tokens": ((UNGROUPED, BY_THREE), ChainOptions(), 1.0, False),
    "unconditioned": ((WHOLE, SPLIT), ChainOptions(False, True, True), 1.0, True),
    "one_tokenizer": ((WHOLE, WHOLE), ChainOptions(), 1.0, False),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@cases("pair, options, temperature, overwrite, beta", *in_both_forms(GENERATED))
def test_generated_text(device, pair, options, temperature, overwrite, beta):
    check(inputs(pair, device), options, temperature, overwrite, beta)


@slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
def test_medium_classes(device, monkeypatch):
    for name, sizes in MEDIUM.items():
        monkeypatch.setattr(class_layout, name, sizes)
    check(inputs((SPLIT, WHOLE), device), ChainOptions())


def without_end_terms(tables):
    """The same tables as those of tokenizers without end terms: members' last pieces reach no node (`PieceTrie`)."""
    sides = []
    for side in (tables.student, tables.teacher):
        node = side.node.clone()
        node[side.spelling_start[1:][side.spelling_start.diff() > 0].long() - 1] = -1
        sides.append(replace(side, node=node))
    return ChainTables(*sides, tables.classes, tables.common)


@slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
def test_tokens_whose_end_has_no_term_have_a_gradient(device):
    *given, tables, P = inputs((WHOLE, SPLIT), device)
    check((*given, without_end_terms(tables), P), ChainOptions())


@slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@every_form
def test_sizes_as_shipped(device, dtype, beta):
    check(inputs((WHOLE, SPLIT), device, dtype), ChainOptions(), beta=beta)


@slow
@pytest.mark.timeout(3600)
@settings(QUICK, max_examples=25)
@given(*GIVEN, BETAS)
def test_random_tokenizers_equal_loops(student, teacher, documents, chosen, seed, beta):
    """The kernels in the interpreter beside loops in float64, every other row generated text."""
    batch = batch_of(student, teacher, documents)
    z = [x.detach().float() for x in random_logits(seed, batch, student, teacher)]
    at = every_other(z[0], beta)
    tables = as_tensors(build_tables(student.fast, teacher.fast))
    chunk_ids, P = (batch.student_chunk_id, batch.teacher_chunk_id), batch.usable.shape[1]
    usable = batch.usable & whole_chunks(chunk_ids[0], P) & whole_chunks(chunk_ids[1], P)
    columns = zip((batch.student_ids, batch.teacher_ids), chunk_ids, strict=True)
    sides = [side_tokens(ids, chunk, usable) for ids, chunk in columns]
    leaves = z[0].requires_grad_(), z[0].detach().double().requires_grad_()
    found = TritonChainOp()(leaves[0], z[1], *sides, tables, ChainSettings(P, chosen, generated=at))
    values = (
        found.start + found.inner + found.end,
        by_loops(student, teacher, batch, (leaves[1], z[1].double()), chosen, generated=at),
    )
    assert_within(*values, OUTPUT["chunk", torch.float32], "value")
    weights = torch.rand(values[0].shape, generator=torch.Generator().manual_seed(seed))
    gradients = [torch.autograd.grad((x * weights).sum(), leaf)[0] for x, leaf in zip(values, leaves, strict=True)]
    assert_within(*gradients, GRADIENT["chunk", torch.float32], "gradient")


@slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("device", DEVICES)
@every_form
def test_missing_probability_is_finite(device, beta):
    given = inputs((WHOLE, SPLIT), device)
    given[0][..., ::3] = -torch.inf
    given[1][..., 1::3] = -torch.inf
    found, _ = results(TritonChainOp(), given, ChainOptions(), 1.0, beta=beta)
    assert all(part.isfinite().all() for part in found[:3])
    expected, _ = results(NativeChainOp(), given, ChainOptions(), 1.0, beta=beta)
    for actual, wanted in zip(found[:3], expected[:3], strict=True):
        assert_within(actual, wanted, OUTPUT["chunk", torch.float32], "part")


def of_thousands(dtype):
    """The op's inputs on the GPU, of a drawn text and of drawn tables of thousands of tokens."""
    from benchmarks.chain_tables import draw_tables, draw_text

    device = torch.device("cuda")
    tables = draw_tables(9001, 12007)
    text = draw_text(tables, 300)
    ids, chunks = ([x.to(device) for x in each] for each in (text.ids, text.chunk_id))
    usable = torch.ones(1, text.chunks, dtype=torch.bool, device=device)
    sides = [side_tokens(i, c, usable & whole_chunks(c, text.chunks)) for i, c in zip(ids, chunks, strict=True)]
    logits = [
        (3 * torch.randn(1, 300, width, generator=torch.Generator().manual_seed(width))).to(device, dtype)
        for width in (9001, 12007)
    ]
    return *logits, *sides, tables.to(device), text.chunks


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_form
def test_vocabularies_of_thousands(dtype, beta):
    *logits, student, teacher, tables, P = given = of_thousands(dtype)
    check(given, ChainOptions(), beta=beta)
    check(given, ChainOptions(), overwrite=True, beta=beta)
    TritonChainOp().prepare(tables)
    settings = ChainSettings(P, generated=every_other(logits[0], beta))
    with without_waiting():
        leaf = logits[0].clone().requires_grad_()
        runs = []
        for _ in range(2):
            found = TritonChainOp()(leaf, logits[1], student, teacher, tables, settings)
            total = found.start.sum() + found.inner.sum() + found.end.sum() + found.losses.sum()
            runs.append((*found, *torch.autograd.grad(total, leaf)))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.gpu
def test_from_hidden_states():
    from benchmarks.hidden_states import CONFIGS, SMALL, Workload

    load = Workload(SMALL, CONFIGS["chain"][0], torch.device("cuda"), maxima=False)
    leaves = [x.detach().float().requires_grad_() for x in (load.hidden, load.weight)]
    teacher = load.teacher.hidden.float() @ load.teacher.weight.float().t()
    expected, _ = load.loss(load.batch, leaves[0] @ leaves[1].t(), [teacher])
    wanted = expected.detach(), *torch.autograd.grad(expected, leaves)
    for own, truth in zip(load.step(), wanted, strict=True):
        assert (own.float() - truth).norm() <= 1e-2 * truth.norm()
