"""The demo's models before their training."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtoken_services.demo.run import write_model
from xtoken_services.demo.vocabularies import train_teacher_tokenizer

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(200)]


def test_a_model_is_random_seeded_and_loads(tmp_path: Path) -> None:
    train_teacher_tokenizer(TEXTS, tmp_path / "tokenizer", vocabulary=400)
    state = torch.get_rng_state()
    models = [
        AutoModelForCausalLM.from_pretrained(
            write_model(tmp_path / name, tmp_path / "tokenizer", layers=1, hidden=64, seed=seed)
        )
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert torch.equal(torch.get_rng_state(), state)
    weights = [model.get_input_embeddings().weight for model in models]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == weights[0].shape[0] == models[0].get_output_embeddings().weight.shape[0]
    assert models[0].config.pad_token_id == tokenizer.pad_token_id
