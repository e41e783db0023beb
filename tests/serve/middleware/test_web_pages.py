"""Web pages of strangers, whose host may be any and may have the address of this server: requests written by hand."""

from __future__ import annotations

import json

import pytest
from support.servers import RunningServer

from tformer_runtime.base.errors import OptionError
from tformer_serve.middleware.web_pages import allowed_hosts

LOOPBACK = ("127.0.0.1", "127.0.0.1")  # the host and the address of a server
OWN = [
    "localhost", "LocalHost", "localhost.", "page.localhost", "127.0.0.1", "127.0.0.2", "[::1]", "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
]  # fmt: skip
FOREIGN = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evillocalhost", ".localhost", "localhost..",
    "localhost@evil.example", "localhost:80@evil.example", "evil.example#localhost", "evil.example/localhost",
    "localhost,evil.example", "evil.example localhost", "0.0.0.0", "10.0.0.1", "[::2]", "[::1", "::1", "localhost:x",
    "localhost:80:80", "", ":80", "[]",
]  # fmt: skip
GENERATE = json.dumps({"model": "letters", "input": "a", "max_new_tokens": 1})
REQUESTS = [
    ("GET", "/"), ("GET", "/page/main.js"), ("GET", "/metrics"), ("GET", "/health/live"), ("GET", "/health/ready"),
    ("GET", "/v1/models"), ("GET", "/v1/models/letters"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("HEAD", "/"),
    ("OPTIONS", "/v1/models"), ("POST", "/v1/generate"), ("POST", "/v1/completions"), ("POST", "/v1/embeddings"),
    ("POST", "/v1/audio/transcriptions"), ("PUT", "/v1/models"),
]  # fmt: skip


@pytest.fixture(scope="module")
def local(files):
    """Return a server as the command line starts it at 127.0.0.1."""
    with RunningServer({"letters": files["letters"]}, allowed_hosts=allowed_hosts((), LOOPBACK)) as running:
        yield running


def ask(server, headers, method="GET", target="/v1/models", version="1.1", body=""):
    """Return the status and the body of a response to a request with headers."""
    lines = [f"{method} {target} HTTP/{version}", *headers, "Connection: close", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json"] if body else []
    answer = server.answer_to("\r\n".join([*lines, "", body]).encode())
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


@pytest.mark.parametrize("port", ["", ":1", ":65535", ":"])
@pytest.mark.parametrize("host", OWN)
def test_request_for_this_machine_is_answered(local, host, port):
    assert ask(local, [f"Host: {host}{port}"])[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_request_for_another_host_is_refused(local, host):
    for name in (host, f"{host}:8080"):
        status, content = ask(local, [f"Host: {name}"])
        if status == 400:  # the parser of HTTP refuses it
            assert b"letters" not in content
            continue
        assert status == 403
        error = json.loads(content)["error"]
        assert error["code"] == "wrong_host"
        assert "--allowed-host" in error["message"]


@pytest.mark.parametrize(("method", "target"), REQUESTS)
def test_no_route_answers_a_page_whose_name_has_this_address(local, method, target):
    """Its browser sends the name of the page as the host and as the origin, which are equal."""
    headers = ["Host: evil.example:8080", "Origin: http://evil.example:8080"]
    status, content = ask(local, headers, method, target, body=GENERATE if method == "POST" else "")
    assert status == 403
    assert b"letters" not in content
    assert method == "HEAD" or json.loads(content)["error"]["code"] == "wrong_host"


def test_request_that_names_two_hosts_is_refused(local):
    for headers in (["Host: localhost", "Host: evil.example"], ["Host: evil.example", "Host: localhost"]):
        status, content = ask(local, headers)
        assert status == 400
        assert b"letters" not in content
    status, content = ask(local, ["Host: localhost"], target="http://evil.example/v1/models")
    assert status == 404
    assert b'"letters"' not in content


def test_request_of_an_old_probe_without_a_host_is_answered(local):
    """No browser sends such a request."""
    assert ask(local, [], version="1.0")[0] == 200
    assert ask(local, [])[0] == 400  # HTTP/1.1 needs a host


def test_page_of_another_origin_gets_no_answer(local):
    """A browser sends no JSON without asking, but an extension or another program with a page may."""
    for origin in (
        "https://evil.example", "http://localhost:1", "null", "http://localhost@evil.example", "chrome-extension://localhost",
        "localhost", "http://localhost/", "",
    ):  # fmt: skip
        for method, target, body in (
            ("POST", "/v1/generate", GENERATE),
            ("GET", "/v1/models", ""),
            ("OPTIONS", "/v1/generate", ""),
            ("POST", "/v1/audio/transcriptions", "a"),
        ):
            status, content = ask(local, ["Host: localhost", f"Origin: {origin}"], method, target, body=body)
            assert (status, json.loads(content)["error"]["code"]) == (403, "wrong_origin"), (origin, method)
    for scheme in ("http", "https", "HTTP"):  # a proxy has the certificate
        headers = ["Host: localhost:80", f"Origin: {scheme}://LOCALHOST:80"]
        assert ask(local, headers, "POST", "/v1/generate", body=GENERATE)[0] == 200


def test_named_origins_may_call(files):
    with RunningServer({"letters": files["letters"]}, cors_origins=("https://page.example",)) as server:
        for origin, expected in (("https://page.example", 200), ("https://other.example", 403)):
            headers = ["Host: localhost", f"Origin: {origin}"]
            assert ask(server, headers, "POST", "/v1/generate", body=GENERATE)[0] == expected


@pytest.mark.parametrize(
    ("names", "own", "answered", "refused"),
    [
        ((), ("0.0.0.0", "0.0.0.0"), ["evil.example", "10.0.0.1"], []),
        ((), ("models.lan", "192.168.0.7"), ["evil.example"], []),
        ((), (), ["evil.example"], []),
        ((), ("machine", "127.0.1.1"), ["machine", "localhost"], ["other"]),
        ((), ("::1", "::1"), ["[::1]", "localhost"], ["[::2]"]),
        (("*",), LOOPBACK, ["evil.example"], []),
        (("Models.Example.",), LOOPBACK, ["models.example:8080", "localhost"], ["a.models.example", "example"]),
        (("*.m.example",), LOOPBACK, ["a.m.example", "b.a.m.example"], ["m.example", "am.example"]),
        (("10.0.0.1", "[FE80:0::1]"), ("0.0.0.0", "0.0.0.0"), ["10.0.0.1", "[fe80::1]"], ["evil.example"]),
    ],
)  # fmt: skip
def test_allowed_hosts(files, names, own, answered, refused):
    with RunningServer({"letters": files["letters"]}, allowed_hosts=allowed_hosts(names, own)) as server:
        assert [ask(server, [f"Host: {host}"])[0] for host in answered] == [200] * len(answered)
        assert [ask(server, [f"Host: {host}"])[0] for host in refused] == [403] * len(refused)


@pytest.mark.parametrize("name", ["http://a.example", "a.example:80", "", "*.", "a*.example", "a b", "user@a.example"])
def test_allowed_host_that_is_none_is_refused(name):
    with pytest.raises(OptionError, match="allowed_host must be a name such as"):
        allowed_hosts([name])


def test_keys_do_not_open_a_server_for_other_hosts(files):
    """Pages have no key, but the open paths tell the names of the models."""
    hosts = allowed_hosts((), LOOPBACK)
    with RunningServer({"letters": files["letters"]}, allowed_hosts=hosts, api_keys=("key",)) as server:
        headers = ["Host: evil.example", "Authorization: Bearer key"]
        assert ask(server, headers)[0] == ask(server, headers, target="/health/ready")[0] == 403
