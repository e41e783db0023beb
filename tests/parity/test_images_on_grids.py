"""A file for images of one size generates what transformers' processor and generate() do for such images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from support import hf_models, image_models

from tformer_export import export
from tformer_export.sources import load_source
from tformer_runtime import InputError, Model, OptionError, SourceError

SIZE = (16, 32)  # height, width
TOKENS = 8


def random_image(seed, size=SIZE):
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize(size[::-1])


@pytest.fixture(scope="module", params=[pytest.param("qwen2_vl", marks=pytest.mark.thorough), "qwen2_5_vl"])
def exported(request, tmp_path_factory):
    """Return module, processor, the loaded file and the report of an export."""
    module, processor = getattr(image_models, request.param)(), image_models.grid_processor()
    path = tmp_path_factory.mktemp("grid") / "model.onnx"
    report = export(module, path, tokenizer=processor, image_size=SIZE)
    return module, processor, Model.load(path, "cpu", threads=1), report


def expected_ids(module, inputs, **options):
    with torch.no_grad():
        ids = module.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=2, **options)
    return tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())


def test_export_is_proven_with_grids(exported):
    parity = exported[3].parity
    assert parity.relative_error < 1e-4
    assert (parity.tokens_equal, parity.raw.images) == (36, 6)


def test_generated_ids_match_transformers(exported):
    """Positions of text follow those of the images before it, alone and in one batch.

    transformers refuses images without a token between them; its chat templates put some there.
    """
    module, processor, model, _ = exported
    one, two, three = map(random_image, range(3))
    prompts = [
        ("what <image> is?", [one]),
        ("<image>a", [two]),
        ("a <image> b<image> <image> and more", [three, one, two]),
        ("no image", []),
    ]
    inputs = [processor(text=[text], images=images or None, return_tensors="pt") for text, images in prompts]
    expected = [expected_ids(module, values) for values in inputs]
    assert len(set(expected)) == len(expected)
    assert [
        model.generate(text, images=images, max_new_tokens=TOKENS).token_ids for text, images in prompts
    ] == expected
    together = model.generate_batch([model.image_prompt(*prompt) for prompt in prompts], max_new_tokens=TOKENS)
    assert [result.token_ids for result in together] == expected
    beams = expected_ids(module, inputs[2], num_beams=3)
    text, images = prompts[2]
    assert model.generate(text, images=images, num_beams=3, max_new_tokens=TOKENS).token_ids == beams
    guessed = model.generate(text, images=images, max_new_tokens=TOKENS, prompt_lookup=True)
    assert guessed.token_ids == expected[2]


def test_conversation_matches_transformers(exported):
    module, processor, model, _ = exported
    chat, messages = model.chat(), []
    for content in ([{"type": "image", "image": random_image(7)}, {"type": "text", "text": "what?"}], "and then?"):
        messages.append({"role": "user", "content": content})
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        result = chat.send(content, max_new_tokens=TOKENS)
        assert result.token_ids == expected_ids(module, inputs)
        messages.append({"role": "assistant", "content": result.text})


def test_other_images_are_resized_to_the_size_of_the_file(exported):
    _, processor, model, _ = exported
    other = random_image(3, (37, 21))
    resized = other.resize(SIZE[::-1], Image.Resampling.BICUBIC)
    text = "<image> a"
    assert model.generate(text, images=[other], max_new_tokens=TOKENS).token_ids == expected_ids(
        exported[0], processor(text=[text], images=[resized], return_tensors="pt")
    )


def test_impossible_image_sizes_are_refused(tmp_path):
    module, processor = image_models.qwen2_vl(), image_models.grid_processor()

    def attempt(size):
        export(module, tmp_path / "never.onnx", tokenizer=processor, image_size=size)

    with pytest.raises(SourceError, match=r"give it with --image-size HEIGHTxWIDTH .* in multiples of 8 pixels"):
        attempt(None)
    with pytest.raises(SourceError, match="an image size has multiples of 8 pixels, not 20x32"):
        attempt((20, 32))
    with pytest.raises(SourceError, match="brings an image of 64x64 pixels to another size, by its limits"):
        attempt((64, 64))
    with pytest.raises(SourceError, match="reads no images in its prompt: leave --image-size out"):
        export(hf_models.gpt2(), tmp_path / "never.onnx", image_size=SIZE)
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(OptionError, match="--image-size is for a Hugging Face folder"):
        load_source(tmp_path / "model.pt", image_size=SIZE)
    with pytest.raises(SourceError, match="determines the size of its images: leave --image-size out"):
        export(image_models.llava(), tmp_path / "never.onnx", image_size=SIZE)


def test_images_that_do_not_fit_are_refused(exported):
    with pytest.raises(InputError, match="21 images take 168 tokens and the model holds 128: give fewer"):
        exported[2].generate("<image>", images=[random_image(0)] * 21)
