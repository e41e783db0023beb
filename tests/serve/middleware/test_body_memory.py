"""The memory for bodies: one body and all together have limits, which count the bytes that have arrived."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import sys
import threading

import pytest
from support.servers import HANG_SECONDS, RunningServer, read_to_end

from tformer_runtime.base.process_memory import process_memory_left
from tformer_serve.logs import JsonFormatter

LARGE = 100_000
LIMIT = 250_000  # room for two
SMALL_BODY = {"model": "letters", "input": "a", "max_new_tokens": 1}
BODY = json.dumps({**SMALL_BODY, "adapter": None}).encode().ljust(LARGE)
FORM_TYPE = "multipart/form-data; boundary=b"


@pytest.fixture(scope="module")
def tight(files):
    options = {"max_body_bytes": LARGE, "max_upload_bytes": LARGE, "max_bodies_bytes": LIMIT}
    with RunningServer({"letters": files["letters"]}, **options) as running:
        yield running


@pytest.fixture(autouse=True)
def no_tracebacks(caplog):
    yield
    formatter = JsonFormatter()
    assert not [text for record in caplog.records if "traceback" in (text := formatter.format(record)).lower()]


def head(path="/v1/generate", size=LARGE, kind="application/json"):
    """Return the head of a request. size: of the body; None for one in chunks."""
    length = "Transfer-Encoding: chunked" if size is None else f"Content-Length: {size}"
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {kind}", length, "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode()


@contextlib.contextmanager
def held(server, count=2, size=LARGE):
    """Send requests whose bodies lack their last byte. Yield the connections when the server has their heads."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(server.connect()) for _ in range(count)]
        for connection in connections:
            connection.sendall(head(size=size) + BODY[:-1])
        server.wait_for("tformer_body_bytes", count * (size - 1))
        yield connections


def answer(raw):
    """Return the status, the headers and the body of an answer."""
    start, _, content = raw.partition(b"\r\n\r\n")
    return int(start.split()[1]), start.decode().lower(), json.loads(content)


def assert_is_refused(raw):
    status, headers, body = answer(raw)
    assert status == 503
    assert "retry-after: 1" in headers
    assert body["error"]["code"] == "out_of_memory"
    assert body["error"]["message"].startswith("the bodies of open requests have ")


def test_body_beyond_the_sum_is_refused_before_it_is_read(tight, caplog):
    caplog.set_level(logging.INFO, "tformer_serve")
    with held(tight) as connections:
        caplog.clear()
        with tight.connect() as connection:
            connection.sendall(head())  # no byte of the body
            assert_is_refused(read_to_end(connection))
        assert_is_refused(tight.answer_to(head(), BODY))  # a client that sends its whole body reads the answer too
        lines = [record.fields for record in caplog.records if record.msg == "request"]
        assert [(line["path"], line["status"]) for line in lines] == [("/v1/generate", 503)] * 2
        assert tight.post("/v1/generate", SMALL_BODY).status_code == 200  # small bodies have room always
        for connection in connections:
            connection.sendall(BODY[-1:])
            assert answer(read_to_end(connection))[0] == 200
    tight.wait_for("tformer_body_bytes", 0)
    assert answer(tight.answer_to(head(), BODY))[0] == 200


def test_announced_bodies_that_do_not_arrive_keep_no_client_out(tight):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(tight.connect()).sendall(head())
        tight.wait_for("tformer_open_requests", 8)
        assert tight.metric("tformer_body_bytes") == 0
        assert answer(tight.answer_to(head(), BODY))[0] == 200
    tight.wait_for("tformer_open_requests", 0)


def test_body_that_grows_beyond_the_free_memory_is_refused(tight):
    """Three bodies that had room when they were announced."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(tight.connect()) for _ in range(3)]
        for connection in connections:
            connection.sendall(head())
        tight.wait_for("tformer_open_requests", 3)
        for number, connection in enumerate(connections[:2], 1):
            connection.sendall(BODY[:-1])
            tight.wait_for("tformer_body_bytes", number * (LARGE - 1))
        connections[2].sendall(BODY)
        assert_is_refused(read_to_end(connections[2]))
        for connection in connections[:2]:
            connection.sendall(BODY[-1:])
            assert answer(read_to_end(connection))[0] == 200
    tight.wait_for("tformer_body_bytes", 0)


def test_body_in_chunks_counts_as_it_grows(tight):
    chunk = b"%x\r\n%b\r\n" % (LARGE // 2, b" " * (LARGE // 2))
    with held(tight), tight.connect() as connection:
        connection.sendall(head(size=None) + chunk)
        connection.sendall(chunk)
        assert_is_refused(read_to_end(connection))
    tight.wait_for("tformer_body_bytes", 0)
    with tight.connect() as connection:
        connection.sendall(head(size=None) + chunk)
        tight.wait_for("tformer_body_bytes", LARGE // 2)
    tight.wait_for("tformer_body_bytes", 0)


def test_form_counts_like_other_bodies(tight):
    with held(tight):
        assert_is_refused(tight.answer_to(head("/v1/audio/transcriptions", kind=FORM_TYPE), BODY))
        assert_is_refused(tight.answer_to(head("/v1/embeddings"), BODY))
        assert_is_refused(tight.answer_to(head("/nothing"), BODY))


def test_client_that_leaves_gives_its_share_back(tight):
    with held(tight):
        pass
    tight.wait_for("tformer_body_bytes", 0)


def test_share_lasts_as_long_as_its_request(tight):
    """The body and what was read from it are in memory until the answer is complete."""
    model, reached, goes_on = tight.models["letters"].model, threading.Event(), threading.Event()
    settings = model.settings

    def wait(*arguments, **options):
        reached.set()
        assert goes_on.wait(HANG_SECONDS)
        return settings(*arguments, **options)

    with tight.connect() as connection:
        model.settings = wait
        try:
            connection.sendall(head() + BODY)
            assert reached.wait(HANG_SECONDS)
            assert tight.metric("tformer_body_bytes") == LARGE
            goes_on.set()
            assert answer(read_to_end(connection))[0] == 200
        finally:
            goes_on.set()
            del model.settings
    tight.wait_for("tformer_body_bytes", 0)


def test_body_that_never_has_room_is_too_large(files):
    with RunningServer({"letters": files["letters"]}, max_bodies_bytes=LARGE - 1) as server:
        assert answer(server.answer_to(head(), BODY))[0] == 413
        assert server.post("/v1/generate", SMALL_BODY).status_code == 200


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread")],
    ids=["memory", "process", "thread"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_request_without_memory_is_told_so(tight, monkeypatch, error, stream):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(tight.models["letters"].model, "settings", fail)
        refused = tight.post("/v1/generate", {**SMALL_BODY, "stream": stream})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "out_of_memory")
    assert refused.headers["Retry-After"] == "1"
    assert tight.post("/v1/generate", SMALL_BODY).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_memory_left_is_that_of_the_lowest_limit(monkeypatch):
    import resource

    limits = dict.fromkeys((resource.RLIMIT_DATA, resource.RLIMIT_AS), resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], resource.RLIM_INFINITY))
    assert process_memory_left() is None
    limits[resource.RLIMIT_DATA] = 1 << 50
    assert 1 << 49 < process_memory_left() < 1 << 50
    limits[resource.RLIMIT_AS] = 1 << 45
    assert 1 << 44 < process_memory_left() < 1 << 45
    limits[resource.RLIMIT_AS] = 1
    assert process_memory_left() == 0
