"""The page of a run beside others, and runs beside their baselines."""

import json
import re
from pathlib import Path

from fastapi.testclient import TestClient

from tests.support.evaluations import measured
from tests.unit.control.stored_runs import put, spec
from xtoken_core.config.spec import CROSS_ENTROPY_ONLY, RunSpec
from xtoken_services.control.runs import Runs
from xtoken_services.control.web.compare_page import differing_settings

RUNS = ("a", "a-baseline")


def test_baseline_of_a_shell_is_listed(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    output = put(runs, "a")
    assert "Train its baseline" in client.get("/runs/a").text
    made = output.with_name("a-baseline")
    made.mkdir()
    (made / "summary.json").write_text("{}")
    page = client.get("/runs/a").text
    assert "Compare with its baseline" in page and "Train its baseline" not in page

    assert client.post("/runs/a/baseline").status_code == 409  # without its specification
    (made / "summary.json").write_text('{"steps": 2, "positions": 4000, "stopped_early": "no better"}')
    (made / "spec.json").write_text(json.dumps(spec(tmp_path, output=str(output), teacher=[])))
    refused = client.post("/runs/a/baseline")
    assert refused.status_code == 409 and "belongs to the run a" in refused.text
    (made / "spec.json").write_text(json.dumps(spec(tmp_path, output=str(made), teacher=[])))
    (made / "eval.jsonl").write_text('{"step": 2, "bits_per_byte": 1.5}\n')
    shown = client.get(client.post("/runs/a/baseline").headers["location"]).text
    assert "1.5000" in shown and "completed" in shown
    listed = runs.store.run_with_output(made)
    assert listed is not None and listed.step == 2 and listed.steps is not None and listed.steps > 2
    assert "loss.mode" not in shown  # which a run without a teacher does not read


def test_a_run_on_completions_alone_has_no_baseline(client: TestClient, runs: Runs, tmp_path: Path) -> None:
    output = put(runs, "a")
    settings = spec(
        tmp_path, output=str(output), rollout={"max_new_tokens": 2}, student={"model": "/m", "context_length": 16}
    )
    runs.store.change("a", spec=RunSpec.model_validate(settings).model_dump(mode="json"))
    assert "Train its baseline" not in client.get("/runs/a").text
    refused = client.post("/runs/a/baseline")
    assert refused.status_code == 422 and "rollout.fraction = 1" in refused.text


def test_comparison_of_a_run_with_its_baseline(client: TestClient, runs: Runs) -> None:
    for name, bits, changes in (("a", 1.25, {}), ("a-baseline", 1.5, {"teacher": [], "loss": CROSS_ENTROPY_ONLY})):
        output = put(runs, name)
        sample = {"prompt": "Once <b>", "completion": f" upon {name}"}
        (output / "eval.jsonl").write_text(json.dumps(measured(bits, 4, samples=[sample])) + "\n")
        complete = RunSpec.model_validate({**spec(output.parents[1], output=str(output)), **changes})
        runs.store.change(name, name=name, spec=complete.model_dump(mode="json"))
    page = client.get("/compare", params={"run": ["a", "a-baseline"]}).text
    assert "better by 0.2500" in page
    samples = page[page.index('id="compared-samples"') :]
    assert samples.count("<b>Once &lt;b&gt;</b>") == 1
    assert [re.search(rf">{name}</span><span> upon (\S+)</span>", samples)[1] for name in RUNS] == list(RUNS)  # type: ignore[index]
    differing = page[page.index('id="differing"') :]
    assert "teacher.model" in differing and "loss.kl_loss_weight" in differing and "loss.mode" not in differing
    assert "student.model" not in differing and "output" not in differing
    assert 'href="/compare?run=a&amp;run=a-baseline"' in client.get("/runs/a").text
    assert client.get("/compare").status_code == 200
    assert client.get("/compare?run=nothing").status_code == 404
    assert client.get("/compare", params={"run": [f"r-{i}" for i in range(7)]}).status_code == 400
    fragment = client.get("/compare?run=a", headers={"HX-Request": "true"}).text
    assert fragment.lstrip().startswith("<section")


def test_a_single_teacher_has_no_number_in_a_comparison(tmp_path: Path) -> None:
    one = spec(tmp_path)
    other = {**one, "teacher": [{**one["teacher"][0], "context_length": 9}]}
    assert differing_settings({"a": one, "b": other}) == {"teacher.context_length": ["8", "9"]}
    two = {**one, "teacher": one["teacher"] * 2}
    assert "teacher.1.model" in differing_settings({"a": one, "b": two})
