"""Pictures come in the request, as base64. No input names a file of the server, which the runtime would open."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from PIL import Image
from support import picture_models
from support.servers import RunningServer

from tformer_export import export
from tformer_export.sources import load_source
from tformer_runtime import Model


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "1.png"
    Image.fromarray(np.random.default_rng(5).integers(0, 256, (20, 31, 3), np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava")
    picture_models.llava().save_pretrained(folder)
    picture_models.llava_processor().save_pretrained(folder)
    export(load_source(folder), folder / "see.onnx")
    return folder / "see.onnx"


@pytest.fixture(scope="module")
def model(path):
    return Model.load(path, "cpu", threads=1)


@pytest.fixture(scope="module")
def server(path):
    with RunningServer({"see": path}) as running:
        yield running


def base64_of(picture):
    return base64.b64encode(picture.read_bytes()).decode()


def test_chat_with_a_picture_equals_the_model(server, model, picture):
    parts = [{"type": "text", "text": "what is "}, {"type": "image", "path": str(picture)}]
    expected = model.generate(model.prompt([{"role": "user", "content": parts}]), max_new_tokens=9)
    url = f"data:image/png;base64,{base64_of(picture)}"
    sent = [parts[0], {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]
    answer = server.client().chat.completions.create(
        model="see", messages=[{"role": "user", "content": sent}], max_tokens=9
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(model.prompt([{"role": "user", "content": parts}])["input_ids"])


def test_input_with_a_picture_equals_the_model(server, model, picture):
    expected = model.generate("what <image>", images=[str(picture)], max_new_tokens=9)
    input_ = {"input_ids": "what <image>", "pixel_values": [{"base64": base64_of(picture)}]}
    answer = server.post("/v1/generate", {"model": "see", "input": input_, "max_new_tokens": 9}).json()
    assert answer["results"][0]["token_ids"] == list(expected.token_ids)


def test_no_input_names_a_file(server, picture):
    named = str(picture)
    for value in (named, [named], {"path": named}, [{"base64": base64_of(picture), "path": named}], [[named]]):
        body = {"model": "see", "input": {"input_ids": "<image>a", "pixel_values": value}}
        refused = server.post("/v1/generate", body)
        assert refused.status_code == 400, refused.text
        assert 'takes {"base64": "…"}' in refused.json()["error"]["message"].replace("no text: give", "takes")
    damaged = {"input_ids": "<image>a", "pixel_values": [{"base64": "%%"}]}
    refused = server.post("/v1/generate", {"model": "see", "input": damaged})
    assert refused.json()["error"]["message"].startswith("the base64 of pixel_values is damaged")
    for url in (named, f"file://{named}", "http://127.0.0.1/1.png"):
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "see", "messages": [{"role": "user", "content": parts}]}
        refused = server.post("/v1/chat/completions", body)
        assert "is not downloaded: send it as data:image/png;base64" in refused.json()["error"]["message"]
