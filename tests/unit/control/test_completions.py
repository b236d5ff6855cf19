"""The page of completions: tokens of both sides, colours of the divergence, files of another shape."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.unit.control.stored_runs import put
from xtoken_services.control.runs import Runs

SIDE = {
    "student": [["1+1", -1], ["=<", 4], ["2", 5]], "teacher": [["1", -1], ["+1", -1], ["=<", 4], ["2", 5]],
    "divergence": {"4": 0.005, "5": 2.5},
}  # fmt: skip


def test_tokens_have_the_colour_of_their_chunks_divergence(runs: Runs, client: TestClient) -> None:
    output = put(runs)
    (output / "rollouts.json").write_text(json.dumps({"samples": [{"step": 7, "version": 6, "teachers": [SIDE]}]}))
    text = client.get("/runs/old-1/rollouts").text
    assert "Step 7" in text
    assert "by the weights of step 6" in text
    assert '<span class="token h0" title="0.005 nats">=&lt;</span>' in text
    assert '<span class="token h5" title="2.500 nats">2</span>' in text
    assert '<span class="token none">1+1</span>' in text
    part = client.get("/runs/old-1/rollouts", headers={"HX-Request": "true"}).text
    assert part.lstrip().startswith('<div id="rollouts"')


@pytest.mark.parametrize(
    "content", [{}, {"samples": 1}, {"samples": [{"step": 1, "version": 0, "teachers": [{**SIDE, "student": [1]}]}]}]
)
def test_a_file_of_another_shape_shows_none(runs: Runs, client: TestClient, content: dict[str, Any]) -> None:
    (put(runs) / "rollouts.json").write_text(json.dumps(content))
    found = client.get("/runs/old-1/rollouts")
    assert found.status_code == 200
    assert "No completion yet." in found.text


def test_only_runs_with_rollouts_have_the_tab(runs: Runs, client: TestClient) -> None:
    put(runs)
    assert 'href="/runs/old-1/rollouts"' not in client.get("/runs/old-1").text
