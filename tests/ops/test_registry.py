"""The registry: which backend runs where, and what `XTOKEN_OPS` may say."""

import pytest
import torch
from torch import nn

from tests.support.cases import cases
from xtoken_core.compat.embedding.reference import NativeEmbeddingOp
from xtoken_core.errors import ConfigError
from xtoken_core.ops import OpBackend, get_op, op_names, priority
from xtoken_core.ops.registry import BACKENDS, PRIORITY, load_backend


def test_the_embedding_reference_is_registered_everywhere():
    assert isinstance(get_op("embedding", "cpu"), NativeEmbeddingOp)
    for kind in ("cuda", "rocm", "cpu"):
        assert BACKENDS["embedding"][PRIORITY[kind]["embedding"][-1]] is OpBackend.PYTORCH_NATIVE_EMBEDDING


@pytest.mark.parametrize("name", op_names())
def test_every_op_has_a_reference_with_both_paths_that_ends_every_list(name):
    op = load_backend(BACKENDS[name]["reference"])
    assert isinstance(op, nn.Module)
    assert type(op).__call__ is nn.Module.__call__
    assert callable(op.forward_fp32)
    for kind in PRIORITY:
        assert set(PRIORITY[kind][name]) <= set(BACKENDS[name])
        assert PRIORITY[kind][name][-1] == "reference"


def test_an_instance_is_shared():
    assert get_op("gold", "cpu") is get_op("gold", torch.device("cpu"))


def test_the_environment_overrides_the_priority(monkeypatch):
    monkeypatch.setenv("XTOKEN_OPS", "p_kl=triton, gold=reference")
    assert priority("p_kl", "cpu") == (OpBackend.TRITON_P_KL,)
    assert priority("gold", "cpu") == (OpBackend.PYTORCH_NATIVE_GOLD,)
    assert priority("embedding", "cpu") == (OpBackend.PYTORCH_NATIVE_EMBEDDING,)


@cases(
    "text, expected",
    ("p_kl=triton", OpBackend.TRITON_P_KL_CROSS_ENTROPY),
    ("p_kl_cross_entropy=reference,p_kl=triton", OpBackend.PYTORCH_NATIVE_P_KL_CROSS_ENTROPY),
    ("cross_entropy=triton", OpBackend.PYTORCH_NATIVE_P_KL_CROSS_ENTROPY),
)
def test_p_kl_with_cross_entropy_follows_p_kl_unless_it_is_named(monkeypatch, text, expected):
    monkeypatch.setenv("XTOKEN_OPS", text)
    assert priority("p_kl_cross_entropy", "cpu") == (expected,)


@cases(
    "text, expected",
    ("gold=triton", OpBackend.TRITON_GOLD_CROSS_ENTROPY),
    ("gold_cross_entropy=reference,gold=triton", OpBackend.PYTORCH_NATIVE_GOLD_CROSS_ENTROPY),
)
def test_gold_with_cross_entropy_follows_gold_unless_it_is_named(monkeypatch, text, expected):
    monkeypatch.setenv("XTOKEN_OPS", text)
    assert priority("gold_cross_entropy", "cpu") == (expected,)


@pytest.mark.parametrize("text", ["p_kl=cuda", "pkl=triton", "p_kl", "=reference"])
def test_an_unknown_override_is_refused_with_what_there_is(monkeypatch, text):
    monkeypatch.setenv("XTOKEN_OPS", text)
    with pytest.raises(ConfigError, match="which is none of embedding=reference"):
        get_op("p_kl", "cpu")


def test_an_unknown_op_is_refused():
    with pytest.raises(ConfigError, match="there is no op 'softmax'"):
        get_op("softmax", "cpu")


def test_a_kernel_on_the_cpu_needs_the_interpreter(monkeypatch):
    support = pytest.importorskip("xtoken_core.ops.triton_support")
    monkeypatch.setattr(support, "interpreting", lambda: False)
    with pytest.raises(ConfigError, match="Triton kernels need a GPU, the tensors are on cpu"):
        support.launching_on(torch.zeros(1))
