"""Completions by servers: what is sent to each program, what is read of its answers, weights that are updated."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.engine_server import Answer, serving
from tests.support.generating_server import GPU, GeneratingServer, shared
from xtoken_core.config.rollout import RolloutSpec
from xtoken_core.tokenizing import TextTokenizer
from xtoken_services.common.generation.published_weights import Version, WeightsWriter
from xtoken_services.common.generation.vocabulary import Vocabulary
from xtoken_services.common.http_engine import vllm
from xtoken_services.common.http_engine.engine import Sampling
from xtoken_services.common.http_engine.errors import EngineError, EngineRefusalError
from xtoken_services.common.http_engine.factory import open_engine
from xtoken_services.rollout import served
from xtoken_services.rollout.served import ServedSampler

WHOLE = Sampling(max_tokens=4, seed=(1 << 40) + 3, temperature=0.7, top_k=9, top_p=0.9, stop=("\n",))
VLLM = {
    # Completions API; `stop_reason` is the stop string, null after the end of the text.
    "path": "/v1/completions",
    "request": {
        "model": "m", "prompt": [5, 6], "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 9,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "seed": (1 << 40) + 3, "stop": ["\n"], "logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
    },
    "answer": {"choices": [{
        "index": 0, "text": " a", "finish_reason": "stop", "stop_reason": "\n",
        "token_ids": [7, 8], "prompt_token_ids": [5, 6],
        "logprobs": {"tokens": [" a", "\n"], "token_logprobs": [-0.5, -0.1], "top_logprobs": [{" a": -0.5}, None]},
    }]},
}  # fmt: skip
SGLANG = {
    # Native `/generate`: `finish_reason` has `matched`, the stop string or the token that ended the text.
    "path": "/generate",
    "request": {
        "input_ids": [5, 6], "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 9, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "sampling_seed": ((1 << 40) + 3) % (1 << 31),
            "stop": ["\n"],
        },
    },
    "answer": {"text": " a", "meta_info": {
        "finish_reason": {"type": "stop", "matched": "\n"}, "weight_version": "default",
        "output_token_logprobs": [[-0.5, 7, None], [-0.1, 8, None]],
    }},
}  # fmt: skip


def engine_of(stack: ExitStack, student: Path, kind: str, *handlers: Any) -> Any:
    urls = tuple(stack.enter_context(serving(handler)) for handler in handlers)
    settings = RolloutSpec(url=urls, url_engine=kind, url_timeout_s=20.0)
    text = TextTokenizer(AutoTokenizer.from_pretrained(student), "student")
    engine = open_engine(settings, "rollout", len(text.tokenizer))
    stack.callback(engine.pool.close)
    return engine


@pytest.mark.parametrize(("kind", "recorded"), [("vllm", VLLM), ("sglang", SGLANG)], ids=["vllm", "sglang"])
def test_a_documented_completion(stack: ExitStack, student: Path, kind: str, recorded: dict[str, Any]) -> None:
    """What a run leaves out is not left to the server, which takes it from the model's `generation_config.json`."""
    seen: list[Any] = []

    def answer(method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        seen.append((path, body))
        return 200, {}, {"data": [{"id": "m"}]} if path == "/v1/models" else recorded["answer"]

    engine = engine_of(stack, student, kind, answer)
    engine.served(engine.pool.replicas[0])
    completion = engine.complete([5, 6], WHOLE)
    assert seen[-1] == (recorded["path"], recorded["request"])
    assert (completion.ids, completion.finished, completion.stopped) == ([7, 8], True, True)
    assert completion.log_probs == (-0.5, -0.1)
    engine.complete([5, 6], dataclasses.replace(WHOLE, top_k=None))
    sent = seen[-1][1].get("sampling_params", seen[-1][1])
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (-1, 0.0, 1.0)


class Run:
    """A run whose completions a server generates, with a student that changes from version to version."""

    def __init__(self, stack: ExitStack, student: Path, output: Path, kind: str, servers: int = 1) -> None:
        text = TextTokenizer(AutoTokenizer.from_pretrained(student), "student")
        assert text.eos_id is not None
        self.end, self.directory = text.eos_id, output / "rollout-model"
        self.kind, self.student = kind, student
        self.gpu = kind.partition("nccl-")[2] or None
        self.server = self.ready()
        self.engine = engine_of(
            stack, student, kind.partition("-")[0], *[lambda *request: self.answer(*request)] * servers
        )
        allowed = torch.ones(len(text.tokenizer), dtype=torch.bool)
        vocabulary = Vocabulary(text.table.pieces, allowed, frozenset({self.end}), 0)
        spec = RolloutSpec(max_new_tokens=6, temperature=0.0)
        output.mkdir(mode=0o700)
        copy = AutoModelForCausalLM.from_pretrained(student) if kind == "vllm-ipc" else None
        lengths: dict[str, Any] = {"longest": 64, "model": copy, "gpu": self.gpu and self.gpu.replace("1", "0")}
        self.sampler = ServedSampler(self.engine, vocabulary, spec, student, self.directory, **lengths)
        self.model: Any = AutoModelForCausalLM.from_pretrained(student)
        self.published = output.parent / "weights"
        self.writer = WeightsWriter(self.published)
        stack.callback(self.writer.close)
        self.step = 2

    def ready(self) -> GeneratingServer:
        """A server that somebody has started with the student's own directory."""
        server = GeneratingServer(self.student, self.end)
        server.device = self.gpu
        return server

    def answer(self, *request: Any) -> Answer:
        return self.server(*request)

    @torch.no_grad()
    def publish(self) -> None:
        """Change the weights and let the sampler load them."""
        self.step += 1
        weight = self.model.get_input_embeddings().weight
        weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(self.step))
        self.writer.write(dict(self.model.named_parameters()), Version(self.step, 1))
        assert self.sampler.load(self.published) == Version(self.step, 1)

    @torch.no_grad()
    def expected(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """A completion and its log-probabilities by the weights of now."""
        row, values = list(prompt), []
        while len(values) < 6 and row[-1] != self.end:
            log_probs = self.model(torch.tensor([row])).logits[0, -1].double().log_softmax(-1)
            row.append(int(log_probs.argmax()))
            values.append(float(log_probs.max()))
        return row[len(prompt) :], values

    def check(self, *prompts: list[int]) -> None:
        """Complete prompts, and compare the completions with those of the weights of now."""
        sampled = self.sampler.complete([np.array(ids) for ids in prompts], list(range(len(prompts))), lambda _: None)
        for ids, row in zip(prompts, sampled, strict=True):
            tokens, log_probs = self.expected(ids)
            assert row.ids == tokens
            assert row.log_probs == pytest.approx(log_probs)
            assert row.finished == row.ends == (row.ids[-1] == self.end)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's memory, as `GeneratingServer` has it."""
    monkeypatch.setattr(served, "reduce_tensor", shared)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=GPU))


