"""Places, sizes and deadlines of requests, and clients that leave. A gate stops the decoding until a test opens it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from support.servers import HANG_SECONDS, RunningServer, StepGate
from support.toy_models import END_ID

from tformer_serve.errors import ApiError, ClientGoneError
from tformer_serve.metrics import Metrics
from tformer_serve.middleware import body_limit, request_scope
from tformer_serve.middleware.admission import Admission

LONG = {"model": "letters", "input": "hello", "suppress_tokens": [END_ID]}


@pytest.fixture(scope="module")
def small(files):
    """Return a server with two rows and two more places."""
    with RunningServer({"letters": files["letters"]}, max_batch_size=2, max_queue=2, max_body_bytes=4000) as running:
        yield running


def model_of(server):
    return server.models["letters"].model


def post(server, body=LONG, **headers):
    return server.post("/v1/generate", body, headers=headers)


def wait_until_free(server):
    """Wait until no request is open and the memory of all rows is free."""
    server.wait_for("tformer_open_requests", 0)
    server.wait_for("tformer_cache_bytes", 0, model="letters")


def head_of(path, content):
    """Return the head of a request that is sent by hand."""
    lines = [f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, "", ""]).encode()


def test_requests_beyond_the_places_are_refused(small):
    with StepGate.closed(model_of(small)) as gate, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(post, small) for _ in range(4)]
        small.wait_for("tformer_open_requests", 4)
        gate.wait_until_reached()
        refused = post(small)
        assert refused.status_code == 429
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["message"].startswith("the server has 4 requests and takes 4 at once")
        with small.http() as client:
            assert client.get("/health/ready").status_code == 200
            assert client.get("/v1/models").status_code == 200
        gate.open()
        assert [answer.result(HANG_SECONDS).status_code for answer in answers] == [200] * 4
    assert small.metric("tformer_requests_total", outcome="queue_full", route="other") >= 1
    wait_until_free(small)
    assert post(small).status_code == 200


@pytest.mark.parametrize(("seconds", "told"), [(0.02, "1"), (7.2, "8"), (1e6, "60")])
def test_refused_client_is_told_the_mean_time_of_a_request(seconds, told):
    admission = Admission(1)
    for _ in range(100):
        admission.add_seconds(seconds)
    with admission.place(), pytest.raises(ApiError) as refused, admission.place():
        pass
    assert refused.value.headers["Retry-After"] == told


def test_each_prompt_takes_a_place(small):
    body = {"model": "letters", "prompt": ["a"] * 5, "max_tokens": 2}
    never = small.post("/v1/completions", body)
    assert (never.status_code, never.json()["error"]["code"]) == (400, "too_large")
    assert never.json()["error"]["message"] == "the request has 5 prompts and the server takes 4 at once: send fewer"
    answer = small.post("/v1/completions", {**body, "prompt": ["a"] * 4})
    assert len(answer.json()["choices"]) == 4
    assert small.post("/v1/completions", {**body, "stream": True}).status_code == 400
    with StepGate.closed(model_of(small)) as gate, ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, small)
        gate.wait_until_reached()
        assert small.post("/v1/completions", {**body, "prompt": ["a"] * 4}).status_code == 429
        gate.open()
        assert other.result(HANG_SECONDS).status_code == 200
    wait_until_free(small)


def test_bodies_that_are_too_large_are_refused_unread(small):
    large = json.dumps({"model": "letters", "input": "a" * 4000}).encode()
    headers = {"Content-Type": "application/json"}
    with small.http() as client:
        known = client.post("/v1/generate", content=large, headers=headers)
        unknown = client.post("/v1/generate", content=iter([large[:2500], large[2500:]]), headers=headers)  # chunked
        for answer in (known, unknown):
            assert answer.status_code == 413
            assert answer.json()["error"]["message"].startswith("the body is larger than the 4,000 bytes")
        assert client.post("/v1/generate", json={"model": "letters", "input": "a"}).status_code == 200
    address = httpx.URL(small.url)
    with socket.create_connection((address.host, address.port)) as connection:  # announces what it does not send
        connection.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")
    wait_until_free(small)


def test_head_is_limited_anew_for_each_request_of_a_connection(small):
    headers = {"X-Long": "a" * 30_000}
    with small.http() as client:
        answers = [client.get("/health/live", headers=headers) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        ports = {answer.extensions["network_stream"].get_extra_info("client_addr")[1] for answer in answers}
        assert len(ports) == 1


def test_body_of_a_request_that_offers_another_protocol_is_its_body(small):
    """Clients of HTTP/2 offer to change the protocol with their first request."""
    body = json.dumps({"model": "letters", "input": "a", "max_new_tokens": 1}).encode()
    lines = ["POST /v1/generate HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += ["Connection: Upgrade, HTTP2-Settings, close", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"]
    head = "\r\n".join([*lines, "", ""]).encode()
    for parts in ([head + body], [head, body]):
        assert small.answer_to(*parts).startswith(b"HTTP/1.1 200 OK")


def test_trailer_of_a_body_is_no_header(small):
    body = json.dumps({"model": "letters", "input": "a", "max_new_tokens": 1}).encode()
    lines = ["POST /v1/generate HTTP/1.1", "Host: a", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    head = "\r\n".join([*lines, "Connection: close", "", ""]).encode()
    content = b"%x\r\n%b\r\n0\r\nX-Request-Id: of-the-trailer\r\n\r\n" % (len(body), body)
    answer = small.answer_to(head + content)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"of-the-trailer" not in answer


def test_body_that_does_not_arrive_ends_with_an_error(small, monkeypatch):
    monkeypatch.setattr(body_limit, "_BODY_SECONDS", 0.05)
    address = httpx.URL(small.url)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
    wait_until_free(small)


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_leaves_frees_its_rows(small, path, stream):
    """The decoding stands while the client leaves. Afterwards no step is computed for it."""
    model = model_of(small)
    body = {"model": "letters", "stream": stream, "temperature": 1.0}
    body |= {"input": "hello", "num_return_sequences": 2} if path == "/v1/generate" else {"prompt": "hello", "n": 2}
    content = json.dumps(body).encode()
    gone = small.metric("tformer_requests_total", outcome="client_gone", route=path)
    address = httpx.URL(small.url)
    with StepGate.closed(model) as gate:
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(head_of(path, content) + content)
            if stream:
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            gate.wait_until_reached()
            assert small.metric("tformer_running_rows", model="letters") == 2
        small.wait_for("tformer_open_requests", 0)
        assert gate.steps == 1
        gate.open()
        wait_until_free(small)
        assert gate.steps == 1
        small.wait_for("tformer_running_rows", 0, model="letters")
    small.wait_for("tformer_requests_total", gone + 1, outcome="client_gone", route=path)


def test_other_clients_get_their_answers_after_one_has_left(small, references):
    expected = references["letters"].generate("ab", max_new_tokens=20).text
    address = httpx.URL(small.url)
    content = json.dumps({**LONG, "stream": True}).encode()
    with StepGate.closed(model_of(small)) as gate, ThreadPoolExecutor(1) as pool:
        with socket.create_connection((address.host, address.port)) as connection:
            connection.sendall(head_of("/v1/generate", content) + content)
            gate.wait_until_reached()
            other = pool.submit(post, small, {"model": "letters", "input": "ab", "max_new_tokens": 20})
            small.wait_for("tformer_open_requests", 2)
        small.wait_for("tformer_open_requests", 1)
        gate.open()
        assert other.result(HANG_SECONDS).json()["results"][0]["text"] == expected
    wait_until_free(small)


def test_clients_that_leave_at_random_disturb_no_other(files, references):
    """Half of the clients leave: before the first event, or after some events of a stream."""
    random = np.random.default_rng(7)
    plan = [("hello", "ab", "q", "zebra")[i % 4] for i in range(60)]
    leaves = [int(random.integers(0, 12)) if i % 2 else None for i in range(60)]
    expected = {word: references["letters"].generate(word, suppress_tokens=[END_ID]).text for word in set(plan)}

    async def ask(client, word, events):
        body = {**LONG, "input": word, "stream": True}
        text = ""
        async with client.stream("POST", "/v1/generate", json=body) as answer:
            count = 0
            async for line in answer.aiter_lines():
                if events is not None and count >= events:
                    return None
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: ")).get("text", "")
                    count += 1
        return text

    async def ask_all(server):
        settings = {"base_url": server.url, "timeout": HANG_SECONDS, "trust_env": False}
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(**settings, limits=limits) as client:
            return await asyncio.gather(*(ask(client, *case) for case in zip(plan, leaves, strict=True)))

    with RunningServer({"letters": files["letters"]}, max_batch_size=4) as server:
        for word, events, text in zip(plan, leaves, asyncio.run(ask_all(server)), strict=True):
            assert text == (expected[word] if events is None else None)
        wait_until_free(server)
        server.wait_for("tformer_running_rows", 0, model="letters")


@pytest.fixture
def later(monkeypatch):
    """Return a function that moves the clock of the server by some seconds, so that no test depends on time."""
    offset, now = [0.0], time.monotonic
    clock = SimpleNamespace(monotonic=lambda: now() + offset[0])
    for module in ("async_model", "decoding.scheduler", "decoding.worker_pool"):
        monkeypatch.setattr(f"tformer_runtime.{module}.time", clock)
    monkeypatch.setattr("tformer_serve.request_context.time", clock)

    def move(seconds):
        offset[0] += seconds

    return move


def test_deadline_of_the_client_ends_its_request(small, later):
    with StepGate.closed(model_of(small)) as gate, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, small, **{"X-Request-Timeout": str(HANG_SECONDS)})
        gate.wait_until_reached()
        later(HANG_SECONDS + 1)
        gate.open()
        answer = asked.result(HANG_SECONDS)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert answer.json()["error"]["message"] == "the deadline passed before the request was finished"
    assert answer.headers["X-Should-Retry"] == "false"
    wait_until_free(small)


def test_request_in_time_has_its_answer(small):
    assert post(small, **{"X-Request-Timeout": str(HANG_SECONDS)}).status_code == 200
    assert post(small, **{"X-Request-Timeout": "1e-9"}).status_code == 504  # before anything is computed


@pytest.mark.parametrize("text", ["0", "-1", "x", "inf", "nan", ""])
def test_deadline_that_is_no_number_is_refused(small, text):
    refused = post(small, **{"X-Request-Timeout": text})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("X-Request-Timeout must be a number of seconds")


def test_deadline_of_the_server_holds_for_streams_and_for_waiting_requests(files, later):
    with RunningServer({"letters": files["letters"]}, max_batch_size=1, timeout=HANG_SECONDS) as server:
        with StepGate.closed(model_of(server)) as gate, ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(post, server, {**LONG, "stream": True}, **{"X-Request-Timeout": "1000000"})
            gate.wait_until_reached()
            waiting = pool.submit(post, server)
            server.wait_for("tformer_waiting_requests", 1)
            later(HANG_SECONDS + 1)
            gate.open()
            assert waiting.result(HANG_SECONDS).status_code == 504
            events = streamed.result(HANG_SECONDS).text.strip().split("\n\n")
        assert len(events) > 1
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline"
        server.wait_for("tformer_requests_total", 2, outcome="deadline")
        wait_until_free(server)


def test_client_that_does_not_read_is_left(monkeypatch):
    """The buffer of the connection is full for ever. The work for the answer ends."""
    monkeypatch.setattr(request_scope, "_SEND_SECONDS", 0.01)
    metrics, ends = Metrics({}, lambda: 0, lambda: 0), []

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        except ClientGoneError:
            ends.append("gone")
            raise

    async def never(*_):
        await asyncio.sleep(HANG_SECONDS)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(request_scope.RequestScope(app, metrics, None)(scope, never, never))
    assert ends == ["gone"]
    assert b'tformer_requests_total{outcome="client_gone",route="other"} 1.0' in metrics.text()


def test_client_that_reads_a_byte_a_second_is_left(files, references, monkeypatch):
    """Its answer is larger than all buffers on the way. Others get theirs meanwhile."""
    monkeypatch.setattr(request_scope, "_SEND_SECONDS", 3.0)
    body = {**LONG, "stream": True, "temperature": 1.0, "num_return_sequences": 8, "top_logprobs": 20}
    content = json.dumps(body).encode()
    expected = references["letters"].generate("ab").text
    with RunningServer({"letters": files["letters"]}, send_buffer=4096) as running:
        address = httpx.URL(running.url)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.connect((address.host, address.port))
            connection.sendall(head_of("/v1/generate", content) + content)
            read = b""
            while running.metric("tformer_requests_total", outcome="client_gone") == 0:
                read += connection.recv(1)
                time.sleep(1.0)
                answer = post(running, {"model": "letters", "input": "ab"})
                assert answer.json()["results"][0]["text"] == expected
                assert len(read) < 30
        assert b"HTTP/1.1 200 OK".startswith(read)
        wait_until_free(running)
