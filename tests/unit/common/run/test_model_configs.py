"""Configurations of models that no library has written: whatever their values, the answer is one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.control.stored_runs import spec
from xtoken_core.config.spec import RunSpec
from xtoken_core.errors import XtokenError
from xtoken_services.common.models.packable import why_not_packed
from xtoken_services.common.run import resolve

ODD: list[Any] = [None, True, -1, 10**30, 1e999, "x" * 1000, [], [[]], {}, {"vocab_size": []}]
KEYS = ("model_type", "vocab_size", "text_config", "n_positions", "max_position_embeddings", "rope_scaling",
        "attn_logit_softcapping", "hidden_size", "original_max_position_embeddings")  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: json.dumps(odd)[:20])
@pytest.mark.parametrize("key", KEYS)
def test_odd_value(tmp_path: Path, key: str, odd: Any) -> None:
    model = RunSpec.model_validate(spec(tmp_path)).student
    model.model.mkdir(parents=True)
    config = {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64, "rope_scaling": {"type": odd}}
    (model.model / "config.json").write_text(json.dumps({**config, key: odd}))
    assert "\n" not in str(why_not_packed({**config, key: odd}, 64))
    with pytest.raises(XtokenError) as refused:  # there are neither weights nor a tokenizer
        resolve._model("student", model)
    assert "\n" not in str(refused.value)
    try:
        for scaling in (
            {"rope_scaling": odd},
            {"rope_scaling": {"factor": odd, "original_max_position_embeddings": odd}},
        ):
            resolve._check_context("student", model, {**config, key: odd, **scaling})
    except XtokenError as error:
        assert "\n" not in str(error)
