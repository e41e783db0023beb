"""`tformer-serve`: starts, refuses to start with one sentence, and stops at a signal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner
from support.command_lines import start_process
from support.digested_models import write_digested
from support.servers import HANG_SECONDS, RunningServer, read_to_end, write_chat_model

from tformer_runtime.format.info import verified_digest
from tformer_runtime.format.open_files import MAX_COPIED_BYTES
from tformer_serve.cli import main

PROGRAM = [sys.executable, "-m", "tformer_serve.cli"]


def refused(*arguments):
    """Return the sentence of a start that fails."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("tformer-serve: ")
    return line.removeprefix("tformer-serve: ")


def started(*arguments):
    """Return the process of a server that listens, and its URL."""
    process = start_process(*PROGRAM, *arguments, "--port", "0")
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == "listening":
            return process, event["urls"][0]
    raise AssertionError("the server has not started")


def test_model_that_cannot_be_loaded_stops_the_start(tmp_path, files):
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    assert "bad.onnx" in refused("--port", "0", files["letters"], tmp_path / "bad.onnx")
    assert "missing.onnx" in refused("--port", "0", tmp_path / "missing.onnx")


def test_wrong_names_are_refused(files):
    letters = files["letters"]
    assert refused("--port", "0", letters, letters).startswith("two files have the name 'letters': name them apart")
    assert refused("--port", "0", f"a b={letters}").startswith("'a b' is not a name for a model: give one of letters")
    assert refused("--port", "0", f"={letters}").startswith("'' is not a name for a model")


def test_wrong_options_are_refused(tmp_path, files):
    letters = files["letters"]
    assert refused("--max-body", "x", letters).startswith("--max-body must be a number of bytes")
    assert refused("--max-upload", "x", letters).startswith("--max-upload must be a number of bytes")
    assert refused("--api-key-file", tmp_path / "none", letters).startswith("the file of keys, ")
    assert refused("--tls-key", tmp_path / "none", letters).startswith("--tls-key needs tls_cert: give the certificate")
    assert refused("--tls-cert", tmp_path / "none", letters).startswith("TLS cannot use ")
    assert refused("--port", "0", "--allowed-host", "a.example:80", letters).startswith("--allowed-host must be a name")
    assert refused("--host", "no such host", letters).startswith("no such host is not an address to listen at: ")
    (tmp_path / "keys").write_text("a b")
    assert refused("--api-key-file", tmp_path / "keys", letters).startswith("key 1 of ")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = refused("--port", port, letters)
    assert (
        sentence == f"--port {port} of 127.0.0.1 cannot be used: another program listens there; choose another --port"
    )


def test_missing_packages_are_named(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert refused(files["letters"]) == "a server needs uvicorn: pip install 'tformer[serve]'"


def test_packages_that_requests_need_are_named_at_the_start(files, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "tformer_serve")
    for name in ("jinja2", "llguidance"):
        monkeypatch.setitem(sys.modules, name, None)
    with RunningServer({"chat": files["chat"], "letters": files["letters"]}) as server:
        told = [record.fields for record in caplog.records if record.getMessage() == "missing package"]
        listed = {model["id"]: model["tformer"]["paths"] for model in server.http().get("/v1/models").json()["data"]}
    assert told == [
        {"model": "chat", "message": "chat templates need jinja2: pip install 'tformer[chat]'"},
        {"model": "chat", "message": "tools and response_format need llguidance: pip install 'tformer[constrain]'"},
    ]
    assert listed["chat"] == listed["letters"] == ["/v1/completions", "/v1/generate"]


def test_usage_errors_have_status_2(files):
    for arguments in ([], [files["letters"], "--port", "99999"], [files["letters"], "--timeout", "0"]):
        assert CliRunner().invoke(main, list(map(str, arguments))).exit_code == 2


def test_names_are_stems_or_given(files):
    process, url = started(files["letters"], f"speak={files['pronounce']}")
    try:
        models = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert [model["id"] for model in models] == ["letters", "speak"]
    finally:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("long") / "long.onnx", max_length=2000)


