"""What is sent to each program, what is read of its answers, and the check of its servers before a run.

Requests and answers beside the fields that the programs' own packages declare, read from their source.

Needs the packages vllm and sglang, installed or unpacked (`pip download --no-deps`, `unzip`) below the directory that
XTOKEN_ENGINE_SOURCES names: `vllm/`, `sglang/`. Nothing of them is imported; one function of SGLang runs by itself.
"""

import ast
import base64
import copy
import dataclasses
import json
import math
import os
import re
import shutil
import socket
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.doc_blocks import ROOT, fenced, shell_commands
from tests.support.engine_server import Answer, ModelHandler, flat_top_logprobs, serving
from tests.support.generating_server import FIELDS, GPU, shared
from tests.support.tiny_run import documents, make_model
from tests.unit.common.http_engine import recorded
from tests.unit.common.http_engine.recorded import SGLANG, VLLM
from tests.unit.rollout import test_served
from xtoken_core.config.served import ServedSpec
from xtoken_core.tokenizing import TextTokenizer
from xtoken_core.topk_logits import read_topk
from xtoken_core.transports.ring import TopKSettings
from xtoken_services.common.http_engine import engine, nccl_sender, sglang, vllm
from xtoken_services.common.http_engine.engine import Engine, Sampling
from xtoken_services.common.http_engine.errors import EngineError, EngineRefusalError, SampleRefusedError
from xtoken_services.common.http_engine.factory import open_engine
from xtoken_services.demo.vocabularies import train_teacher_tokenizer
from xtoken_services.rollout import served
from xtoken_services.teacher.base import HeldOutText
from xtoken_services.teacher.prepare import TeacherModel
from xtoken_services.teacher.served import ServedTeacher, check_servers

K = 8
RECORDED = {"vllm": ("/v1/completions", VLLM), "sglang": ("/generate", SGLANG)}
COMPLETION = "entrypoints/openai/completion/protocol.py"
IO = "srt/managers/io_struct.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one tokenizer, and one of another."""
    directory = tmp_path_factory.mktemp("models")
    for name, vocabulary in {"meant": 400, "stranger": 360}.items():
        train_teacher_tokenizer(documents(200, seed=1), directory / name, vocabulary=vocabulary)
    shutil.copytree(directory / "meant", directory / "other")
    for seed, name in enumerate(("meant", "other", "stranger")):
        make_model(directory / name, seed=seed, extra_rows=0)
    return {path.name: path for path in directory.iterdir()}


def text_of(directory: Path) -> TextTokenizer:
    return TextTokenizer(AutoTokenizer.from_pretrained(directory), "teacher")


def engine_of(stack: ExitStack, kind: str, directory: Path, *handlers: Any, **settings: Any) -> Engine:
    urls = tuple(stack.enter_context(serving(handler)) for handler in handlers)
    served = ServedSpec(url=urls, url_engine=kind, url_timeout_s=20.0, **settings)
    text = text_of(directory)
    engine = open_engine(served, "teacher.0", len(text.tokenizer))
    stack.callback(engine.pool.close)
    return engine


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_documented_answer(stack: ExitStack, models: dict[str, Path], kind: str) -> None:
    path, recorded = RECORDED[kind]
    seen: list[Any] = []

    def answer(method: str, to: str, body: Any, headers: dict[str, str]) -> Answer:
        seen.append((to, body))
        return 200, {}, recorded["models"] if to == "/v1/models" else recorded["answer"]

    engine = engine_of(stack, kind, models["meant"], answer)
    engine.vocab_size = 1 << 17
    model, listed = engine.served(engine.pool.replicas[0]), recorded["models"]["data"][0]
    assert (model.name, model.max_length) == (listed["id"], listed["max_model_len"])
    ids = recorded["request"].get("prompt") or recorded["request"]["input_ids"]
    scores = engine.score(ids, 2)
    assert seen[-1] == (path, recorded["request"])
    own = {"vllm": [-8.8187, -1.5526], "sglang": [-6.25, -0.582]}[kind]
    tops = {"vllm": [[374, 220], [315, 304], [279, 7249]], "sglang": [[220, 1156], [315, 3283], [279, 9625]]}[kind]
    np.testing.assert_allclose(scores.own[:-1], own)
    assert math.isnan(scores.own[-1])
    assert scores.ids.tolist() == tops
    assert (np.diff(scores.values, axis=1) < 0).all()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("change", ["own", "count", "number", "lack", "many"])
