"""Requests and answers beside the fields that the programs' own packages declare, read from their source.

Needs the packages vllm and sglang, installed or unpacked (`pip download --no-deps`, `unzip`) below the directory that
XTOKEN_ENGINE_SOURCES names: `vllm/`, `sglang/`. Nothing of them is imported.
"""

from __future__ import annotations

import ast
import base64
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.engine_server import flat_top_logprobs
from tests.unit.common.http_engine import recorded
from tests.unit.rollout import test_served
from xtoken_services.common.http_engine import engine, sglang, vllm

COMPLETION = "entrypoints/openai/completion/protocol.py"
IO = "srt/managers/io_struct.py"


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


def test_vllm_tells_when_its_process_was_started() -> None:
    assert "    return REGISTRY" in source("vllm", "v1/metrics/prometheus.py")
    text = pytest.importorskip("prometheus_client").generate_latest()
    assert 1e9 < float(vllm.START.search(text)[1]) <= time.time()


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


def test_sglang_updates_weights_by_the_same_calls() -> None:
    sent = {"model_path", "flush_cache", "weight_version"}
    assert sent <= fields("sglang", IO, "UpdateWeightFromDiskReqInput")
    assert "mode" in fields("sglang", IO, "PauseGenerationReqInput")
    routes = source("sglang", "srt/entrypoints/http_server.py")
    assert all(f'"{path}"' in routes for path in ("/pause_generation", "/continue_generation", "/model_info"))
    assert '"weight_version"' in routes
