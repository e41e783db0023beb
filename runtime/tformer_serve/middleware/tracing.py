"""A span of OpenTelemetry for each request, if its package `opentelemetry-api` is installed.

Spans go where the program has set OpenTelemetry up to send them: `opentelemetry-instrument tformer-serve …` does so by
the variables OTEL_*. They have no prompts and no answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tformer_serve.request_context import RequestContext

try:
    from opentelemetry import propagate, trace

    TRACER: trace.Tracer | None = trace.get_tracer("tformer_serve")
except ImportError:
    TRACER = None


@contextlib.contextmanager
def request_span(context: RequestContext, headers: Mapping[str, str]) -> Iterator[Any]:
    """Make a span the current one in the block, as a part of the trace that the headers name. Yield it, or None.

    `describe` must be called with it at the end of the block.
    """
    if TRACER is None or _goes_nowhere(TRACER):
        yield None
        return
    parent = propagate.extract(headers)
    with TRACER.start_as_current_span(context.method, parent, trace.SpanKind.SERVER) as span:
        yield span


def _goes_nowhere(tracer: trace.Tracer) -> bool:
    """Return whether the program has not set OpenTelemetry up, so that the spans of a tracer go nowhere."""
    provider = trace.get_tracer_provider()
    return isinstance(tracer, trace.ProxyTracer) and isinstance(provider, trace.ProxyTracerProvider)


def describe(span: Any, context: RequestContext, route: str) -> None:
    """Give a span the facts of a request that ends, by the semantic conventions of HTTP and of generative models."""
    if span is None or not span.is_recording():
        return
    span.update_name(f"{context.method} {route}")
    facts = {
        "http.request.method": context.method,
        "http.route": route,
        "http.response.status_code": context.status,
        "gen_ai.request.model": context.model,
        "gen_ai.usage.input_tokens": context.prompt_tokens or None,
        "gen_ai.usage.output_tokens": context.completion_tokens or None,
        "tformer.request_id": context.id,
    }
    if context.first_token_at is not None:
        facts["gen_ai.server.time_to_first_token"] = context.first_token_at - context.started_at
    span.set_attributes({name: value for name, value in facts.items() if value is not None})
    if context.status >= 500:
        span.set_status(trace.StatusCode.ERROR)
