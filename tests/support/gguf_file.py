"""GGUF files of tiny Llamas with byte-level BPE, written by the package gguf."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
NORMAL, CONTROL = 1, 3
"""Types of tokens."""


def write_gguf(directory: Path, file: Path) -> dict[str, np.ndarray]:
    """Write the Llama of a directory as a GGUF file in float32; return its weights by their names in the directory."""
    import gguf

    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, directory, config["vocab_size"])
    for name, value in weights.items():
        short, _, kind = name.rpartition(".")
        if "self_attn.q_proj" in name or "self_attn.k_proj" in name:
            value = _permuted(value, heads if "q_proj" in name else kv_heads)
        if short in WHOLE:
            writer.add_tensor(f"{WHOLE[short]}.{kind}", value)
        else:
            _, _, layer, part = short.split(".", 3)
            writer.add_tensor(f"blk.{layer}.{LAYER[part]}.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in the order of llama.cpp, whose rotary embedding takes neighbouring pairs."""
    return np.ascontiguousarray(
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _add_tokenizer(writer: Any, directory: Path, rows: int) -> None:
    document = json.loads((directory / "tokenizer.json").read_text())
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    ids = document["model"]["vocab"] | {token["content"]: token["id"] for token in document["added_tokens"]}
    special = {token["content"] for token in document["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__) + [f"<unused{n}>" for n in range(rows - len(ids))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in document["model"]["merges"]])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        add(ids[settings[f"{name}_token"]])
