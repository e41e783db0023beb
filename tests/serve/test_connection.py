"""Connections with requests that are written by hand: heads, halves of connections, and answers before bodies."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.servers import HANG_SECONDS, RunningServer, StepGate, read_to_end

from tformer_serve import connection as connection_module
from tformer_serve.connection import MAX_HEAD_BYTES

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
GENERATE = {"model": "letters", "input": "hello", "max_new_tokens": 8}
REQUESTS = {
    "models": ("GET", "/v1/models", None),
    "page": ("GET", "/", None),
    "completion": ("POST", "/v1/completions", {"model": "letters", "prompt": "hello", "max_tokens": 8}),
    "generate": ("POST", "/v1/generate", GENERATE),
    "stream": ("POST", "/v1/generate", {**GENERATE, "stream": True}),
    "chat": ("POST", "/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "a"}]}),
    "error": ("POST", "/v1/generate", {}),
    "large": ("POST", "/v1/generate", {**GENERATE, "input": [5] * 100_000}),
}


def request(method, path, body, version="1.1"):
    """Return the bytes of a request."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(content)}"]
    lines += [] if body is None else ["Content-Type: application/json"]
    return "\r\n".join([*lines, "", ""]).encode() + content


def status_of(answer):
    return int(answer.split(b" ", 2)[1])


def padded(start, middle, end, size):
    """Return a head of a size, whose middle is repeated."""
    return start + (middle * size)[: size - len(start) - len(end)] + end


HEADS = {
    "one header": lambda size: padded(b"GET /health/live HTTP/1.1\r\nHost: a\r\nX-Long: ", b"a", b"\r\n\r\n", size),
    "name of a header": lambda size: padded(b"GET /health/live HTTP/1.1\r\nHost: a\r\n", b"a", b": b\r\n\r\n", size),
    "many headers": lambda size: padded(
        b"GET /health/live HTTP/1.1\r\nHost: a\r\n" + b"X: 1\r\n" * (size // 6 - 20), b"a", b": b\r\n\r\n", size
    ),
    "query": lambda size: padded(b"GET /health/live?", b"a", b" HTTP/1.1\r\nHost: a\r\n\r\n", size),
    "spaces": lambda size: padded(b"GET /health/live HTTP/1.1\r\nHost: a\r\nX:", b" ", b"a\r\n\r\n", size),
}  # fmt: skip


@pytest.mark.parametrize("part", [1 << 20, 7000, MAX_HEAD_BYTES], ids=["whole", "parts", "limit"])
@pytest.mark.parametrize("name", HEADS)
def test_head_of_a_request_has_a_limit(server, name, part):
    """The limit is the same in whatever segments the head arrives."""
    for size, expected in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431), (70_000, 431), (200_000, 431)):
        head = HEADS[name](size)
        assert len(head) == size
        parts = [head[start : start + part] for start in range(0, size, part)]
        with server.connect() as connection:
            for part_ in parts:
                connection.sendall(part_)
            if expected == 431:
                answer = read_to_end(connection)
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the path and the ")
            else:
                answer = connection.recv(1 << 16)
        assert status_of(answer) == expected, size
    with server.http() as client:
        assert client.get("/health/live", headers={"X-Long": "a" * 30_000}).status_code == 200


@pytest.mark.parametrize("part", [1 << 20, 7000], ids=["whole", "parts"])
@pytest.mark.parametrize(
    "body",
    [b"2\r\n{}\r\n0\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", b"2;" + b"a" * 70_000 + b"\r\n{}\r\n0\r\n\r\n"],
    ids=["trailer", "extension of a chunk"],
)
def test_other_parts_of_a_request_have_the_same_limit(server, body, part):
    """They are not part of the body, whose size has a limit of its own."""
    head = b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = server.answer_to(head, *(body[start : start + part] for start in range(0, len(body), part)))
    assert status_of(answer) == 431


@pytest.mark.parametrize(
    "text", [b"\x16\x03\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nX\r\n\r\n"]
)
def test_text_that_is_no_request_is_told_so(server, text):
    answer = server.answer_to(text)
    assert status_of(answer) == 400
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith(
        "the request is not valid HTTP/1.1"
    )


def test_body_that_breaks_off_after_its_answer_ends_the_connection(server, caplog):
    """The request is refused before its body is read. What follows is not a chunk."""
    head = b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nX-Request-Timeout: x\r\n"
    with server.connect() as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(1 << 16)
        assert status_of(answer) == 400
        connection.sendall(b"no chunk\r\n")
        assert read_to_end(connection) == b""
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("name", REQUESTS)
def test_client_that_ends_its_side_gets_its_answer(server, name):
    """Netcat and other programs end their side of the connection after the request."""
    sent = request(*REQUESTS[name])
    with server.connect() as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        answer = read_to_end(connection).replace(INTERIM, b"")  # of a slow machine
    expected = server.answer_to(sent.replace(b"Host:", b"Connection: close\r\nHost:", 1))
    assert status_of(answer) == status_of(expected)
    assert stable(answer) == stable(expected)
    server.wait_for("tformer_open_requests", 0)


