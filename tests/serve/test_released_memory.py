"""A request leaves no circles of references: its memory is free at its end, not when Python's collector comes to it."""

from __future__ import annotations

import gc
import threading
import time
import types

import httpx
import pytest
from support.servers import HANG_SECONDS, StepGate

COMPLETION = {"model": "letters", "prompt": "hello", "max_tokens": 5}
GENERATE = {"model": "pronounce", "input": [5, 6, 7], "max_new_tokens": 5}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
LONG = {"model": "letters", "input": "hello", "max_new_tokens": 50}
AT_ONCE = {"X-Request-Timeout": "0.0001"}

REQUESTS = {  # name → path, body, headers, status
    "completion": ("/v1/completions", COMPLETION, {}, 200),
    "completions": ("/v1/completions", {**COMPLETION, "prompt": ["hello", "hallo"]}, {}, 200),
    "stream of completions": ("/v1/completions", {**COMPLETION, "prompt": ["hello", "hallo"], "stream": True}, {}, 200),
    "chat": ("/v1/chat/completions", CHAT, {}, 200),
    "stream of a chat": ("/v1/chat/completions", {**CHAT, "stream": True}, {}, 200),
    "generate": ("/v1/generate", GENERATE, {}, 200),
    "stream": ("/v1/generate", {**GENERATE, "stream": True}, {}, 200),
    "stream of beams": ("/v1/generate", {**GENERATE, "stream": True, "num_beams": 3}, {}, 200),
    "large body": ("/v1/generate", {**GENERATE, "input": [5] * 10_000}, {}, 400),
    "wrong id": ("/v1/generate", {**GENERATE, "input": [99]}, {}, 400),
    "wrong id, stream": ("/v1/generate", {**GENERATE, "input": [99], "stream": True}, {}, 400),
    "wrong ids of completions": ("/v1/completions", {**COMPLETION, "prompt": [[5], [99]]}, {}, 400),
    "wrong option": ("/v1/generate", {**GENERATE, "num_beams": "4"}, {}, 400),
    "unknown option": ("/v1/generate", {**GENERATE, "beams": 4}, {}, 400),
    "unknown model": ("/v1/generate", {**GENERATE, "model": "other"}, {}, 404),
    "no body": ("/v1/generate", None, {}, 400),
    "no model of vectors": ("/v1/embeddings", {"model": "letters", "input": "a"}, {}, 400),
    "deadline": ("/v1/generate", LONG, AT_ONCE, 504),
    "deadline of a stream": ("/v1/generate", {**LONG, "stream": True}, AT_ONCE, 504),
}


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=HANG_SECONDS) as connected:
        yield connected


@pytest.mark.parametrize("name", REQUESTS)
def test_request_leaves_no_circles(server, client, name):
    path, body, headers, status = REQUESTS[name]

    def send():
        answer = client.post(path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        answer = client.post("/v1/completions", json=COMPLETION)  # the connection holds the latest request
        assert answer.status_code == 200

    assert _circles(server, send) == set()


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_between_tokens_leaves_no_circles(server, client, stream):
    def send():
        with StepGate.closed(server.models["letters"].model) as gate:
            threading.Timer(0.8, gate.open).start()  # a request ends at its next token
            answer = client.post("/v1/generate", json={**LONG, "stream": stream}, headers={"X-Request-Timeout": "0.5"})
        assert gate.steps
        assert (answer.status_code == 200) == stream
        assert "deadline" in answer.text
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200

    assert _circles(server, send) == set()


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_leaves_no_circles(server, client, stream):
    def send():
        with StepGate.closed(server.models["letters"].model) as gate, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/generate", json={**LONG, "stream": stream, "num_beams": 2}, timeout=0.5)
        assert gate.steps

    assert _circles(server, send) == set()


def _circles(server, send):
    """Return descriptions of the objects of this package that only the collector frees after some requests."""
    send()  # makes caches
    _wait_until_idle(server)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            send()
        _wait_until_idle(server)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return {text for thing in gc.garbage if (text := _description(thing))}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _wait_until_idle(server):
    ends_at = time.monotonic() + HANG_SECONDS
    while server.state.admission.open:
        assert time.monotonic() < ends_at
        time.sleep(0.01)
    time.sleep(0.1)  # the thread that decodes lets the last request go


def _description(thing):
    if isinstance(thing, types.FrameType):
        code = thing.f_code
        return f"{code.co_qualname} of {code.co_filename}" if "tformer_" in code.co_filename else ""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith("tformer_") else ""
