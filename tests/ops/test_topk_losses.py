"""P-KL of a teacher's largest logits with the projection on Triton: value and gradient."""

import pytest
import torch

from tests.unit.losses.test_topk import case_of, config_of, evaluate, largest


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_p_kl_with_the_projection_on_triton(monkeypatch):
    pytest.importorskip("triton")
    case, config = case_of("p_kl"), config_of("p_kl", vocab_topk=9)
    loss, gradient, _ = evaluate(case, config, largest(case, config, 6))
    monkeypatch.setenv("XTOKEN_OPS", "sparse_projection=triton")
    case.student_logits, case.teacher_logits = case.student_logits.float(), [case.teacher_logits[0].float()]
    calls = []
    kernel = pytest.importorskip("xtoken_core.ops.sparse_projection.triton").TritonSparseProjection
    monkeypatch.setattr(kernel, "apply", lambda *arguments, apply=kernel.apply: calls.append(1) or apply(*arguments))
    own, own_gradient, _ = evaluate(case, config, largest(case, config, 6))
    assert calls, "float32 is computed by the kernel"
    assert (own - loss).abs() <= 2e-5 * loss.abs()
    assert (own_gradient - gradient).norm() <= 2e-5 * gradient.norm()
