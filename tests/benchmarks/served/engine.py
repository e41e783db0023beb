"""The engine without a server, in a process of its own that `versus.client.Worker` drives.

    {"do": "measure", "action": "open", "path": …, "core": 0}                       loads a model
    {"do": "measure", "action": "answers", "requests": […]}                         → each alone
    {"do": "measure", "action": "scheduler", "requests": […], "clients": 32, …}     → figures of a closed loop
    {"do": "measure", "action": "asyncio", …, "clients": 32 or "times": […]}        → the same with `AsyncModel`

The scheduler decodes in every server: requests of 32 clients are submitted to it, and a result makes room for
the next request. It has no threads, no streams and no asyncio, so that it is the most that a server could reach.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

from served.load import WARM_SECONDS, Load, Record, closed_loop, open_loop
from served.processes import pin
from tformer_runtime import AsyncModel, Model
from tformer_runtime.decoding.scheduler import MAX_BATCH_ROWS

_model: Model | None = None


def measure(action: str, **arguments: Any) -> dict[str, Any]:
    return {"open": _open, "answers": _answers, "scheduler": _scheduler, "asyncio": _asyncio}[action](**arguments)


def _open(path: str, core: int | None) -> dict[str, Any]:
    global _model
    pin(core)
    _model = Model.load(path, "cpu", threads=1)
    return {}


def _the_model() -> Model:
    assert _model is not None
    return _model


def _read(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the input of a request and its options. A chat is filled into the template."""
    given = request["input"]
    is_chat = isinstance(given, list) and isinstance(given[0], dict)
    return (_the_model().prompt(given) if is_chat else given), request["options"]


def _answers(requests: list[dict[str, Any]]) -> dict[str, Any]:
    results = []
    for request in requests:
        given, options = _read(request)
        result = _the_model().generate(given, **options)
        prompt = given.tolist() if isinstance(given, np.ndarray) else given  # of a chat
        results.append({"text": result.text, "token_ids": list(result.token_ids), "prompt": prompt})
    return {"results": results}


def _scheduler(requests: list[dict[str, Any]], order: list[int], clients: int, seconds: float) -> dict[str, Any]:
    model, generator = _the_model(), _the_model().generator
    ready = [(given, model.settings(None, options)) for given, options in map(_read, requests)]
    scheduler = generator.new_scheduler(ready[0][1], min(clients, MAX_BATCH_ROWS), waits=False)
    numbers: dict[Any, tuple[int, float]] = {}
    load, sent = Load(), 0

    def submit() -> None:
        nonlocal sent
        number = order[sent % len(order)]
        sent += 1
        given, settings = ready[number]
        task = generator.make_task(model.request(given, settings), settings)
        numbers[task] = number, time.perf_counter()
        scheduler.submit(task)

    for _ in range(clients):
        submit()
    counts_from = time.perf_counter() + WARM_SECONDS
    before = None
    while (now := time.perf_counter()) < counts_from + seconds:
        if before is None and now >= counts_from:
            before = time.process_time()
        for task in scheduler.step():
            number, due_at = numbers.pop(task)
            result = generator.make_result(task)
            if (ended_at := time.perf_counter()) > counts_from:
                load.records.append(Record(number, due_at, None, ended_at, len(result.token_ids)))
            submit()
    load.seconds, load.processor = now - counts_from, time.process_time() - (before or 0.0)
    scheduler.release()
    return {"figures": load.figures()}


def _asyncio(
    requests: list[dict[str, Any]],
    order: list[int],
    clients: int = 0,
    seconds: float = 0.0,
    times: list[float] | None = None,
) -> dict[str, Any]:
    """Run a closed loop of clients, or arrivals at times."""
    model = _the_model()
    ready = list(map(_read, requests))

    async def run() -> Load:
        async with AsyncModel(model, MAX_BATCH_ROWS) as served:

            async def send(client: int, number: int, due_at: float) -> Record:
                given, options = ready[number]
                first_at, tokens = None, 0
                async with served.open(given, **options) as opened:
                    async for piece in opened:
                        tokens += len(piece.token_ids)
                        first_at = first_at or time.perf_counter()
                    await opened.result()
                return Record(number, due_at, first_at, time.perf_counter(), tokens)

            if times is not None:
                return await open_loop(send, order, times, time.process_time)
            return await closed_loop(send, order, clients, seconds, time.process_time)

    return {"figures": asyncio.run(run()).figures()}
