"""API against its OpenAPI description, by generated requests: no server errors, no undescribed responses."""

import tempfile
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.examples import examples
from tests.unit.control.stored_runs import make_runs, put
from xtoken_services.common.run.status import RunState
from xtoken_services.control.app import create_app
from xtoken_services.control.auth import Auth

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
PLACE = Path(tempfile.mkdtemp(prefix="xtoken-test-"))
RUNS = make_runs(PLACE)
put(RUNS, "old-1")
put(RUNS, "old-2", RunState.FAILED)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", create_app(RUNS, Auth(names=frozenset({"testserver"}))))
COMMON = {
    "deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True,
    "phases": [Phase.explicit, Phase.generate], "database": None,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def let_go():
    import shutil

    yield
    RUNS.close()
    shutil.rmtree(PLACE)


def check(case: schemathesis.Case) -> None:
    """Send a request, for an existing run as often as for a missing one."""
    if "run_id" in case.path_parameters and len(case.path_parameters["run_id"]) % 2:
        # Resuming a failed run would begin it anew; only one that is complete is asked about.
        case.path_parameters["run_id"] = "old-1"
    if case.method == "DELETE":
        case.path_parameters["run_id"] = "none"
    case.call_and_validate(checks=CHECKS, excluded_checks=[])


@SCHEMA.parametrize()
@examples(6, 300, **COMMON)
def test_api_matches_its_description(case: schemathesis.Case) -> None:
    check(case)
