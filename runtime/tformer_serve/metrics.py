"""Metrics in Prometheus' form, of one server.

Routes and models are labels. A route is the path of a route of the application, and "other" for any other path, so that
no client can make new labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tformer_serve.errors import CLIENT_GONE_STATUS
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import RequestContext

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_GAUGES = {  # fields of `AsyncModelStats`
    "running_rows": "Rows that are computed together now, which is the batch size",
    "waiting_requests": "Requests of a model that wait for their input, for rows or for memory",
    "max_batch_size": "Rows that can be computed together",
    "cache_bytes": "Bytes of caches and encoder outputs",
}
_OUTCOMES = {
    401: "unauthorized", 408: "slow_body", 413: "too_large", 429: "queue_full", 503: "unavailable", 504: "deadline",
    CLIENT_GONE_STATUS: "client_gone",
}  # fmt: skip


class _ModelSeries(NamedTuple):
    """The series of a model."""

    first_token: Histogram
    per_token: Histogram
    prompt_tokens: Counter
    generated_tokens: Counter


class Metrics:
    """Counters and histograms, and gauges that are read when they are asked for."""

    def __init__(
        self, models: Mapping[str, ServedModel], open_requests: Callable[[], int], body_bytes: Callable[[], int]
    ) -> None:
        """open_requests, body_bytes: return the number of open requests, and the bytes of their large bodies."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, with the time of its first count
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tformer_requests", "Requests by route and outcome", ["route", "outcome"], registry=self._registry
        )
        self._seconds = self._histogram("tformer_request_seconds", "Time of a whole request", ["route"])
        self._first_token = self._histogram(
            "tformer_time_to_first_token_seconds", "Time from the arrival of a request to its first token", ["model"]
        )
        self._per_token = self._histogram(
            "tformer_time_per_token_seconds", "Time for each further token of a request", ["model"]
        )
        self._prompt_tokens = Counter(
            "tformer_prompt_tokens", "Tokens of prompts and sources", ["model"], registry=self._registry
        )
        self._generated_tokens = Counter(
            "tformer_generated_tokens", "Tokens of answers", ["model"], registry=self._registry
        )
        self._reloads = Counter(
            "tformer_reloads", "Times that the file of a model was to be loaded again", ["model", "outcome"],
            registry=self._registry,
        )  # fmt: skip
        # Looking a series up by its labels takes longer than counting.
        self._of_model, self._of_route = cache(self._new_model_series), cache(self._new_route_series)
        self._registry.register(_Gauges(models, open_requests, body_bytes))
        ProcessCollector(registry=self._registry)

    def _histogram(self, name: str, help: str, labels: list[str]) -> Histogram:
        return Histogram(name, help, labels, buckets=_SECONDS, registry=self._registry)

    def _new_model_series(self, model: str) -> _ModelSeries:
        return _ModelSeries(
            self._first_token.labels(model),
            self._per_token.labels(model),
            self._prompt_tokens.labels(model),
            self._generated_tokens.labels(model),
        )

    def _new_route_series(self, route: str, outcome: str) -> tuple[Counter, Histogram]:
        return self._requests.labels(route, outcome), self._seconds.labels(route)

    def add_request(self, context: RequestContext, route: str) -> None:
        """Count a request that has ended. route: the path of its route."""
        requests, seconds = self._of_route(route, _outcome(context.status))
        requests.inc()
        seconds.observe(time.monotonic() - context.started_at)

    def add_prompt(self, context: RequestContext, model: str, tokens: int) -> None:
        """Count a prompt that was read."""
        context.prompt_tokens += tokens
        self._of_model(model).prompt_tokens.inc(tokens)

    def add_tokens(self, context: RequestContext, model: str, tokens: int, first_at: float | None = None) -> None:
        """Count generated tokens. first_at: when the first token of the request came; None for now."""
        if tokens and context.first_token_at is None:
            context.first_token_at = time.monotonic() if first_at is None else first_at
            self._of_model(model).first_token.observe(context.first_token_at - context.started_at)
        context.completion_tokens += tokens
        self._of_model(model).generated_tokens.inc(tokens)

    def add_rate(self, model: str, seconds_per_token: float) -> None:
        """Count the time for each further token of a request."""
        self._of_model(model).per_token.observe(seconds_per_token)

    def add_reload(self, model: str, outcome: str) -> None:
        """Count a file that was loaded again. outcome: "reloaded", "unchanged" or "failed"."""
        self._reloads.labels(model, outcome).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' form."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """Numbers of now."""

    def __init__(
        self, models: Mapping[str, ServedModel], open_requests: Callable[[], int], body_bytes: Callable[[], int]
    ) -> None:
        self._models, self._open_requests, self._body_bytes = models, open_requests, body_bytes

    def collect(self) -> Iterable[Metric]:
        files = InfoMetricFamily("tformer_model", "The file of a model", labels=["model"])
        requests = GaugeMetricFamily("tformer_open_requests", "Requests that run or wait")
        requests.add_metric([], self._open_requests())
        bodies = GaugeMetricFamily("tformer_body_bytes", "Bytes of the large bodies of open requests")
        bodies.add_metric([], self._body_bytes())
        gauges = {
            field: GaugeMetricFamily(f"tformer_{field}", text, labels=["model"]) for field, text in _GAUGES.items()
        }
        for name, served in self._models.items():
            files.add_metric([name], {"digest": served.files.digest or ""})
            stats = served.aio.stats()
            for field, gauge in gauges.items():
                gauge.add_metric([name], getattr(stats, field))
        return requests, bodies, files, *gauges.values()


def _outcome(status: int) -> str:
    """Return the outcome of a request in a word."""
    if status in _OUTCOMES:
        return _OUTCOMES[status]
    return "ok" if 0 < status < 400 else "invalid" if 400 <= status < 500 else "failed"
