"""Keys of clients, and web pages of other origins."""

from __future__ import annotations

import openai
import pytest
from support.servers import RunningServer

from tformer_runtime.base.errors import OptionError
from tformer_serve.middleware.api_keys import read_api_keys

BODY = {"model": "letters", "input": "a", "max_new_tokens": 2}


@pytest.fixture(scope="module")
def guarded(files):
    options = {"api_keys": ("key-one", "key-two"), "cors_origins": ("https://page.example",)}
    with RunningServer({"letters": files["letters"]}, **options) as running:
        yield running


@pytest.mark.parametrize("key", ["key-one", "key-two"])
def test_each_key_opens_the_server(guarded, key):
    client = guarded.client(api_key=key)
    assert client.completions.create(model="letters", prompt="a", max_tokens=2).choices
    assert guarded.post("/v1/generate", BODY, headers={"Authorization": f"bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer key", "Bearer key-one2", "Basic key-one", "key-one", "Bearer é"]
)
def test_request_without_a_key_is_refused(guarded, header):
    headers = {} if header is None else {b"Authorization": header.encode()}
    with guarded.http() as client:
        for answer in (
            client.post("/v1/generate", json=BODY, headers=headers),
            client.get("/v1/models", headers=headers),
            client.get("/metrics", headers=headers),
            client.get("/openapi.json", headers=headers),
        ):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health/live", "/health/ready"):
            assert client.get(path, headers=headers).status_code == 200
        for path in ("/", "/health/live", "/health/ready"):  # as probes and proxies ask
            probed = client.head(path, headers=headers)
            assert (probed.status_code, probed.content) == (200, b"")


def test_client_raises_its_error_for_a_wrong_key(guarded):
    with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
        guarded.client(api_key="key-three").models.list()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has none: write one a line"),
        (b"\n \n", "has none: write one a line"),
        (b"a key\n", "key 1 of .* is none: a key has letters"),
        ("ok\nschlüssel\n".encode(), "key 2 of .* is none"),
        (b"\xff\n", "is not UTF-8"),
        (None, "cannot be read: No such file"),
    ],
)
def test_wrong_file_of_keys_is_refused(tmp_path, content, sentence):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=sentence):
        read_api_keys(path)


def test_file_of_keys_has_one_a_line(tmp_path):
    (tmp_path / "keys").write_text("one\n\n  two  \r\nthree")
    assert read_api_keys(tmp_path / "keys") == ("one", "two", "three")


def test_pages_of_named_origins_may_call(guarded, server):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    name = "Access-Control-Allow-Origin"
    with guarded.http() as client:
        allowed = client.options("/v1/generate", headers={"Origin": "https://page.example", **ask})
        assert (allowed.status_code, allowed.headers[name]) == (200, "https://page.example")
        assert name not in client.options("/v1/generate", headers={"Origin": "https://other.example", **ask}).headers
        refused = client.post("/v1/generate", json=BODY, headers={"Origin": "https://page.example"})
        assert (refused.status_code, refused.headers[name]) == (401, "https://page.example")
    with server.http() as client:
        answer = client.options("/v1/generate", headers={"Origin": "https://page.example", **ask})
        assert (answer.status_code, name in answer.headers) == (403, False)