def stable(answer):
    """Return the parts of a body that do not change from request to request."""
    body = answer.partition(b"\r\n\r\n")[2].replace(b"\r\n", b"")
    return [part for part in body.split(b'"') if part in (b"text", b"token_ids", b"error", b"message", b"letters")]


def test_client_that_ends_its_side_gets_all_answers(server):
    """It has sent three requests at once."""
    with server.connect() as connection:
        connection.sendall(b"".join(request(*REQUESTS[name]) for name in ("models", "generate", "page")))
        connection.shutdown(socket.SHUT_WR)
        assert read_to_end(connection).count(b"HTTP/1.1 200 OK\r\n") == 3


def test_request_that_breaks_off_is_no_request(server):
    for sent in (b"", b"GET /v1/models HTTP/1.1\r\nHost: a\r\n", request(*REQUESTS["generate"])[:-1]):
        with server.connect() as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert b"200 OK" not in read_to_end(connection)
    server.wait_for("tformer_open_requests", 0)


@pytest.fixture
def short_probes(monkeypatch):
    for name in ("_PROBE_SECONDS", "_REPLY_SECONDS"):
        monkeypatch.setattr(connection_module, name, 0.01)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_ends_its_side_is_asked_whether_it_is_there(server, short_probes, stream):
    """It skips an interim response and a comment of a stream, by which the server asks."""
    with StepGate.closed(server.models["letters"].model) as gate, server.connect() as connection:
        connection.sendall(request("POST", "/v1/generate", {**GENERATE, "stream": stream}))
        first = connection.recv(1 << 16) if stream else b""
        connection.shutdown(socket.SHUT_WR)
        probe = b": \n\n" if stream else INTERIM
        while first.count(probe) < 2:
            first += connection.recv(1 << 16)
        gate.open()
        answer = first + read_to_end(connection)
    assert answer.replace(INTERIM, b"").startswith(b"HTTP/1.1 200 OK")
    assert b"finish_reason" in answer
    assert answer.endswith(b"0\r\n\r\n") == stream


def test_client_of_the_standard_library_skips_the_question(server, short_probes):
    address = httpx.URL(server.url)
    client = http.client.HTTPConnection(address.host, address.port, HANG_SECONDS)
    with StepGate.closed(server.models["letters"].model) as gate, ThreadPoolExecutor(1) as pool:
        client.request("POST", "/v1/generate", json.dumps(GENERATE), {"Content-Type": "application/json"})
        client.sock.shutdown(socket.SHUT_WR)
        answer = pool.submit(client.getresponse)
        gate.wait_until_reached()
        threading.Event().wait(0.1)  # for some questions
        gate.open()
        assert answer.result(HANG_SECONDS).status == 200
        assert json.loads(answer.result().read())["results"]
    client.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_ends_its_side_and_leaves_frees_its_rows(server, short_probes, stream):
    with StepGate.closed(server.models["letters"].model) as gate:
        with server.connect() as connection:
            connection.sendall(request("POST", "/v1/generate", {**GENERATE, "stream": stream}))
            connection.shutdown(socket.SHUT_WR)
            gate.wait_until_reached()
        server.wait_for("tformer_open_requests", 0)
        assert gate.steps == 1
    server.wait_for("tformer_cache_bytes", 0, model="letters")


def test_connections_of_halves_do_not_stay(server):
    for _ in range(5):
        with server.connect() as connection:
            connection.sendall(request(*REQUESTS["stream"]))
            connection.shutdown(socket.SHUT_WR)
            read_to_end(connection)
    with server.http() as client:
        client.get("/health/live")
        assert len(server.server.server_state.connections) == 1  # of this client


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
def test_client_that_is_refused_gets_its_answer_although_it_sends_on(files, chunked):
    """The system would reset the connection of a server that does not read, and take the answer from the client."""
    content = b"a" * (8 << 20)
    head = b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: %d\r\n\r\n" % len(content)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content) if chunked else content
    with RunningServer({"letters": files["letters"]}, max_body_bytes=4000) as small:
        for _ in range(3):
            with small.connect() as connection:
                connection.sendall(head)
                connection.sendall(body)  # does not fail: the server reads it
                assert status_of(read_to_end(connection)) == 413


def test_client_that_sends_for_long_after_its_answer_is_left(files, monkeypatch):
    monkeypatch.setattr(connection_module, "_LINGER_SECONDS", 0.05)
    with RunningServer({"letters": files["letters"]}, max_body_bytes=10) as small, small.connect() as connection:
        connection.sendall(b"POST /v1/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        assert status_of(read_to_end(connection)) == 413
        with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012  # the first bytes cause the reset
            for _ in range(HANG_SECONDS * 100):
                connection.sendall(b"a")
                time.sleep(0.01)


def test_connection_without_memory_ends_and_others_go_on(server, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError

    with server.http() as client:
        with monkeypatch.context() as patch:
            patch.setattr("uvicorn.protocols.http.h11_impl.H11Protocol.data_received", fail)
            with server.connect() as connection:
                connection.sendall(request(*REQUESTS["models"]))
                assert read_to_end(connection) == b""
        assert client.get("/v1/models").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]
