"""The board asks only for what is there: every name in it is in an answer of a control plane or of a queue."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from prometheus_client import generate_latest

from xtoken_core.queue.any_partition import any_partition
from xtoken_core.queue.engine import Engine
from xtoken_services.control.app import create_app
from xtoken_services.control.runs import Runs
from xtoken_services.queue.metrics import Metrics
from xtoken_services.trainer import loop

DEPLOY = Path(__file__).parents[3] / "deploy"
BOARD = DEPLOY / "grafana" / "boards" / "xtoken.json"
PROVISIONING = DEPLOY / "grafana" / "provisioning"


def parsed(path: Path) -> Any:
    """What a YAML file says."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BOARD.read_text(encoding="utf-8"))
    return found


def questions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every panel's title and what it asks, and what the choice of runs is filled from."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        yield variable["label"], variable["query"]["query"]


def served(text: str) -> set[str]:
    """The names of the series in an answer, also of those that have no value yet."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        endings = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + ending for ending in endings}
    return names


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a control plane and a queue answer at `/metrics`."""
    with TestClient(create_app(Runs(tmp_path_factory.mktemp("runs"))), base_url="http://127.0.0.1") as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    engine = Engine(memory_limit=1 << 20, clock=time.monotonic, opens=any_partition)
    metrics = Metrics(0)
    with ThreadPoolExecutor(1) as scrapes:
        scrape = scrapes.submit(generate_latest, metrics.registry)
        while not scrape.done():
            metrics.serve(engine)
    metrics.close()
    queue = scrape.result().decode()
    return served(answer.text) | served(queue)


def test_every_series_on_the_board_is_served(board: dict[str, Any], names: set[str]) -> None:
    asked = {name for _, question in questions(board) for name in re.findall(r"\bxtoken_\w+", question)}
    assert len(asked) > 20
    assert asked <= names, sorted(asked - names)


def test_every_panel_asks_something(board: dict[str, Any]) -> None:
    silent = [p["title"] for p in board["panels"] if p["type"] != "row" and not p["targets"]]
    assert silent == []
    assert all("xtoken_" in question for _, question in questions(board))


def test_every_figure_of_a_step_on_the_board_is_one_of_the_trainers(board: dict[str, Any]) -> None:
    patterns = [m for _, question in questions(board) for m in re.findall(r'metric=~?"([^"]+)"', question)]
    figures = {figure for pattern in patterns for figure in pattern.split("|")}
    source = "".join(path.read_text(encoding="utf-8") for path in _sources_of_figures())
    assert figures
    assert [figure for figure in figures if f'"{figure}"' not in source] == []


def _sources_of_figures() -> list[Path]:
    core = Path(__file__).parents[3] / "xtoken_core"
    return [*Path(loop.__file__).parent.glob("*.py"), *core.rglob("losses/**/*.py")]


def test_panels_do_not_overlap_and_have_an_id_each(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_board_reads_the_source_that_is_provisioned(board: dict[str, Any]) -> None:
    (source,) = parsed(PROVISIONING / "datasources" / "prometheus.yml")["datasources"]
    used = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
    (compose,) = (parsed(DEPLOY.parent / "docker-compose.yml")["services"]["grafana"],)
    assert source["url"].removeprefix("$") in compose["environment"]


def test_the_board_lies_where_its_provider_looks() -> None:
    (provider,) = parsed(PROVISIONING / "dashboards" / "xtoken.yml")["providers"]
    grafana = parsed(DEPLOY.parent / "docker-compose.yml")["services"]["grafana"]
    mounted = dict(reversed(volume.split(":")[:2]) for volume in grafana["volumes"] if volume.startswith("./"))
    assert (DEPLOY.parent / mounted[provider["options"]["path"]] / BOARD.name).samefile(BOARD)
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert home == Path(provider["options"]["path"]) / BOARD.name


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("prometheus.yml", "/cache/.config/xtoken/control.token"),
        ("prometheus.remote.yml", "/run/secrets/control-token"),
    ],
)
def test_prometheus_reads_the_control_plane_and_a_queue(name: str, token: str) -> None:
    jobs = {job["job_name"]: job for job in parsed(DEPLOY / "prometheus" / name)["scrape_configs"]}
    settings = (DEPLOY.parent / ".env").read_text(encoding="utf-8")
    (port,) = re.findall(r"^XTOKEN_PORT=(\d+)$", settings, re.MULTILINE)
    assert jobs["xtoken"]["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
    assert set(jobs) == {"xtoken", "xtoken-queue"}
    assert jobs["xtoken"]["authorization"] == {"credentials_file": token}