def test_signal_lets_an_accepted_stream_finish(long_model):
    """The signal comes after the first token of some 1,900."""
    process, url = started(long_model)
    body = {"model": "long", "input": "a", "stream": True, "suppress_tokens": [2], "temperature": 1.0, "seed": 1}
    with (
        httpx.Client(trust_env=False, timeout=HANG_SECONDS) as client,
        client.stream("POST", f"{url}/v1/generate", json=body) as answer,
    ):
        events = answer.iter_lines()
        first = next(events)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in events if line]
    assert rest[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in (first, *rest[:-2])]
    assert pieces[-1]["finish_reason"] == "length"
    assert sum(len(piece["token_ids"]) for piece in pieces) == 1998
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in err
    assert '"event": "draining", "reason": "SIGTERM"' in err


def test_started_server_answers_clients_of_this_machine_alone(files):
    """Also a client that ends its side of the connection: the event loop of a started server is uvloop's."""
    process, url = started(files["letters"], "--allowed-host", "models.example")
    body = json.dumps({"model": "letters", "input": "a", "max_new_tokens": 2})
    try:
        address = httpx.URL(url)
        for host, status in ((address.netloc.decode(), 200), ("models.example", 200), ("evil.example", 403)):
            lines = ["POST /v1/generate HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
            with socket.create_connection((address.host, address.port), HANG_SECONDS) as connection:
                connection.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
                connection.shutdown(socket.SHUT_WR)
                answer = read_to_end(connection).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
            assert answer.startswith(b"HTTP/1.1 %d " % status)
    finally:
        process.terminate()
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_bodies_do_not_take_the_memory_of_the_process(files):
    """Thirty clients hold bodies of 8 MB, which are more than the limit of the process leaves. All get an answer."""
    process, url = started(files["chat"], "--max-process-memory", "640M", "--threads", "1")
    message = {"role": "user", "content": "a"}
    body = json.dumps({"model": "chat", "messages": [message], "max_tokens": 1}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size, address = 8 << 20, httpx.URL(url)
    try:
        with contextlib.ExitStack() as stack:
            clients = [
                stack.enter_context(socket.create_connection((address.host, address.port), HANG_SECONDS))
                for _ in range(30)
            ]
            for client in clients:
                client.sendall(f"{head}Content-Length: {size}\r\nConnection: close\r\n\r\n".encode())
                client.sendall(body.ljust(size - 1))
            for client in clients:
                client.sendall(b" ")
            statuses = {read_to_end(client).split(b" ", 2)[1] for client in clients}
        assert statuses == {b"200", b"503"}
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(
            f"{url}/v1/chat/completions", content=body, headers=headers, trust_env=False, timeout=HANG_SECONDS
        )
        assert answer.status_code == 200
    finally:
        process.terminate()
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "raceback" not in err


@pytest.fixture
def live(tmp_path):
    return write_digested(tmp_path / "live.onnx", seed=5, encoder=False)


def replaced(path, **toy):
    """Put another model in the place of a file, as mv does, and return its digest."""
    new = write_digested(path.with_name("new.onnx"), **toy)
    digest = verified_digest(new)
    os.replace(new, path)
    return digest


def next_event(process, name):
    """Return the next line of the log of an event."""
    for line in process.stderr:
        event = json.loads(line)
        if event["event"] == name:
            return event
    raise AssertionError(f"the server has ended without {name}")


def ended(process):
    """End a server, and return its exit status."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert "Traceback" not in err
    return process.returncode


def test_hang_up_loads_the_files_that_have_changed(live, files):
    process, url = started(live, files["letters"])
    with httpx.Client(trust_env=False, timeout=HANG_SECONDS, base_url=url) as client:

        def text():
            answer = client.post("/v1/generate", json={"model": "live", "input": "hello", "max_new_tokens": 9})
            return answer.json()["results"][0]["text"]

        before = text()
        for seed in (6, 5):
            digest = replaced(live, seed=seed, encoder=False)
            process.send_signal(signal.SIGHUP)
            assert next_event(process, "reloading")["reason"] == "SIGHUP"
            event = next_event(process, "reload")
            assert (event["model"], event["outcome"], event["digest"]) == ("live", "reloaded", digest)
            assert next_event(process, "reload")["outcome"] == "unchanged"
            assert client.get("/v1/models/live").json()["tformer"]["digest"] == digest
            assert (text() == before) == (seed == 5)
        live.unlink()
        process.send_signal(signal.SIGHUP)
        event = next_event(process, "reload")
        assert (event["level"], event["outcome"]) == ("error", "failed")
        assert event["message"].endswith("live.onnx does not exist")
        assert text() == before
    assert ended(process) == 0


def test_hang_up_during_the_start_reloads_after_it(live, tmp_path):
    """The file of keys is a pipe, which the server reads during its start."""
    keys = tmp_path / "keys"
    os.mkfifo(keys)
    process = start_process(*PROGRAM, live, "--port", "0", "--api-key-file", keys)
    with keys.open("w") as pipe:
        process.send_signal(signal.SIGHUP)
        pipe.write("key")
    assert next_event(process, "listening")["models"] == ["live"]
    assert next_event(process, "reloading")["reason"] == "SIGHUP"
    assert next_event(process, "reload")["outcome"] == "unchanged"
    assert ended(process) == 0


def test_hang_up_while_the_server_stops_changes_nothing(live):
    process, url = started(live)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "live", "input": "hello"}).encode()
    head = f"POST /v1/generate HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())  # the server waits for the body
        while "tformer_open_requests 1.0" not in httpx.get(f"{url}/metrics", trust_env=False).text:
            pass
        process.send_signal(signal.SIGTERM)
        assert next_event(process, "draining")["open_requests"] == 1
        process.send_signal(signal.SIGHUP)
        assert next_event(process, "reload_refused")["reason"] == "the server is stopping"
        client.sendall(body)
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 200")
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.parametrize("is_large", [False, True])
def test_file_that_is_cut_short_does_not_end_the_process(tmp_path, is_large):
    vocabulary = {"vocabulary": MAX_COPIED_BYTES // 100, "tokenizer": False} if is_large else {}
    path = write_digested(tmp_path / "live.onnx", seed=5, encoder=False, **vocabulary)
    assert (path.stat().st_size > MAX_COPIED_BYTES) == is_large
    content = path.read_bytes()
    process, url = started(path)
    with httpx.Client(trust_env=False, timeout=HANG_SECONDS, base_url=url) as client:

        def answer():
            return client.post("/v1/generate", json={"model": "live", "input": [5, 6, 7], "max_new_tokens": 4})

        ids = answer().json()["results"][0]["token_ids"]
        os.truncate(path, 0)
        changed = answer()
        if is_large:
            assert (changed.status_code, changed.json()["error"]["code"]) == (503, "model_changed")
            assert next_event(process, "model_changed")["file"] == str(path)
            path.with_name("whole.onnx").write_bytes(content)
            os.replace(path.with_name("whole.onnx"), path)
            process.send_signal(signal.SIGHUP)
            assert next_event(process, "reload")["outcome"] == "reloaded"
        assert answer().json()["results"][0]["token_ids"] == ids
    assert ended(process) == 0


def test_signal_in_native_code_is_reported(live):
    process, _ = started(live)
    process.send_signal(signal.SIGBUS)
    _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in err


def test_server_speaks_tls(tmp_path, files):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert,
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    process, url = started(files["letters"], "--tls-cert", cert, "--tls-key", key)
    try:
        assert url.startswith("https://")
        assert (
            httpx.get(
                f"{url}/health/ready", verify=ssl.create_default_context(cafile=cert), trust_env=False
            ).status_code
            == 200
        )
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/health/ready", trust_env=False)
    finally:
        process.terminate()
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    assert "TLS cannot use" in refused("--tls-cert", key, files["letters"])
