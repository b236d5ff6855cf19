"""Request examples for the OpenAPI description."""

from __future__ import annotations

from typing import Any

MINIMAL: dict[str, Any] = {
    "name": "first",
    "output": "first",
    "student": {"model": "/data/models/Llama-3.2-1B", "context_length": 1024},
    "teacher": [
        {
            "model": "/data/models/Qwen3-4B",
            "context_length": 1280,
            "projection": "/data/projections/llama-from-qwen3.safetensors",
        }
    ],
    "data": {"path": "/data/text/train.jsonl"},
}
SHORT: dict[str, Any] = {
    "student": {"model": "/data/models/Llama-3.2-1B"},
    "teacher": [{"model": "/data/models/Qwen3-4B"}],
    "data": {"path": "/data/text/train.jsonl"},
}
RUNS: dict[str, Any] = {
    "short": {"summary": "Models and text; everything else has a default", "value": SHORT},
    "minimal": {"summary": "A specification that is taken as it is", "value": MINIMAL},
    "cpu": {
        "summary": "A short run on a CPU",
        "value": MINIMAL
        | {
            "train": {"max_steps": 100, "samples_per_step": 16, "micro_batch_tokens": 4096, "learning_rate": 0.0003},
            "workers": {"collators": 1, "device": "cpu"},
        },
    },
}
