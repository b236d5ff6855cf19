"""Parts of an on-policy step alone: generation with and without graphs, weights from one process to another."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from xtoken_services.common.generation.decoding import Decoder
from xtoken_services.common.generation.published_weights import Version, WeightsWriter, load_weights
from xtoken_services.common.generation.sampling import Sampler, Sampling, seed_of
from xtoken_services.common.generation.vocabulary import Vocabulary

REPEATS = 5


def generation(
    options: Any, batches: list[int], device: torch.device, settings_of_memory: Sequence[bool] = (False, True)
) -> list[dict[str, Any]]:
    """Time the rollout worker's sampling of whole batches.

    Args:
        options: Models, prompts and lengths, as `__main__` reads them.
        batches: Numbers of prompts.
        device: Where.
        settings_of_memory: Decode in memory of a fixed size, on a GPU by graphs: without and with.
    """
    model = AutoModelForCausalLM.from_pretrained(options.student, dtype=getattr(torch, options.dtype)).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.student)
    width, settings = model.config.vocab_size, Sampling(options.new_tokens)
    end = frozenset({tokenizer.eos_token_id})
    vocabulary = Vocabulary([b"a"] * width, torch.ones(width, dtype=torch.bool, device=device), end, 0)
    rows = []
    for fixed in settings_of_memory:  # without first: the attention that a sampler sets stays
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


def weights(options: Any, device: torch.device) -> list[dict[str, Any]]:
    """Time a version of the weights: published by another process, loaded by this one.

    Args:
        options: As for `generation`.
        device: Where both models are.

    Raises:
        EOFError: The other process has failed.
    """
    model = AutoModelForCausalLM.from_pretrained(options.student, dtype=getattr(torch, options.dtype)).to(device)
    nbytes = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    rows = []
    for on_device in (False, True) if device.type == "cuda" else (False,):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        file = Path("/dev/shm") / f"xtoken-weights-benchmark-{on_device}"
        process = context.Process(target=_publish, args=(options, str(device), file, on_device, theirs))
        process.start()
        theirs.close()  # its end is seen here then
        published, loaded = [], []
        for step in range(REPEATS + 1):
            published.append(ours.recv())
            began = _now(device)
            assert load_weights(model, file).step == step
            loaded.append(_now(device) - began)
            ours.send(None)
        process.join()
        row = {
            "way": "CUDA IPC" if on_device else "shared memory", "bytes": nbytes,
            "publish_seconds": statistics.median(published[1:]), "load_seconds": statistics.median(loaded[1:]),
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    return rows


def _publish(options: Any, device: str, file: Path, on_device: bool, pipe: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(options.student, dtype=getattr(torch, options.dtype)).to(device)
    writer = WeightsWriter(file, on_device=on_device)
    for step in range(REPEATS + 1):
        began = _now(torch.device(device))
        writer.write(dict(model.named_parameters()), Version(step, 1))
        pipe.send(time.monotonic() - began)
        pipe.recv()
    writer.close()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
