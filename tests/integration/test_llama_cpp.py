"""A teacher on a real server: llama-cpp-python with Gemma 3 270M.

Set XTOKEN_LLAMA_PYTHON to a Python that has `llama-cpp-python[server]`, XTOKEN_LLAMA_GGUF to the model's file, and
XTOKEN_LLAMA_MODEL to the Hugging Face directory that was converted from it (`python -m experiments.real models`).
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_run import TinyAssets, steps_of, tiny_spec, write_jsonl
from xtoken_core.config.served import ServedSpec
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.http_engine.check import check_servers
from xtoken_services.common.http_engine.engine import Sampling
from xtoken_services.common.http_engine.errors import SampleRefusedError
from xtoken_services.common.http_engine.factory import open_engine
from xtoken_services.common.run.status import RunState
from xtoken_services.supervisor.local_run import run_locally

NAMES = ("XTOKEN_LLAMA_PYTHON", "XTOKEN_LLAMA_GGUF", "XTOKEN_LLAMA_MODEL")
PYTHON, GGUF, MODEL = (os.environ.get(name, "") for name in NAMES)
KEY = "sesame-0123"
K = 16
START_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (PYTHON and GGUF and MODEL), reason=f"needs {', '.join(NAMES)}"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the model."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = {"model": GGUF, "model_alias": "gemma", "n_ctx": 96, "logits_all": "true", "port": port, "api_key": KEY}
    command = [PYTHON, "-m", "llama_cpp.server", *(f"--{name}={value}" for name, value in options.items())]
    log = tmp_path_factory.mktemp("llama") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                httpx.get(f"{url}/v1/models", timeout=5)
                break
            except httpx.TransportError:
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    return file


def test_the_log_probabilities_are_those_of_the_converted_model(server: str, key_file: Path) -> None:
    text = TextTokenizer(AutoTokenizer.from_pretrained(MODEL), "teacher")
    served = ServedSpec(url=(server,), url_engine="llama_cpp", url_key_file=key_file, url_timeout_s=300.0)
    engine = open_engine(served, "teacher.0", len(text.tokenizer), text)
    check_servers(engine, text, k=K, longest=64, own_suffices=False)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for sample in ("Die Größe der Datei beträgt 2024 Byte.", "def f(x):\n    return x + 1\n"):
        ids = text.encode([sample], specials=True)[0].tolist()
        scores = engine.score(ids, K)
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1).numpy()
        own = log_probs[np.arange(len(ids) - 1), ids[1:]]
        assert np.abs(scores.own[:-1] - own).mean() < 0.15  # the server multiplies 4-bit weights by 8-bit activations
        assert (scores.ids[:-1, 0] == log_probs[:-1].argmax(-1)).mean() > 0.7
        listed = np.take_along_axis(log_probs, np.maximum(scores.ids, 0), axis=-1)
        difference = np.abs(scores.values - listed)[scores.ids >= 0]
        assert difference.mean() < 0.3
        assert (scores.ids[:-1] >= 0).mean() > 0.9  # others have the text of another token
    with pytest.raises(SampleRefusedError, match="begin-of-text"):
        engine.score(ids[1:], K)
    with pytest.raises(SampleRefusedError, match="tokenizes the text of a sample otherwise"):
        engine.score([ids[0], *(int(one) for part in text.encode(list("the"), specials=False) for one in part)], K)
    engine.pool.close()


def test_completions_are_those_that_the_converted_model_finds_likely(server: str, key_file: Path) -> None:
    text = TextTokenizer(AutoTokenizer.from_pretrained(MODEL), "student")
    served = ServedSpec(url=(server,), url_engine="llama_cpp", url_key_file=key_file, url_timeout_s=300.0)
    engine = open_engine(served, "rollout", len(text.tokenizer), text)
    engine.served(engine.pool.replicas[0])
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    for prompt in ("The capital of France is", "def add(a, b):\n    return"):
        ids = text.encode([prompt], specials=True)[0].tolist()
        completion = engine.complete(ids, Sampling(max_tokens=8, seed=5, temperature=0.0))
        assert 1 <= len(completion.ids) <= 8
        with torch.no_grad():
            rows = torch.log_softmax(model(torch.tensor([ids + completion.ids])).logits[0].double(), dim=-1)
        chosen, best = rows[len(ids) - 1 : -1], rows[len(ids) - 1 : -1].amax(-1)
        regret = best - chosen[range(len(completion.ids)), completion.ids]
        assert regret.max() < 1.5 and regret.mean() < 0.4  # the server's weights have 4 bits
    drawn = [engine.complete(ids, Sampling(max_tokens=8, seed=seed)).ids for seed in (1, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert len({tuple(row) for row in drawn}) > 1
    engine.pool.close()


def test_a_run_learns_from_it(assets: TinyAssets, tmp_path: Path, server: str, key_file: Path) -> None:
    data = write_jsonl(tmp_path / "train.jsonl", [f"Record {n} is short." for n in range(4)])
    teacher = {
        "model": MODEL, "context_length": 32, "url": server, "url_engine": "llama_cpp", "url_key_file": key_file,
        "url_timeout_s": 900.0, "url_connections": 2, "topk": K,
    }  # fmt: skip
    changes = {
        "data": {"path": data, "append_eos": False}, "loss": {"mode": "p_kl", "vocab_topk": None, "temperature": 1.0},
        "train": {"samples_per_step": 2, "micro_batch_tokens": 320}, "queue": {"block_size": 2},
        "workers": {"hang_timeout_s": 1000.0},
    }  # fmt: skip
    spec = tiny_spec(assets, tmp_path / "run", teacher=[teacher], **changes)
    result = run_locally(spec, show=False)  # the server takes seconds per sample: no deadline of the other tests
    assert result.state == RunState.COMPLETED, result.error
    steps = steps_of(spec.output)
    assert [i for line in steps for i in line["ids"]] == list(range(4))
    assert all(0 < line["loss"] < 50 for line in steps)
    assert KEY not in "".join(file.read_text() for file in spec.output.rglob("*.log"))
