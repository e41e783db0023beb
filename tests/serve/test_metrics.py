"""Metrics, ids of requests, and logs, which have no prompts."""

from __future__ import annotations

import json
import logging

import pytest
from support.servers import RunningServer, StepGate
from support.toy_models import END_ID

from tformer_serve.logs import JsonFormatter

BODY = {"model": "letters", "input": "secretword", "max_new_tokens": 6, "suppress_tokens": [END_ID]}


@pytest.fixture
def server(files):
    with RunningServer({"letters": files["letters"]}) as running:
        yield running


@pytest.fixture
def lines(caplog):
    """Return a function that returns the lines of the log so far, as objects."""
    caplog.set_level(logging.INFO, "tformer_serve")
    formatter = JsonFormatter()
    return lambda: [json.loads(formatter.format(record)) for record in caplog.records]


def test_requests_tokens_and_times_are_counted(server):
    for stream in (False, True, False):
        server.post("/v1/generate", {**BODY, "stream": stream})
    server.post("/v1/generate", {**BODY, "top_k": -1})
    server.post("/v1/nothing", BODY)
    server.wait_for("tformer_requests_total", 3, route="/v1/generate", outcome="ok")
    assert server.metric("tformer_requests_total", route="/v1/generate", outcome="invalid") == 1
    assert server.metric("tformer_requests_total", route="other", outcome="invalid") == 1
    assert server.metric("tformer_prompt_tokens_total", model="letters") == 3 * (1 + len("secretword"))
    assert server.metric("tformer_generated_tokens_total", model="letters") == 3 * 6
    assert server.metric("tformer_time_to_first_token_seconds_count", model="letters") == 3
    assert server.metric("tformer_time_per_token_seconds_count", model="letters") == 3
    assert server.metric("tformer_request_seconds_count", route="/v1/generate") == 4
    assert server.metric("tformer_time_to_first_token_seconds_sum", model="letters") > 0
    assert server.metric("tformer_max_batch_size", model="letters") == 8
    assert server.metric("process_resident_memory_bytes") > 1e6


def test_no_client_makes_new_labels(server):
    with server.http() as client:
        before = len(client.get("/metrics").text)
        for i in range(5):
            client.post(f"/v1/other{i}", json={})
            client.post("/v1/generate", json={**BODY, "model": f"other{i}"})
            client.get(f"/v1/models/other{i}")
        text = client.get("/metrics").text
    assert "other0" not in text
    assert len(text) < before + 20_000


def test_rows_and_caches_are_seen_while_they_are_in_use(server):
    with StepGate.closed(server.models["letters"].model) as gate, server.http() as client:
        with client.stream("POST", "/v1/generate", json={**BODY, "stream": True}):
            gate.wait_until_reached()
            assert server.metric("tformer_running_rows", model="letters") == 1
            assert server.metric("tformer_waiting_requests", model="letters") == 0
            assert server.metric("tformer_cache_bytes", model="letters") > 0
            assert server.metric("tformer_open_requests") == 1
        gate.open()
    server.wait_for("tformer_running_rows", 0, model="letters")


def test_answer_has_the_id_of_its_request(server):
    assert server.post("/v1/generate", BODY, headers={"X-Request-Id": "my.id-1"}).headers["X-Request-Id"] == "my.id-1"
    made = [
        server.post("/v1/generate", BODY, headers=headers).headers["X-Request-Id"]
        for headers in ({}, {"X-Request-Id": "a b"}, {"X-Request-Id": '"}{'}, {"X-Request-Id": "a" * 200})
    ]
    assert len(set(made)) == 4
    assert all(id_.isalnum() and len(id_) == 32 for id_ in made)
    assert server.post("/v1/generate", {}, headers={"X-Request-Id": "bad"}).headers["X-Request-Id"] == "bad"


def test_log_has_requests_and_no_prompts(server, lines, caplog):
    answer = server.post("/v1/generate", BODY, headers={"X-Request-Id": "one"})
    server.post("/v1/generate", {**BODY, "input": "secretwordé"}, headers={"X-Request-Id": "two"})
    server.wait_for("tformer_requests_total", 1, outcome="invalid")
    first, second = [line for line in lines() if line["event"] == "request"]
    assert (first["request_id"], first["status"], first["model"]) == ("one", 200, "letters")
    assert (first["prompt_tokens"], first["completion_tokens"]) == (11, 6)
    assert (second["request_id"], second["status"]) == ("two", 400)
    assert first["seconds"] > 0
    for secret in ("secretword", answer.json()["results"][0]["text"]):
        assert not any(secret in json.dumps(line) for line in lines())


def test_log_has_bodies_if_it_may(files, lines):
    with RunningServer({"letters": files["letters"]}, log_prompts=True) as server:
        server.post("/v1/generate", BODY, headers={"X-Request-Id": "one"})
    (line,) = [line for line in lines() if line["event"] == "body"]
    assert line["request_id"] == "one"
    assert json.loads(line["body"]) == BODY


def test_unforeseen_error_is_logged_with_its_traceback(server, lines, monkeypatch, caplog):
    secret = "a secret of the client"

    def fail(*_):
        raise ZeroDivisionError(secret)

    monkeypatch.setattr(server.models["letters"].model, "settings", fail)
    answer = server.post("/v1/generate", BODY, headers={"X-Request-Id": "bad"})
    assert "a secret" not in answer.text
    (line,) = [line for line in lines() if line["event"] == "error"]
    assert (line["request_id"], line["level"]) == ("bad", "error")
    assert "ZeroDivisionError" in line["traceback"]
    assert "in fail" in line["traceback"]  # where it was raised
    assert not any(secret in json.dumps(line) for line in lines())
    (record,) = [record for record in caplog.records if record.getMessage() == "error"]
    assert secret in json.loads(JsonFormatter(quotes_prompts=True).format(record))["traceback"]


def test_every_line_of_the_log_is_one_line_of_json():
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "two\nlines %s \u2028", ("\n",), None)
    record.fields = {"value": "\r\n", "path": object}
    text = JsonFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert json.loads(text)["event"] == "two\nlines \n \u2028"