def test_an_answer_of_another_form(stack: ExitStack, models: dict[str, Path], kind: str, change: str) -> None:
    answer = copy.deepcopy(RECORDED[kind][1]["answer"])
    listed = answer["choices"][0]["prompt_logprobs"] if kind == "vllm" else answer["meta_info"]["input_token_logprobs"]
    if change == "own":
        listed[1] = {"7": {"logprob": -1.0}} if kind == "vllm" else [-1.0, 7, None]
    elif change == "count":
        listed.append(None)
    elif change == "number":
        listed[2] = {"315": {"logprob": 2.5}} if kind == "vllm" else ["a", 315, None]
    elif change == "many":  # k + 2 tokens of a position
        more = {str(token): {"logprob": -2.0} for token in (315, 7, 8, 9)}
        listed[2] = more if kind == "vllm" else [-1.0, 315, None, 7]
    else:
        (answer["choices"][0] if kind == "vllm" else answer["meta_info"]).clear()
    engine = engine_of(stack, kind, models["meant"], lambda *_: (200, {}, answer))
    recorded = RECORDED[kind][1]["request"]
    with pytest.raises(EngineRefusalError, match="an answer"):
        engine.score(recorded.get("prompt") or recorded["input_ids"], 2)


OWN = [[None, 1782, None], [-1, 6722, None], [-1, 315, None]]
ODD: list[Any] = [
    None, 7, "x", [], {}, {"choices": []}, {"choices": 7}, {"choices": [[]]}, {"choices": [{"logprobs": 5}]},
    {"choices": [{"prompt_logprobs": [None, 7, 7], "logprobs": []}]},
    {"choices": [{"prompt_logprobs": [None, {"3019": 1}, {"315": {"logprob": True}}]}]},
    {"choices": [{"prompt_logprobs": [None, {"3019": {"logprob": -1}}, {"315": {"logprob": -1}}],
                  "logprobs": {"top_logprobs": 3}}]},
    {"meta_info": []}, {"meta_info": {"input_token_logprobs": 5}},
    {"meta_info": {"input_token_logprobs": OWN, "input_top_logprobs": [None, [[-1, 5, None]], [[-1, 5, None]]]}},
    *({"meta_info": {"input_token_logprobs": OWN, **flat_top_logprobs([{5: -1.0}] * 2, 1, 3), **odd}} for odd in (
        {"input_top_logprobs_shape": [2, 2]}, {"input_top_logprobs_shape": [1 << 40, 1 << 40]},
        {"input_top_logprobs_shape": [-1, 1]}, {"input_top_logprobs_null_prefix": 0},
        {"input_top_logprobs_null_prefix": 2}, {"input_top_logprobs_idx_flat_b64": "AAAA"},
        {"input_top_logprobs_val_flat_b64": "?"}, {"input_top_logprobs_val_flat_b64": "AACAPwAAgD8="},
        {"input_top_logprobs_val_flat_b64_dtype": "float16"},
    )),
    {"meta_info": {"output_token_logprobs": 7, "finish_reason": "stop"}},
    {"meta_info": {"output_token_logprobs": [[-1, 1 << 60, None]], "finish_reason": {"type": "stop"}}},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_odd_answer_is_a_refusal(stack: ExitStack, models: dict[str, Path], kind: str) -> None:
    answers: list[Any] = []
    engine = engine_of(stack, kind, models["meant"], lambda *_: (200, {}, answers[0]))
    replica, recorded = engine.pool.replicas[0], RECORDED[kind][1]["request"]
    ids = recorded.get("prompt") or recorded["input_ids"]
    calls = [
        lambda: engine.served(replica), lambda: engine.tokenize("a", replica), lambda: engine.score(ids, 2),
        lambda: engine.complete(ids, Sampling(4, 0)),
    ]  # fmt: skip
    for odd in ODD:
        answers[:] = [odd]
        for call in calls:
            with pytest.raises(EngineRefusalError):
                call()


def check(engine: Engine, directory: Path, **changes: Any) -> None:
    check_servers(engine, text_of(directory), **({"k": K, "longest": 64, "own_suffices": False} | changes))


@pytest.mark.parametrize(("kind", "packed"), [("vllm", True), ("sglang", False)])
def test_a_served_model_gives_what_a_loaded_one_does(
    stack: ExitStack, models: dict[str, Path], kind: str, packed: bool
) -> None:
    directory = models["meant"]
    handlers = [ModelHandler(directory, busy=1), ModelHandler(directory, key="")]
    engine = engine_of(stack, kind, directory, *handlers)
    check(engine, directory)
    text = text_of(directory)
    samples = [ids.tolist()[:40] for ids in text.encode(documents(3, seed=3), specials=True)]
    settings = TopKSettings(K, engine.vocab_size, 1.0)
    teacher = ServedTeacher(engine, torch.device("cpu"), settings, engine.vocab_size)
    stack.callback(teacher.close)
    scores = teacher.score(samples, lambda _: None)
    parts = [(row, slice(0, len(ids))) for row, ids in enumerate(samples)]
    shape = torch.Size([3, 48, 2 * K + 4])
    if packed:
        at, parts, shape = 0, [], torch.Size([1, 128, 2 * K + 4])
        for ids in samples:
            parts.append((0, slice(at, at + len(ids))))
            at += len(ids)
    rows = teacher.rows(scores, parts, shape)  # type: ignore[arg-type]
    model = TeacherModel(AutoModelForCausalLM.from_pretrained(directory))
    for ids, (row, part) in zip(samples, parts, strict=True):
        slot = torch.empty(1, len(ids), 2 * K + 4)
        model.write_topk(torch.tensor([ids]), slot, settings)
        loaded, served = (read_topk(values, settings) for values in (slot, rows[row : row + 1, part]))
        torch.testing.assert_close(served.ids, loaded.ids)
        torch.testing.assert_close(served.log_probs(), loaded.log_probs(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(served.log_rest, loaded.log_rest, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(served.own[:, :-1], loaded.own[:, :-1], rtol=1e-4, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text_of_32 = HeldOutText(tokenizer, documents(3, seed=3), 32, batch_tokens=512, max_bytes=4096, packed=False)
    measured, by_server = (each.evaluate(text_of_32) for each in (model, teacher))
    # The server's windows are one token shorter: a request has the last target too.
    assert by_server.tokens == measured.tokens and by_server.bytes == measured.bytes
    longer = teacher.evaluate(dataclasses.replace(text_of_32, context_length=33))
    assert longer.bits_per_byte == pytest.approx(measured.bits_per_byte, rel=1e-4)
    assert longer.next_token_accuracy == measured.next_token_accuracy
    outside = read_topk(rows[:, -4:], settings)
    assert not outside.listed.any()
    assert (outside.log_rest == 0).all()
    assert all(handler.seen for handler in handlers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"most": 0}, "only the log-probability of the text's own tokens"),
        ({"most": 2}, r"lists [23] tokens of a position, and 8 are wanted"),
        ({"shift": 1}, "belong to other positions"),
        ({"max_length": 64}, "takes 64 tokens, one of them generated, and a sample may have 64"),
        ({"name": "another"}, "serves another: name the one that is meant"),
        ({"key": "sesame"}, "it takes another key"),
    ],
)
def test_a_server_that_is_refused(
    stack: ExitStack, models: dict[str, Path], changes: dict[str, Any], message: str
) -> None:
    directory = models["meant"]
    name = {"url_model": "served"} if "name" in changes else {}
    engine = engine_of(stack, "vllm", directory, ModelHandler(directory, **changes), **name)
    with pytest.raises(EngineRefusalError, match=message):
        check(engine, directory)


def test_alm_needs_only_the_texts_own_tokens(stack: ExitStack, models: dict[str, Path]) -> None:
    engine = engine_of(stack, "sglang", models["meant"], ModelHandler(models["meant"], most=0))
    check(engine, models["meant"], own_suffices=True)


def test_servers_of_other_models(stack: ExitStack, models: dict[str, Path]) -> None:
    other = engine_of(stack, "vllm", models["meant"], ModelHandler(models["meant"]), ModelHandler(models["other"]))
    with pytest.raises(EngineRefusalError, match="let all servers run the same model"):
        check(other, models["meant"])
    stranger = engine_of(stack, "vllm", models["meant"], ModelHandler(models["stranger"]))
    with pytest.raises(EngineRefusalError, match="let both have the same tokenizer"):
        check(stranger, models["meant"])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_one_sample_that_a_server_refuses(stack: ExitStack, models: dict[str, Path], kind: str) -> None:
    server = ModelHandler(models["meant"], max_length=20)
    engine = engine_of(stack, kind, models["meant"], server)
    teacher = ServedTeacher(engine, torch.device("cpu"), TopKSettings(K, engine.vocab_size, 1.0), 400)
    stack.callback(teacher.close)
    scores, refused = teacher.score([[1, 2, 3], [4] * 30], lambda _: None)
    assert len(scores.own) == 3  # type: ignore[union-attr]
    assert isinstance(refused, SampleRefusedError) and "maximum context length is 20" in str(refused)
    server.max_length = 1
    with pytest.raises(EngineRefusalError, match="status 400"):
        teacher.score([[1, 2, 3]], lambda _: None)


def test_a_stop_request_ends_the_wait(stack: ExitStack, models: dict[str, Path]) -> None:
    engine = engine_of(stack, "vllm", models["meant"], ModelHandler(models["meant"], delay_s=3.0))
    teacher = ServedTeacher(engine, torch.device("cpu"), TopKSettings(K, engine.vocab_size, 1.0), 400)

    def stop(answered: int) -> None:
        raise EngineError("stopped")

    with pytest.raises(EngineError, match="stopped"):
        teacher.score([[1, 2, 3]], stop)
    teacher.close()


def source(package: str, file: str) -> str:
    """The text of a file of a package; without the package the test is skipped."""
    sources, spec = os.environ.get("XTOKEN_ENGINE_SOURCES"), find_spec(package)
    folder = Path(sources) / package if sources else Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not folder.is_dir():
        pytest.skip(f"the package {package} is neither installed nor in XTOKEN_ENGINE_SOURCES")
    return (folder / file).read_text()


def fields(package: str, file: str, name: str) -> set[str]:
    """Fields of a class, or parameters of its `__init__`."""
    for node in ast.walk(ast.parse(source(package, file))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            made = {
                at.target.id for at in node.body if isinstance(at, ast.AnnAssign) and isinstance(at.target, ast.Name)
            }
            inits = [at for at in node.body if isinstance(at, ast.FunctionDef) and at.name == "__init__"]
            return made | {argument.arg for init in inits for argument in (*init.args.args, *init.args.kwonlyargs)}
    raise AssertionError(f"{package} has no class {name} in {file}")


def read(struct: Any) -> set[str]:
    return {field.name for field in msgspec.structs.fields(struct)}


@pytest.mark.parametrize("request_", [recorded.VLLM["request"], test_served.VLLM["request"]], ids=["score", "complete"])
def test_vllm_knows_every_field_of_a_request(request_: dict[str, Any]) -> None:
    assert set(request_) <= fields("vllm", COMPLETION, "CompletionRequest")


def test_vllm_gives_every_field_that_is_read() -> None:
    assert read(vllm._Choice) <= fields("vllm", COMPLETION, "CompletionResponseChoice")
    assert read(vllm._Generated) <= fields("vllm", COMPLETION, "CompletionLogProbs")
    assert read(engine._ListedModel) <= fields("vllm", "entrypoints/openai/engine/protocol.py", "ModelCard")


def test_vllm_updates_weights_by_the_same_calls() -> None:
    routes = source("vllm", "entrypoints/serve/dev/rlhf/api_router.py")
    assert all(part in routes for part in ('"/pause"', '"/resume"', '"wait"'))
    runner = source("vllm", "v1/worker/gpu_model_runner.py")
    assert "def reload_weights" in runner and "weights_path: str | None" in runner


def test_vllm_takes_handles_where_it_may_unpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own model of an update, which has no other parts of it; and by the names in its routes."""
    named = 'get("init_info")', 'get("is_checkpoint_format", True)', 'get("update_info")'
    paths = '"/init_weight_transfer_engine"', '"/start_weight_update"', '"/update_weights"', '"/finish_weight_update"'
    routes = source("vllm", "entrypoints/serve/dev/rlhf/api_router.py")
    assert all(part in routes for part in (*named, *paths))
    envs = SimpleNamespace(VLLM_ALLOW_INSECURE_SERIALIZATION=True)
    parts: dict[str, Any] = {"envs": envs, "base64": base64, "__name__": __name__}
    for file, name in (("base", "WeightTransferUpdateInfo"), ("ipc_engine", "IPCWeightTransferUpdateInfo")):
        define(f"weight_transfer/{file}", name, parts)
    monkeypatch.setattr(served, "reduce_tensor", shared)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=GPU))
    update = served.share(torch.nn.Linear(3, 2)).update
    taken = parts["IPCWeightTransferUpdateInfo"](**update)
    assert (taken.names, taken.shapes, taken.dtype_names) == (["weight", "bias"], [[2, 3], [2]], ["float32"] * 2)
    assert [list(handle) for handle in taken.ipc_handles] == [[GPU], [GPU]]
    envs.VLLM_ALLOW_INSECURE_SERIALIZATION = False
    with pytest.raises(ValueError, match="without VLLM_ALLOW_INSECURE_SERIALIZATION=1"):
        parts["IPCWeightTransferUpdateInfo"](**update)


def test_vllm_finds_the_id_of_a_communicator_and_takes_the_fields_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own code of the rendezvous at rank 1, which ends with a sum over all ranks."""
    parts: dict[str, Any] = {"__name__": __name__}
    for name in ("ncclUniqueId", "create_tcp_store", "StatelessProcessGroup"):
        define("device_communicators/pynccl_wrapper" if name == "ncclUniqueId" else "utils", name, parts)
    begin = source("vllm", "distributed/device_communicators/pynccl.py").partition("def destroy")[0]
    assert "group.broadcast_obj(self.unique_id, src=0)" in begin
    assert "data = torch.zeros(1, device=device)\n            self.all_reduce(data)" in begin
    assert '{"world_size": world_size}' in source("vllm", "entrypoints/serve/dev/rlhf/api_router.py")
    for name in ("NCCLWeightTransferInitInfo", "NCCLWeightTransferUpdateInfo"):
        assert FIELDS[name] <= fields("vllm", "distributed/weight_transfer/nccl_engine.py", name)
    for at in accumulate(("vllm", ".distributed", ".device_communicators", ".pynccl_wrapper")):
        monkeypatch.setitem(sys.modules, at, SimpleNamespace(**parts))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        _kept = nccl_sender.offer(os.dup(listener.fileno()), "127.0.0.1", port, bytes(range(128)))
    name = parts["StatelessProcessGroup"].create("127.0.0.1", port, rank=1, world_size=2).broadcast_obj(None, src=0)
    assert type(name) is parts["ncclUniqueId"] and bytes(name.internal) == bytes(range(128))


def define(file: str, name: str, parts: dict[str, Any]) -> None:
    """Run the definition of a class or function of vLLM, after its file's imports of Python's own modules and torch."""
    body = ast.parse(source("vllm", f"distributed/{file}.py")).body
    own = re.compile(rf"(import|from) ({'|'.join([*sys.stdlib_module_names, 'torch'])})\b")
    imports = [at for at in body if isinstance(at, (ast.Import, ast.ImportFrom)) and own.match(ast.unparse(at))]
    [node] = (at for at in body if isinstance(at, (ast.ClassDef, ast.FunctionDef)) and at.name == name)
    exec(compile(ast.Module([*imports, node], []), file, "exec"), parts)


def test_vllm_tells_when_its_process_was_started() -> None:
    assert "    return REGISTRY" in source("vllm", "v1/metrics/prometheus.py")
    assert 'name="vllm:prompt_tokens",' in source("vllm", "v1/metrics/loggers.py")
    prometheus = pytest.importorskip("prometheus_client")
    made = [time.time()]
    for engine_ in range(2):
        registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        counter = prometheus.Counter("vllm:prompt_tokens", "Tokens.", ["model_name", "engine"], registry=registry)
        counter.labels("m", str(engine_)).inc()
        start, created = vllm.PROCESS.findall(prometheus.generate_latest(registry))
        assert 1e9 < float(start[1]) <= time.time()
        made.append(float(created[1]))
    assert made[0] <= made[1] < made[2] <= time.time()


@pytest.mark.parametrize(
    "request_", [recorded.SGLANG["request"], test_served.SGLANG["request"]], ids=["score", "complete"]
)
def test_sglang_knows_every_field_of_a_request(request_: dict[str, Any]) -> None:
    assert set(request_) <= fields("sglang", IO, "GenerateReqInput")
    sampling = fields("sglang", "srt/sampling/sampling_params.py", "SamplingParams")
    assert set(request_["sampling_params"]) <= sampling


def test_sglang_gives_the_likeliest_tokens_as_they_are_read() -> None:
    """By its own function, which has no other parts of it."""
    tree = ast.parse(source("sglang", "srt/managers/tokenizer_manager.py"))
    name = "_build_flat_top_logprobs_fields_from_arrays"
    [function] = (at for at in tree.body if isinstance(at, ast.FunctionDef) and at.name == name)
    parts: dict[str, Any] = {"np": np, "pybase64": base64, "Any": Any, "Dict": dict}
    exec(compile(ast.Module([function], []), name, "exec"), parts)
    values, ids = np.array([[-0.5, -1.5], [-0.25, -2.0]], np.float32), np.array([[7, 8], [5, 1 << 17]], np.int32)
    made = {"input_token_logprobs": [], **parts[name]("input", values, ids, 1, return_b64=True)}
    first, tokens, log_probs = sglang._tops(sglang.read_scores(msgspec.json.encode({"meta_info": made})).meta_info, 3)
    assert (first, tokens.tolist(), log_probs.tolist()) == (0, ids.tolist(), values.tolist())
    assert made == {"input_token_logprobs": []} | flat_top_logprobs(
        [{7: -0.5, 8: -1.5}, {5: -0.25, 1 << 17: -2.0}], 2, 3
    )


def within(part: Any, whole: Any) -> bool:
    """Return whether JSON is another with entries of objects left out."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) == len(whole) and all(map(within, part, whole))
    return bool(part == whole)


def test_requests_and_answers_in_the_documents_are_the_recorded_ones() -> None:
    told = [json.loads(block) for block in fenced(ROOT / "docs/operations.md", "json")]
    records = (recorded.VLLM, test_served.VLLM, recorded.SGLANG, test_served.SGLANG)
    for record, request_, answer in zip(records, told[::2], told[1::2], strict=True):
        assert request_ == record["request"] and within(answer, record["answer"])
    decoders = (vllm.read_completion, vllm.read_completion, sglang.read_scores, sglang.read_completion)
    for decode, answer in zip(decoders, told[1::2], strict=True):
        assert decode(json.dumps(answer).encode())


def test_vllm_has_the_options_in_the_documents_and_guards_what_they_say() -> None:
    commands = [words for words in shell_commands(ROOT / "docs/operations.md") if words[:2] == ["vllm", "serve"]]
    told = {word[2:].replace("-", "_") for words in commands for word in words if word.startswith("--")}
    options = fields("vllm", "entrypoints/openai/cli_args.py", "FrontendArgs")
    options |= fields("vllm", "entrypoints/openai/cli_args.py", "BaseFrontendArgs")
    assert len(commands) == 2 and told <= options | fields("vllm", "config/model.py", "ModelConfig")
    guard = 'GUARDED_PREFIX = ("/v1", "/v2", "/inference")'
    assert guard in source("vllm", "entrypoints/serve/utils/server_utils.py")
    assert "if envs.VLLM_SERVER_DEV_MODE:" in source("vllm", "entrypoints/openai/api_server.py")


def test_sglang_updates_weights_by_the_same_calls() -> None:
    sent = {"model_path", "flush_cache", "weight_version"}
    assert sent <= fields("sglang", IO, "UpdateWeightFromDiskReqInput")
    assert "mode" in fields("sglang", IO, "PauseGenerationReqInput")
    routes = source("sglang", "srt/entrypoints/http_server.py")
    assert all(f'"{path}"' in routes for path in ("/pause_generation", "/continue_generation", "/model_info"))
    assert '"weight_version"' in routes
