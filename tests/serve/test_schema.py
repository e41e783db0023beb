"""Requests that schemathesis makes of the server's OpenAPI schema, right and wrong ones: none ends in a fault."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

EXAMPLES = {GenerationMode.POSITIVE: 4, GenerationMode.NEGATIVE: 4}  # of a path
MANY = {GenerationMode.POSITIVE: 420, GenerationMode.NEGATIVE: 840}  # more than 10,000 wrong bodies for all paths
MAY_REFUSE = (400, 401, 404, 405, 413, 422)


@pytest.fixture(scope="module")
def operations(task_server):
    with task_server.http() as client:
        schema = schemathesis.openapi.from_url(str(client.base_url.join("/openapi.json")))
    found = [operation.ok() for operation in schema.get_all_operations()]
    assert len([operation for operation in found if operation.body]) >= 12
    return [operation for operation in found if operation.body]


@pytest.mark.parametrize("counts", [EXAMPLES, pytest.param(MANY, marks=pytest.mark.thorough)], ids=["some", "many"])
def test_no_request_of_the_schema_ends_in_a_fault(task_server, task_files, operations, counts):
    names = [*task_files, "letters"]
    statuses = set()
    with task_server.http() as client:
        for operation in operations:
            for mode, count in counts.items():
                _send(operation, mode, names, str(client.base_url), statuses, count)
        assert client.get("/health/ready").status_code == 200
    assert statuses <= {200, *MAY_REFUSE}
    assert 400 in statuses


def _send(operation, mode, names, url, statuses, count):
    """Send `count` requests of one kind. Half of them name a model that is served."""

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode), st.sampled_from([*names, *[None] * len(names)]))
    def send(case, name):
        if name is not None and isinstance(case.body, dict):
            case.body["model"] = name
        response = case.call(base_url=url)
        statuses.add(response.status_code)
        assert response.status_code < 500, (operation.label, case.body, response.text[:500])

    send()
