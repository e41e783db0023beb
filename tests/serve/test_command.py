"""`tformer-serve`: starts, refuses to start with one sentence, and stops at a signal."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import ssl
import subprocess
import sys

import httpx
import pytest
from click.testing import CliRunner
from support.command_lines import start_process
from support.servers import HANG_SECONDS, RunningServer, read_to_end, write_chat_model

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
    assert refused("--port", "0", f"a b={letters}").startswith("'a b' is no name for a model: give one of letters")
    assert refused("--port", "0", f"={letters}").startswith("'' is no name for a model")


def test_wrong_options_are_refused(tmp_path, files):
    letters = files["letters"]
    assert refused("--max-body", "x", letters).startswith("--max-body must be a number of bytes")
    assert refused("--max-upload", "x", letters).startswith("--max-upload must be a number of bytes")
    assert refused("--api-key-file", tmp_path / "none", letters).startswith("the file of API keys, ")
    assert refused("--tls-key", tmp_path / "none", letters).startswith("--tls-key needs tls_cert: give the certificate")
    assert refused("--tls-cert", tmp_path / "none", letters).startswith("TLS cannot use ")
    assert refused("--port", "0", "--allowed-host", "a.example:80", letters).startswith("--allowed-host must be a name")
    assert refused("--host", "no such host", letters).startswith("no such host is no address to listen at: ")
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
