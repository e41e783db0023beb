"""The end of a server: no request that was accepted is lost, and new ones are told to go elsewhere."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.servers import HANG_SECONDS, RunningServer, StepGate
from support.toy_models import END_ID

LONG = {"model": "letters", "input": "hello", "suppress_tokens": [END_ID]}


@pytest.fixture
def server(files):
    with RunningServer({"letters": files["letters"]}, max_batch_size=2, drain_seconds=HANG_SECONDS) as running:
        yield running


def test_accepted_requests_finish_and_new_ones_are_refused(server, references):
    expected = references["letters"].generate("hello", suppress_tokens=[END_ID]).text
    with StepGate.closed(server.models["letters"].model) as gate, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(server.post, "/v1/generate", {**LONG, "stream": i == 0}) for i in range(4)]
        server.wait_for("tformer_open_requests", 4)  # two run and two wait
        gate.wait_until_reached()
        server.drain()
        with server.http() as client:
            ready = client.get("/health/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
            assert client.get("/health/live").status_code == 200
            refused = client.post("/v1/generate", json=LONG)
            assert refused.status_code == 503
            assert refused.headers["Retry-After"] == "1"
            assert refused.headers["Connection"] == "close"
            assert refused.json()["error"]["message"] == "the server is stopping: send the request to another"
        gate.open()
        streamed, *whole = [answer.result(HANG_SECONDS) for answer in answers]
    assert [answer.json()["results"][0]["text"] for answer in whole] == [expected] * 3
    pieces = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
    assert "".join(piece.get("text", "") for piece in pieces) == expected
    assert streamed.text.endswith("data: [DONE]\n\n")
    server.wait_for_end()


def test_requests_that_outlast_the_draining_end_with_an_error(files):
    with (
        RunningServer({"letters": files["letters"]}, drain_seconds=0) as server,
        StepGate.closed(server.models["letters"].model) as gate,
        ThreadPoolExecutor(2) as pool,
    ):
        answers = [pool.submit(server.post, "/v1/generate", {**LONG, "stream": i == 0}) for i in range(2)]
        server.wait_for("tformer_open_requests", 2)
        gate.wait_until_reached()
        server.drain()
        gate.open()  # the thread that decodes ends between two steps
        streamed, whole = [answer.result(HANG_SECONDS) for answer in answers]
        server.wait_for_end()
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "stopping"
    last = streamed.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"


def test_idle_server_ends_at_once(server):
    server.drain()
    server.wait_for_end()