@pytest.fixture(params=["vllm", "vllm-ipc", "sglang"])
def run(request: pytest.FixtureRequest, stack: ExitStack, student: Path, tmp_path: Path, gpu: None) -> Run:
    return Run(stack, student, tmp_path / "run", request.param)


PROMPTS = [[5, 6, 7], [9], [11, 12], [13, 5], [6, 6, 8], [7]]


def test_every_version_is_read_by_the_server(run: Run) -> None:
    for _ in range(2):
        run.publish()
        if run.kind == "vllm-ipc":
            assert not run.directory.exists()
        else:
            paths = run.directory.parent, run.directory
            assert [path.stat().st_mode & 0o777 for path in paths] == [0o711, 0o755]
        run.check(*PROMPTS)


def test_no_completion_is_of_the_weights_of_a_restarted_server(run: Run) -> None:
    random, restarts = Random(1), 0

    def answer(*request: Any) -> Answer:
        nonlocal restarts
        if random.random() < 0.08:
            restarts += 1
            run.server = run.ready()
        return run.server(*request)

    run.publish()
    run.server = run.ready()  # before its first completion
    run.answer = answer  # type: ignore[method-assign]
    while restarts < 12:
        run.check(*PROMPTS)
        run.publish()


def test_keys_and_values_of_old_weights_go_though_a_request_runs(run: Run) -> None:
    run.publish()
    run.check(*PROMPTS)
    run.server.held = [8, 8]
    body = {"prompt": [8, 8], "max_tokens": 6, "input_ids": [8, 8], "sampling_params": {"max_new_tokens": 6}}
    path = "/generate" if run.kind == "sglang" else "/v1/completions"
    url = run.engine.pool.replicas[0].url + path
    abandoned = threading.Thread(target=httpx.post, args=(url,), kwargs={"json": body, "timeout": 60}, daemon=True)
    abandoned.start()
    assert run.server.holding.wait(20)
    run.publish()
    run.check(*PROMPTS)
    abandoned.join(20)
    assert not (abandoned.is_alive() or run.server.paused)


def test_a_prompt_that_a_server_refuses_has_no_completion(run: Run) -> None:
    run.publish()
    run.server.max_length = 20
    row, refused = run.sampler.complete([np.array([5, 6]), np.arange(5, 20)], [1, 2], lambda _: None)
    assert (row.ids, refused.ids) == (run.expected([5, 6])[0], [])
    run.server.max_length = 6
    with pytest.raises(EngineRefusalError, match="status 400: Requested token count exceeds"):
        run.sampler.complete([np.array([5])], [1], lambda _: None)


