"""Requests and answers in the form that the programs' documentation shows."""

from typing import Any

VLLM: dict[str, Any] = {
    # Completions API of the OpenAI-compatible server, extra parameters `prompt_logprobs`, `return_tokens_as_token_ids`.
    "models": {"object": "list", "data": [{"id": "Qwen/Qwen3-8B", "object": "model", "max_model_len": 40960}]},
    "request": {
        "model": "Qwen/Qwen3-8B", "prompt": [785, 3019, 315], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2,
        "logprobs": 2, "return_tokens_as_token_ids": True, "add_special_tokens": False,
    },
    "answer": {
        "id": "cmpl-8c16f81d43846721", "object": "text_completion", "created": 1772367069, "model": "Qwen/Qwen3-8B",
        "choices": [{
            "index": 0, "text": " the", "finish_reason": "length", "stop_reason": None,
            "logprobs": {
                "text_offset": [0], "token_logprobs": [-0.23], "tokens": ["token_id:279"],
                "top_logprobs": [{"token_id:279": -0.23, "token_id:7249": -2.98}],
            },
            "prompt_logprobs": [
                None,
                {
                    "3019": {"logprob": -8.8187, "rank": 812, "decoded_token": " step"},
                    "374": {"logprob": -0.7875, "rank": 1, "decoded_token": " is"},
                    "220": {"logprob": -1.975, "rank": 2, "decoded_token": " "},
                },
                {
                    "315": {"logprob": -1.5526, "rank": 1, "decoded_token": " of"},
                    "304": {"logprob": -1.7401, "rank": 2, "decoded_token": " in"},
                },
            ],
        }],
        "usage": {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1},
    },
}  # fmt: skip

SGLANG: dict[str, Any] = {
    # Native `/generate` with `return_logprob`: entries are [log-probability, token id, text or null].
    "models": {"object": "list", "data": [{"id": "qwen/qwen2.5-0.5b-instruct", "max_model_len": 32768}]},
    "request": {
        "input_ids": [1782, 6722, 315], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2,
        "return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True,
    },
    "answer": {
        "text": " France",
        "meta_info": {
            "id": "26223ea355df4c0ab45e5af04505ed67", "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": 3, "completion_tokens": 1,
            "input_token_logprobs": [[None, 1782, None], [-6.25, 6722, None], [-0.582, 315, None]],
            # float32 [[-1.5, -2.25], [-0.582, -2.1406]] and int32 [[220, 1156], [315, 3283]]; none of the first token.
            "input_top_logprobs_val_flat_b64": "AADAvwAAEMD0/RS/l/8IwA==",
            "input_top_logprobs_idx_flat_b64": "3AAAAIQEAAA7AQAA0wwAAA==",
            "input_top_logprobs_val_flat_b64_dtype": "float32", "input_top_logprobs_idx_flat_b64_dtype": "int32",
            "input_top_logprobs_shape": [2, 2], "input_top_logprobs_null_prefix": 1,
            "output_token_logprobs": [[-1.039, 279, None]],
            "output_top_logprobs": [[[-1.039, 279, None], [-3.531, 9625, None]]],
        },
    },
}  # fmt: skip
