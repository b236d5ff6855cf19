"""Parts of an on-policy step alone: generation with and without graphs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtoken_services.common.generation.decoding import Decoder
from xtoken_services.common.generation.sampling import Sampler, Sampling, seed_of
from xtoken_services.common.generation.vocabulary import Vocabulary

REPEATS = 5


def generation(options: Any, batches: list[int], device: torch.device) -> list[dict[str, Any]]:
    """Time the rollout worker's sampling of whole batches.

    Args:
        options: Models, prompts and lengths, as `__main__` reads them.
        batches: Numbers of prompts.
        device: Where.
    """
    model = AutoModelForCausalLM.from_pretrained(options.student, dtype=getattr(torch, options.dtype)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    width, settings = model.config.vocab_size, Sampling(options.new_tokens)
    end = frozenset({tokenizer.eos_token_id})
    vocabulary = Vocabulary([b"a"] * width, torch.ones(width, dtype=torch.bool, device=device), end, 0)
    rows = []
    for fixed in (False, True):  # without first: the attention that a sampler sets stays
        for batch in batches:
            prompts = [np.array(tokenizer(text)["input_ids"]) for text in options.texts[:batch]]
            seeds = [seed_of(0, position, 0) for position in range(len(prompts))]
            sampler, times, tokens = Sampler(model, vocabulary, settings, decoder=Decoder if fixed else None), [], 0
            for _ in range(REPEATS if fixed else 2):
                began = _now(device)
                sampled = sampler.complete(prompts, seeds, lambda: None)
                times.append(_now(device) - began)
                tokens = sum(len(each.ids) for each in sampled)
            seconds = statistics.median(times[1:])
            row = {
                "batch": len(prompts), "graphs": fixed, "first_seconds": times[0], "seconds": seconds,
                "tokens": tokens, "tokens_per_second": tokens / seconds,
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return rows


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
