"""Runs in a directory, and a client of the control plane that has them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.unit.control.stored_runs import HERE, make_runs
from xtoken_services.control.app import create_app
from xtoken_services.control.runs import Runs


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = make_runs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(runs: Runs) -> TestClient:
    return TestClient(create_app(runs), base_url=HERE, headers={"Origin": HERE}, follow_redirects=False)