@pytest.mark.parametrize("lacking", ["process_start_time_seconds", "vllm:prompt_tokens_created"])
def test_a_server_whose_restart_would_not_be_noticed_is_refused(
    stack: ExitStack, student: Path, tmp_path: Path, lacking: str
) -> None:
    run = Run(stack, student, tmp_path / "run", "vllm")

    def answer(*request: Any) -> Answer:
        status, headers, data = run.server(*request)
        return status, headers, data.replace(lacking.encode(), b"x") if request[1] == "/metrics" else data

    run.answer = answer  # type: ignore[method-assign]
    with pytest.raises(EngineRefusalError, match=f"no {lacking}, by which a restart is noticed"):
        run.publish()


def test_a_server_that_takes_shorter_texts_is_refused(run: Run) -> None:
    run.server.max_length = 63
    with pytest.raises(EngineRefusalError, match="takes 63 tokens, and a prompt with its completion may have 64"):
        run.publish()


def test_a_server_that_is_updated_gets_no_prompts(run: Run) -> None:
    held: list[bool] = []

    def answer(method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        if path in ("/collective_rpc", "/update_weights_from_disk", "/update_weights"):
            held.append(run.engine.pool.replicas[0].held)
        return run.server(method, path, body, headers)

    run.answer = answer  # type: ignore[method-assign]
    run.publish()
    assert held == [True] and not run.engine.pool.replicas[0].held


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_servers_load_weights_side_by_side(stack: ExitStack, student: Path, tmp_path: Path, kind: str) -> None:
    run = Run(stack, student, tmp_path / "run", kind, servers=2)
    loading: set[str] = set()
    changed = threading.Condition()

    def answer(method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        if path in ("/collective_rpc", "/update_weights_from_disk"):
            with changed:
                loading.add(headers["Host"])
                changed.notify_all()
                changed.wait_for(lambda: len(loading) == 2, 30)
        return run.server(method, path, body, headers)

    run.answer = answer  # type: ignore[method-assign]
    run.publish()
    run.check(*PROMPTS)


def test_an_aborted_completion_is_repeated(run: Run) -> None:
    run.publish()
    run.server.held = PROMPTS[0]
    with ThreadPoolExecutor() as threads:
        checked = threads.submit(run.check, *PROMPTS)
        assert run.server.holding.wait(20)
        run.server.held = None
        run.server.abort()
        checked.result(60)
    assert run.engine.pool.retries == 1


def test_a_worker_killed_while_it_copies_leaves_no_incomplete_directory(
    stack: ExitStack, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:3])
        raise KeyboardInterrupt

    engine = engine_of(stack, student, "sglang", GeneratingServer(student, end=0))
    writer = WeightsWriter(tmp_path / "weights")
    stack.callback(writer.close)
    writer.write(dict(AutoModelForCausalLM.from_pretrained(student).named_parameters()), Version(0, 1))
    vocabulary = Vocabulary([b"x"], torch.tensor([True]), frozenset({0}), 0)
    directory = tmp_path / "rollout-model"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "copyfile", dying)
        ServedSampler(engine, vocabulary, RolloutSpec(), student, directory, longest=64).load(tmp_path / "weights")
    ServedSampler(engine, vocabulary, RolloutSpec(), student, directory, longest=64).load(tmp_path / "weights")
    assert {file.name for file in directory.iterdir()} == {file.name for file in student.iterdir()}
    for file in student.iterdir():
        assert file.suffix == ".safetensors" or (directory / file.name).read_bytes() == file.read_bytes()


