"""Runs whose teacher is behind an address: all processes are real, and so is the model that answers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Crew
from tests.support.engine_server import ModelHandler, serving
from tests.support.tiny_run import TinyAssets, steps_of, tiny_spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.teacher_store.store import TeacherStore
from xtoken_services.common.run.status import RunState
from xtoken_services.common.stores.store_build import build_spec
from xtoken_services.supervisor.local_run import run_to_end
from xtoken_services.supervisor.store_build import store_build

Start = Callable[[RunSpec], Crew]
TOPK = 64


def losses(spec: RunSpec, start: Start) -> torch.Tensor:
    """The losses of a run that ended well."""
    start(spec).complete()
    return torch.tensor([line["loss"] for line in steps_of(spec.output)])


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "packing"), [("vllm", "on"), ("sglang", "off")])
def test_a_run_with_a_served_teacher_equals_one_with_its_weights(
    assets: TinyAssets, tmp_path: Path, start: Start, engine: str, packing: str
) -> None:
    teacher = {"model": assets.teacher, "context_length": 96, "projection": assets.projection, "topk": TOPK}
    changes = {"loss": {"vocab_topk": None, "temperature": 1.0}, "train": {"packing": packing}}
    loaded = tiny_spec(assets, tmp_path, records=32, teacher=[teacher | {"content": "topk"}], **changes)
    expected = losses(loaded, start)
    servers = [ModelHandler(assets.teacher, busy=3), ModelHandler(assets.teacher)]
    with serving(servers[0]) as first, serving(servers[1]) as second:
        weightless = tmp_path / "weightless"
        weightless.mkdir()
        for file in assets.teacher.iterdir():
            if file.suffix != ".safetensors":
                (weightless / file.name).symlink_to(file)
        served = teacher | {"model": weightless, "url": [first, second], "url_engine": engine}
        run = tiny_spec(assets, tmp_path, records=32, teacher=[served], output=tmp_path / "served", **changes)
        torch.testing.assert_close(losses(run, start), expected, rtol=1e-4, atol=1e-5)
        store = str(tmp_path / "store")
        built = run_to_end(store_build(build_spec(run, None, store), store, run=run), show=False)
        assert (built.state, len(TeacherStore.open(store).entries)) == (RunState.COMPLETED, 32), built.error
    assert sum(line["served_requests"] for line in steps_of(tmp_path / "store" / "build")) >= 32
    lines = steps_of(run.output)
    answered, repeated = (sum(line[f"served_{name}"] for line in lines) for name in ("requests", "retries"))
    assert answered >= 32 and repeated == 3
    assert all(line["served_bytes"] > 0 and line["served_wait_seconds"] > 0 for line in lines)
    assert all(len(server.seen) > 4 for server in servers)


@pytest.mark.slow
def test_a_server_of_another_tokenizer_ends_the_run(assets: TinyAssets, tmp_path: Path, start: Start) -> None:
    with serving(ModelHandler(assets.other_teacher)) as url:
        teacher = {"model": assets.teacher, "context_length": 96, "projection": assets.projection, "url": url}
        changes = {"loss": {"vocab_topk": None, "temperature": 1.0}}
        ending = start(tiny_spec(assets, tmp_path, records=16, teacher=[teacher], **changes)).join()
    assert ending.state == RunState.FAILED
    assert "let both have the same tokenizer" in ending.error
