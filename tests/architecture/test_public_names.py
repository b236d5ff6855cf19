"""Every public name that other systems know is found at its documented import path."""

from importlib import import_module

import pytest

NAMES = {
    "xtoken_core.data_plane": (
        "to_nested_by_length stack_or_nest unwrap_wire_stripped_payload maybe_pack_jagged pack_jagged_fields "
        "pack_per_token_field response_from_nested materialize Layout BatchedDataDict KVBatchMeta kv_first_write "
        "write_columns read_columns put_samples get_samples"
    ),
    "xtoken_core.data_plane.codec": (
        "to_nested_by_length stack_or_nest unwrap_wire_stripped_payload maybe_pack_jagged pack_jagged_fields "
        "pack_per_token_field response_from_nested materialize"
    ),
    "xtoken_core.losses": (
        "Fp32SparseMM chunk_average_log_probs valid_chunk_mask dp_all_reduce_sum alignment_from_flat_batch "
        "rebuild_teacher_full_logits_from_ipc parse_projection_file get_sparse_projection_matrix get_topk_projection "
        "build_exact_token_map _SPARSE_PROJECTION_CACHE _TOPK_PROJECTION_CACHE _EXACT_TOKEN_MAP_CACHE"
    ),
    "xtoken_core.teacher": "rebuild_teacher_full_logits_from_ipc",
    "xtoken_core.projection": (
        "parse_projection_file get_sparse_projection_matrix get_topk_projection build_exact_token_map "
        "_SPARSE_PROJECTION_CACHE _TOPK_PROJECTION_CACHE _EXACT_TOKEN_MAP_CACHE"
    ),
    "xtoken_core.collate": "CrossTokenizerCollator",
    "xtoken_core.alignment": "TokenAligner AlignmentBatch",
    "xtoken_core.ops.indices_to_multihot": (
        "IndicesToMultihot fused_indices_to_multihot _indices_to_multihot_kernel _multihot_to_indices_kernel "
        "null_decorator"
    ),
    "xtoken_core.ops": "NativeEmbeddingOp OpBackend get_op priority",
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names.split()]
)
def test_a_public_name_is_at_its_path(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


def test_members_of_public_names() -> None:
    collator = import_module("xtoken_core.collate").CrossTokenizerCollator
    assert callable(collator._tokenize_batch) and callable(import_module("xtoken_core.alignment").TokenAligner.align)
    assert import_module("xtoken_core.ops").OpBackend.PYTORCH_NATIVE_EMBEDDING
    operator = import_module("xtoken_core.ops").NativeEmbeddingOp
    assert callable(operator.forward) and callable(operator.forward_fp32) and "__call__" not in vars(operator)
