"""Whole runs on inputs that are fetched or converted: ids of a Hub on this machine, and GGUF files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from tests.architecture.conftest import ROOT
from tests.support.hub_server import hub_server
from tests.support.tiny_run import TinyAssets, documents, steps_of, write_jsonl
from xtoken_core.chain.files import read_tables

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS = """
[train]
samples_per_step = 8
micro_batch_tokens = 320
max_steps = 4
learning_rate = 3e-3
[workers]
collators = 1
device = "cpu"
"""


def run(directory: Path, tables: str, **environment: str) -> dict[str, Any]:
    """Run a run file with these tables by the command; return its summary."""
    file = directory / "run.toml"
    file.write_text(f'output = "out"\neval = "none"\n{tables}{SETTINGS}', encoding="utf-8")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(directory / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-m", "xtoken_services.cli", "run", str(file)], cwd=ROOT, env=variables, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert len(steps_of(directory / "out")) == 4
    summary: dict[str, Any] = json.loads((directory / "out" / "summary.json").read_text(encoding="utf-8"))
    return summary


def test_models_and_text_of_a_hub_and_a_push_to_it(assets: TinyAssets, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text" / "train-0.jsonl", documents(40, seed=2))
    pairs = {"<pad>": "<|pad|>"}
    with hub_server() as hub:
        hub.add("models/org/student", assets.student)
        wanted = hub.add("models/org/teacher", assets.teacher, "v2")
        hub.add("models/org/teacher", assets.other_teacher)
        hub.add("datasets/org/text", tmp_path / "text")
        summary = run(
            tmp_path,
            'push_to = "me/distilled"\n[student]\nmodel = "org/student"\ncontext_length = 64\n'
            '[teacher]\nmodel = "org/teacher@v2"\ncontext_length = 96\nspecial_tokens = {"<pad>" = "<|pad|>"}\n'
            '[data]\npath = "org/text"\n',
            HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path / "home"), HF_TOKEN="hf_secret",
        )  # fmt: skip
    model = tmp_path / "out" / "model"
    assert summary["trained"] == 32 and summary["pushed"] == {"repo": "me/distilled", "commit": "a" * 40}
    pushed = hub.uploads["me/distilled"]
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
        assert pushed[name] == (model / name).read_bytes(), name
    card = pushed["README.md"].decode()
    assert 'base_model: "org/student"' in card and "org/teacher" in card and str(tmp_path) not in card
    assert hub.tokens == {"Bearer hf_secret"}
    spec = json.loads((tmp_path / "out" / "spec.json").read_text())
    assert spec["hub"]["org/teacher@v2"] == wanted != hub.commits["models/org/teacher"]["main"]
    assert wanted in spec["teacher"][0]["model"]

    (file,) = (tmp_path / "cache" / "xtoken" / "chain").glob("*.safetensors")
    tables = read_tables(file)
    ids = [
        AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(token)
        for directory, token in zip((assets.student, assets.teacher), *pairs.items(), strict=True)
    ]
    assert int(tables.student.root[ids[0]]) == int(tables.teacher.root[ids[1]]) != tables.classes


def test_gguf_files_on_both_sides(assets: TinyAssets, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    from tests.support.gguf_file import write_gguf

    weights = {
        side: write_gguf(directory, tmp_path / f"{side}.gguf")
        for side, directory in (("student", assets.other_teacher), ("teacher", assets.teacher))
    }
    write_jsonl(tmp_path / "text.jsonl", documents(40, seed=2))
    summary = run(
        tmp_path,
        '[student]\nmodel = "student.gguf"\ncontext_length = 64\n[teacher]\nmodel = "teacher.gguf"\n'
        'context_length = 96\n[data]\npath = "text.jsonl"\n',
    )  # fmt: skip
    assert summary["trained"] == 32
    for side, written in weights.items():
        (converted,) = (tmp_path / "cache" / "xtoken" / "gguf").glob(f"{side}-*")
        read = load_file(converted / "model.safetensors")
        for name, value in written.items():
            if name in read:  # tied heads are stored once
                np.testing.assert_array_equal(read[name], value, err_msg=name)
        assert len(read) >= len(written) - 1
    trained = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert not np.array_equal(
        trained["model.embed_tokens.weight"].astype("float32"), weights["student"]["model.embed_tokens.weight"]
    )
