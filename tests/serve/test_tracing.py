"""Spans of requests, collected by OpenTelemetry's own SDK."""

from __future__ import annotations

import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.toy_models import END_ID

from tformer_serve.middleware import tracing

BODY = {"model": "letters", "input": "secretword", "max_new_tokens": 6, "suppress_tokens": [END_ID]}
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # of the example of W3C's Trace Context


@pytest.fixture
def spans(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "TRACER", provider.get_tracer("test"))

    def wait_for(count):
        """Return the finished spans. A client may have its answer before the span ends."""
        while len(exporter.get_finished_spans()) < count:
            time.sleep(0.01)
        return exporter.get_finished_spans()

    return wait_for


def test_request_is_a_span_of_the_clients_trace(server, spans):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    with server.http() as client:
        assert client.post("/v1/generate", json=BODY, headers=headers).status_code == 200
        client.get("/metrics")
        client.get("/health/live")
    (span,) = spans(1)
    assert (span.name, span.kind) == ("POST /v1/generate", SpanKind.SERVER)
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    attributes = dict(span.attributes)
    assert 0 < attributes.pop("gen_ai.server.time_to_first_token") < (span.end_time - span.start_time) * 1e-9
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/generate",
        "http.response.status_code": 200,
        "gen_ai.request.model": "letters",
        "gen_ai.usage.input_tokens": 1 + len("secretword"),
        "gen_ai.usage.output_tokens": 6,
        "tformer.request_id": "mine",
    }
    assert "secret" not in span.to_json()


def test_stream_ends_its_span_with_its_last_event(server, spans):
    server.post("/v1/generate", {**BODY, "stream": True})
    (span,) = spans(1)
    assert span.attributes["gen_ai.usage.output_tokens"] == 6


def test_errors_of_clients_are_no_errors_of_the_server(server, spans):
    server.post("/v1/generate", {**BODY, "top_k": -1})
    server.post("/v1/nothing", BODY)
    refused, unknown = spans(2)
    assert refused.attributes["http.response.status_code"] == 400
    assert unknown.attributes["http.route"] == "other"
    assert {refused.status.status_code, unknown.status.status_code} == {StatusCode.UNSET}


def test_server_runs_without_the_package(server, monkeypatch):
    monkeypatch.setattr(tracing, "TRACER", None)
    assert server.post("/v1/generate", BODY)