def test_a_token_that_is_no_text_cuts_a_completion(stack: ExitStack, student: Path, tmp_path: Path) -> None:
    def answer(method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        return 200, {}, VLLM["answer"]

    allowed = torch.tensor([True] * 8 + [False] * 8)
    vocabulary = Vocabulary([b"x"] * 16, allowed, frozenset({1}), 0)
    engine = engine_of(stack, student, "vllm", answer)
    sampler = ServedSampler(engine, vocabulary, RolloutSpec(), student, tmp_path / "model", longest=64)
    [row] = sampler.complete([np.array([5])], [0], lambda _: None)
    assert (row.ids, row.finished, row.log_probs) == ([7], False, [-0.5])
    # A server may know fewer ends than the run, and write on behind one of the others.
    sampler.vocabulary = dataclasses.replace(vocabulary, ends=frozenset({1, 7}))
    [row] = sampler.complete([np.array([5])], [0], lambda _: None)
    assert (row.ids, row.ends, row.log_probs) == ([7], True, [-0.5])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_does_not_see_the_directory(stack: ExitStack, student: Path, tmp_path: Path, kind: str) -> None:
    server = GeneratingServer(student, end=0)
    engine = engine_of(stack, student, kind, server)
    engine.pool.timeout_s = 0.5
    reason = "status 500: Internal server error;" if kind == "vllm" else "Failed to get model config:"
    with pytest.raises((EngineError, EngineRefusalError), match=f"{reason} let it see .* under the same path"):
        engine.load_weights(tmp_path, "1-0", engine.pool.replicas[0])
    assert not server.paused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"in_update": True}, None),
        ({"unpickles": False}, "Refusing to deserialize `ipc_handles_pickled` without VLLM_ALLOW_INSECURE"),
        ({"gpu": "another"}, "IPC handle not found for GPU UUID another"),
    ],
    ids=["broken-off", "pickle", "gpu"],
)
def test_a_vllm_that_does_not_open_the_memory(
    stack: ExitStack, student: Path, tmp_path: Path, gpu: None, change: dict[str, Any], reason: str | None
) -> None:
    run = Run(stack, student, tmp_path / "run", "vllm-ipc")
    vars(run.server).update(change)
    if reason is None:  # a worker was killed at this
        run.publish()
        run.check(*PROMPTS)
    else:
        with pytest.raises(EngineError, match=f"500: .*{reason}.*; start it with CUDA_VISIBLE_DEVICES=GPU-{GPU}, VLLM"):
            run.publish()
        assert run.server.seen.count("/update_weights") == vllm.LOADS  # a request is not repeated alone
    assert not (run.server.paused or run.server.in_update)


def test_a_vllm_that_hangs_in_an_update_is_not_waited_for_again(
    stack: ExitStack, student: Path, tmp_path: Path, gpu: None
) -> None:
    """Its worker would be killed as hung before it could say why."""
    run, release = Run(stack, student, tmp_path / "run", "vllm-ipc"), threading.Event()
    stack.callback(release.set)

    def answer(*request: Any) -> Answer:
        if request[1] == "/start_weight_update":
            run.engine.pool.timeout_s = 0.5
        if run.server.in_update and request[1] != "/metrics":  # its engine hangs, not what answers requests
            release.wait(30)
        return run.server(*request)

    run.answer = answer  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=f"no answer.*; start it with CUDA_VISIBLE_DEVICES=GPU-{GPU}, VLLM"):
        run.publish()
    assert [path for path in run.server.seen if path in ("/metrics", "/pause")] == ["/metrics", "/pause"]


@pytest.mark.gpu
def test_another_process_opens_the_memory_as_vllm_does(student: Path) -> None:
    """One server for two versions by the same handles, and one that is started again for the third."""
    model: Any = AutoModelForCausalLM.from_pretrained(student).cuda()
    made, servers = served.share(model), [opening() for _ in range(2)]
    for version, server in enumerate((servers[0], servers[0], servers[1])):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(1.0)
        assert served.share(model, made) is made
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(made.update), file=server.stdin, flush=True)
        expected = {name: weight.double().mean().item() for name, weight in model.named_parameters()}
        assert json.loads(server.stdout.readline()) == pytest.approx(expected)
        if version:
            assert server.communicate(timeout=60)[0] == "" and server.returncode == 0


def opening() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", OPENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


OPENS = """
import base64, json, pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
gpu = str(torch.cuda.get_device_properties(0).uuid)
for line in sys.stdin:
    update, means = json.loads(line), {}
    handles = pickle.loads(base64.b64decode(update["ipc_handles_pickled"]))
    rows = zip(update["names"], update["shapes"], update["dtype_names"], handles, strict=True)
    for name, shape, dtype, handle in rows:
        arguments = list(handle[gpu])
        arguments[6] = 0  # the receiver's number of the GPU
        weight = rebuild_cuda_tensor(*arguments)
        assert list(weight.shape) == shape and weight.dtype == getattr(torch, dtype)
        means[name] = weight.double().mean().item()
    del weight
    print(json.dumps(means), flush=True)
"""


def test_a_server_without_versions_is_refused(stack: ExitStack, student: Path) -> None:
    def answer(method: str, path: str, body: Any, headers: dict[str, str]) -> Answer:
        return 200, {}, {"success": True}

    engine = engine_of(stack, student, "sglang", answer)
    with pytest.raises(EngineRefusalError, match="names its weights None, not '1-0': use an SGLang that"):
        engine.load_weights(student, "1-0", engine.pool.replicas[0])


def test_servers_with_several_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="one worker updates the servers"):
        RolloutSpec(url="http://a:1", workers=2)
