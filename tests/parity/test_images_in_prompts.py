"""Files that read images in their prompt generate what transformers' processor and generate() do, token for token."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch
from PIL import Image
from support import image_models
from support.command_lines import failed, run
from support.image_models import MARKER_ID
from support.servers import RunningServer

from tformer_export import Quantization, export
from tformer_export.sources import load_source
from tformer_runtime import GenerationOptions, InputError, Model, SourceError, UnsupportedCallError

TOKENS = 12


@pytest.fixture(scope="module")
def image_paths(tmp_path_factory):
    """Return paths of images of several sizes and modes."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(5)
    paths = []
    for (height, width), mode in (((20, 31), "RGB"), ((40, 22), "L"), ((16, 16), "RGBA")):
        coarse = Image.fromarray(random.integers(0, 256, (4, 5, 3), np.uint8)).resize((width, height))
        paths.append(folder / f"{mode}.png")
        coarse.convert(mode).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return module, processor, file and report of an export from a folder."""
    module, processor = image_models.llava(), image_models.llava_processor()
    folder = tmp_path_factory.mktemp("llava")
    module.save_pretrained(folder)
    processor.save_pretrained(folder)
    report = export(load_source(folder), folder / "model.onnx")
    return module, processor, folder / "model.onnx", report


@pytest.fixture(scope="module")
def model(exported):
    return Model.load(exported[2], "cpu", threads=1)


@pytest.fixture(scope="module")
def prompts(image_paths):
    """Return texts with their images: several, none, one, and two without text between them."""
    one, two, three = image_paths
    return [
        ("what <image> is <image>this", [one, two]),
        ("no image here", []),
        ("<image>abc", [three]),
        ("look <image><image><image> now", [three, one, two]),
    ]


def expected_ids(exported, text, images, tokens=TOKENS, **options):
    """Return the ids that transformers generates."""
    module, processor, *_ = exported
    opened = [Image.open(path).convert("RGB") for path in images]
    inputs = processor(text=[text], images=opened or None, return_tensors="pt")
    return generated(module, inputs, tokens, **options)


def generated(module, inputs, tokens=TOKENS, **options):
    with torch.no_grad():
        ids = module.generate(**inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=2, **options)
    return tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())


def test_export_is_proven_with_images(exported):
    report = exported[3]
    assert report.task == "image-text-to-text"
    assert report.parity.relative_error < 1e-4
    assert (report.parity.tokens_equal, report.parity.tokens) == (36, 36)
    assert report.parity.raw.images > 0


def test_generated_ids_match_transformers(exported, model, prompts):
    expected = [expected_ids(exported, *prompt) for prompt in prompts]
    assert [
        model.generate(text, images=images, max_new_tokens=TOKENS).token_ids for text, images in prompts
    ] == expected
    assert len(set(expected)) == len(expected)


def test_generated_placeholder_takes_no_image(exported, model, prompts):
    """generate() gives a placeholder that the model writes its own embedding, as it does any other id."""
    text, images = prompts[2]
    bias = {(MARKER_ID,): 100.0}
    expected = expected_ids(exported, text, images, sequence_bias=bias, tokens=4)
    assert expected == (MARKER_ID,) * 4
    options = GenerationOptions(logit_bias={MARKER_ID: 100.0}, max_new_tokens=4)
    after = model.generate(text, options, images=images)
    assert after.token_ids == expected
    module, processor, *_ = exported
    inputs = processor(text=[text], images=[Image.open(images[0]).convert("RGB")], return_tensors="pt")
    with torch.no_grad():
        scores = module.generate(
            **inputs, max_new_tokens=4, do_sample=False, eos_token_id=2, sequence_bias=bias, output_logits=True,
            return_dict_in_generate=True,
        ).logits  # fmt: skip
    logprobs = [float(row[0].log_softmax(-1)[MARKER_ID]) for row in scores]
    assert after.token_logprobs == pytest.approx(logprobs, abs=1e-3)


def test_requests_with_and_without_images_decode_together(exported, model, prompts):
    """More requests than rows: rows join while others decode, with more images and with fewer."""
    inputs = [model.image_prompt(*prompt) for prompt in prompts * 2]
    lengths = [TOKENS, 3, 7, 5]
    expected = [expected_ids(exported, *prompt) for prompt in prompts * 2]
    for batch_size in (2, 3, 8):
        results = model.generate_batch(inputs, max_new_tokens=TOKENS, batch_size=batch_size)
        assert [result.token_ids for result in results] == expected
    asynchronous = run_asynchronously(model, inputs, lengths * 2)
    assert asynchronous == [ids[:length] for ids, length in zip(expected, lengths * 2, strict=True)]


def run_asynchronously(model, inputs, lengths):
    import asyncio

    from tformer_runtime import AsyncModel

    async def all_results():
        async with AsyncModel(model, max_batch_size=3) as served:
            calls = [served.generate(value, max_new_tokens=n) for value, n in zip(inputs, lengths, strict=True)]
            return [result.token_ids for result in await asyncio.gather(*calls)]

    return asyncio.run(all_results())


def test_beams_match_transformers(exported, model, prompts):
    for text, images in prompts[:3]:
        expected = expected_ids(exported, text, images, num_beams=3, tokens=6)
        assert model.generate(text, images=images, num_beams=3, max_new_tokens=6).token_ids == expected


def test_speculation_and_cached_prefix_change_nothing(model, prompts):
    text, images = prompts[0]
    expected = model.generate(text, images=images, max_new_tokens=TOKENS)
    guessed = model.generate(text, images=images, max_new_tokens=TOKENS, prompt_lookup=True)
    assert guessed.token_ids == expected.token_ids
    before, after = text[:-4], text[-4:]
    prefix = model.cache_prefix(model.image_prompt(before, images))
    assert model.generate(after, prefix=prefix, max_new_tokens=TOKENS).token_ids == expected.token_ids
    with pytest.raises(InputError, match="cannot follow a cached prefix"):
        model.generate("<image>", prefix=prefix, images=images[:1])


def conversation(image_paths, *questions):
    parts = [{"type": "image", "image": path} for path in image_paths]
    return [*parts, {"type": "text", "text": questions[0]}]


def template_ids(exported, messages, tokens=8):
    """Return the ids that transformers generates for a conversation."""
    module, processor, *_ = exported
    opened = [
        {**message, "content": [
            {"type": "image", "image": Image.open(part["image"]).convert("RGB")} if part["type"] == "image" else part
            for part in message["content"]
        ]}
        if isinstance(message["content"], list) else message
        for message in messages
    ]  # fmt: skip
    inputs = processor.apply_chat_template(
        opened, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    return generated(module, inputs, tokens)


def test_conversation_with_images_matches_transformers(exported, model, image_paths):
    """An image in the first turn, none in the second, another in the third."""
    chat, messages = model.chat(), []
    turns = [conversation(image_paths[:1], "what is it?"), "and then?", conversation(image_paths[1:], "these two?")]
    for content in turns:
        messages.append({"role": "user", "content": content})
        expected = template_ids(exported, messages)
        result = chat.send(content, max_new_tokens=8)
        assert result.token_ids == expected
        assert model.generate(model.prompt(messages), max_new_tokens=8).token_ids == expected
        messages.append({"role": "assistant", "content": result.text})
    chat.rewind(1)
    assert chat.send(turns[-1], max_new_tokens=8).token_ids == expected


def test_images_of_messages_are_named_as_in_transformers(model, image_paths):
    question = {"type": "text", "text": "what?"}
    encoded = base64.b64encode(image_paths[0].read_bytes()).decode()
    parts = [
        {"image": image_paths[0]},
        {"path": str(image_paths[0])},
        {"base64": encoded},
        {"url": str(image_paths[0])},
    ]
    contents = [[{"type": "image", **part}, question] for part in parts]
    first, *others = (model.prompt([{"role": "user", "content": content}]) for content in contents)
    assert first["pixel_values"].shape == (1, 3, 16, 16)
    for other in others:
        assert np.array_equal(other["input_ids"], first["input_ids"])
        assert np.array_equal(other["pixel_values"], first["pixel_values"])
    with pytest.raises(InputError, match=r"https://example.org/a.png is not downloaded: give the name of a file"):
        model.prompt([{"role": "user", "content": [{"type": "image", "url": "https://example.org/a.png"}, question]}])
    with pytest.raises(InputError, match="the base64 text of an image is damaged"):
        model.prompt([{"role": "user", "content": [{"type": "image", "base64": "?"}, question]}])


def test_command_line_puts_images_before_the_message(exported, image_paths):
    path = exported[2]
    content = conversation(image_paths[:2], "what?")
    expected = template_ids(exported, [{"role": "user", "content": content}])
    flags = ["--image", image_paths[0], "--image", image_paths[1], "--max-new-tokens", 8, "--json"]
    result = run(path, "what?", "--chat", *flags)
    assert result.exit_code == 0
    assert tuple(json.loads(result.stdout)["token_ids"]) == expected
    as_json = json.dumps(
        [{"role": "user", "content": [{**part, "image": str(part["image"])} if "image" in part else part
          for part in content]}]
    )  # fmt: skip
    assert tuple(json.loads(run(path, as_json, "--chat", *flags[4:]).stdout)["token_ids"]) == expected
    plain = run(path, "a <image> b <image>", *flags)
    assert tuple(json.loads(plain.stdout)["token_ids"]) == expected_ids(
        exported, "a <image> b <image>", image_paths[:2], 8
    )


def test_quantization_is_calibrated_with_images(exported, image_paths, tmp_path):
    """The text after the last image is predicted; every fourth line is measured."""
    module, processor, path, _ = exported
    texts = [f"<image>{'abcdefgh'[i:]} and {'hgfedcba'[: i + 1]}" for i in range(8)]
    images = [image_paths[i % len(image_paths)] for i in range(8)]
    lines = [
        json.dumps({"input_ids": text, "pixel_values": [str(image)]}) for text, image in zip(texts, images, strict=True)
    ]
    lines[0] = texts[0] = "no image here"
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    quantization = Quantization("int8", kv_cache="int8", calibration=tmp_path / "lines.txt")
    report = export(load_source(path.parent), tmp_path / "int8.onnx", quantization=quantization)
    measured = [processor(text=[texts[i]], images=[Image.open(images[i]).convert("RGB")]) for i in (3, 7)]
    after = [inputs["input_ids"][0][::-1].index(MARKER_ID) for inputs in measured]
    assert report.degradation.positions == sum(after)
    assert report.degradation.token_agreement > 0.8
    assert {name.split("/")[0] for name in report.products} == {"encode", "decode"}
    model = Model.load(tmp_path / "int8.onnx", "cpu")
    inputs = processor(text=[texts[3]], images=[Image.open(images[3]).convert("RGB")], return_tensors="pt")
    with torch.no_grad():
        expected = module(**inputs).logits[0].log_softmax(-1)
    scores = model.score(model.image_prompt(texts[3], [images[3]]))
    targets = inputs["input_ids"][0, 1:, None]
    assert np.abs(scores - expected[:-1].gather(1, targets)[:, 0].numpy()).mean() < 0.2


def test_wrong_images_are_refused(exported, model, image_paths, tmp_path):
    (tmp_path / "torn.png").write_bytes(image_paths[0].read_bytes()[:60])
    path = exported[2]
    with pytest.raises(InputError, match=r"names 1 images \(<image>\), and 2 are given: write <image> where each"):
        model.generate("one <image>", images=image_paths[:2])
    with pytest.raises(InputError, match=r"names 1 images .* and 0 are given"):
        model.generate("one <image>")
    with pytest.raises(InputError, match=r"image 2: .*torn.png is a damaged image"):
        model.generate("<image><image>", images=[image_paths[0], tmp_path / "torn.png"])
    with pytest.raises(InputError, match="99 images take 396 tokens and the model holds 128: give fewer"):
        model.generate("", images=[tmp_path / "never read.png"] * 99)
    with pytest.raises(InputError, match="a single image is a list of one"):
        model.generate("<image>", images=str(image_paths[0]))
    with pytest.raises(InputError, match=r"the ids hold 1 placeholders .id 5., and 1 images need 4"):
        model.generate([9, MARKER_ID, 9], images=image_paths[:1])
    with pytest.raises(InputError, match="a conversation is a text, or a list of messages"):
        model.prompt([{"role": "user", "content": [{"type": "image"}]}])
    message = failed(run(path, "<image>", "--image", tmp_path / "none.png"))
    assert message.endswith("none.png cannot be read: No such file or directory")
    assert "names 0 images (<image>), and 1 are given" in failed(run(path, "hi", "--image", image_paths[0]))


def test_prompt_that_is_read_in_both_directions_is_refused():
    with pytest.raises(SourceError, match="attend to later tokens of the prompt, so that it cannot be decoded"):
        export(image_models.paligemma(), "never.onnx")


def test_text_model_refuses_images(tmp_path, image_paths):
    from support import hf_models

    export(hf_models.gpt2(), tmp_path / "text.onnx", chat_template=None)
    text_model = Model.load(tmp_path / "text.onnx", "cpu")
    with pytest.raises(UnsupportedCallError, match="reads no images in its prompt"):
        text_model.generate([4, 5], images=image_paths[:1])


# The server: images come in the request, as base64. No input names a file, which the runtime would open.


@pytest.fixture(scope="module")
def image_server(exported):
    with RunningServer({"see": exported[2]}) as running:
        yield running


def base64_of(image):
    return base64.b64encode(image.read_bytes()).decode()


def test_chat_of_the_server_with_a_image_equals_the_model(image_server, model, image_paths):
    image = image_paths[0]
    parts = [{"type": "text", "text": "what is "}, {"type": "image", "path": str(image)}]
    expected = model.generate(model.prompt([{"role": "user", "content": parts}]), max_new_tokens=9)
    url = f"data:image/png;base64,{base64_of(image)}"
    sent = [parts[0], {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]
    answer = image_server.client().chat.completions.create(
        model="see", messages=[{"role": "user", "content": sent}], max_tokens=9
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == len(model.prompt([{"role": "user", "content": parts}])["input_ids"])


def test_input_of_the_server_with_a_image_equals_the_model(image_server, model, image_paths):
    image = image_paths[0]
    expected = model.generate("what <image>", images=[str(image)], max_new_tokens=9)
    input_ = {"input_ids": "what <image>", "pixel_values": [{"base64": base64_of(image)}]}
    answer = image_server.post("/v1/generate", {"model": "see", "input": input_, "max_new_tokens": 9}).json()
    assert answer["results"][0]["token_ids"] == list(expected.token_ids)


def test_no_input_of_the_server_names_a_file(image_server, image_paths):
    image = image_paths[0]
    named = str(image)
    for value in (named, [named], {"path": named}, [{"base64": base64_of(image), "path": named}], [[named]]):
        body = {"model": "see", "input": {"input_ids": "<image>a", "pixel_values": value}}
        refused = image_server.post("/v1/generate", body)
        assert refused.status_code == 400, refused.text
        assert 'takes {"base64": "…"}' in refused.json()["error"]["message"].replace("no text: give", "takes")
    damaged = {"input_ids": "<image>a", "pixel_values": [{"base64": "%%"}]}
    refused = image_server.post("/v1/generate", {"model": "see", "input": damaged})
    assert refused.json()["error"]["message"].startswith("the base64 of pixel_values is damaged")
    for url in (named, f"file://{named}", "http://127.0.0.1/1.png"):
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "see", "messages": [{"role": "user", "content": parts}]}
        refused = image_server.post("/v1/chat/completions", body)
        assert "is not downloaded: send it as data:image/png;base64" in refused.json()["error"]["message"]
