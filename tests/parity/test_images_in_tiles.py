"""Files that read images in tiles generate what transformers' processor and generate() do, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from support import image_models

from tformer_export import export
from tformer_export.sources import load_source
from tformer_export.sources.hugging_face.images import read_image_steps
from tformer_runtime import InputError, Model

TOKENS = 8
SIZES = ((20, 90), (64, 64), (200, 31), (33, 40))  # height, width: one row of tiles, a square, one column, 3 x 3


def random_image(height, width, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height))


@pytest.fixture(scope="module", params=[pytest.param("idefics3", marks=pytest.mark.thorough), "smolvlm"])
def exported(request, tmp_path_factory):
    """Return module, processor, the loaded file and the report of an export from a folder."""
    module, processor = getattr(image_models, request.param)(), image_models.tiles_processor()
    folder = tmp_path_factory.mktemp(request.param)
    module.save_pretrained(folder)
    processor.save_pretrained(folder)
    report = export(load_source(folder), folder / "model.onnx")
    return module, processor, Model.load(folder / "model.onnx", "cpu", threads=1), report


def expected_ids(module, processor, text, images, **options):
    inputs = processor(text=[text], images=images or None, return_tensors="pt")
    with torch.no_grad():
        ids = module.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=2, **options)
    return tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())


def test_export_is_proven_with_tiles(exported):
    parity = exported[3].parity
    assert parity.relative_error < 1e-4
    assert (parity.tokens_equal, parity.raw.images) == (36, 6)


def test_generated_ids_match_transformers(exported):
    """Images of other grids; prompts with several images, and with none, alone and in one batch."""
    module, processor, model, _ = exported
    one, two, three, four = (random_image(*size, seed) for seed, size in enumerate(SIZES))
    prompts = [
        ("what <image> is?", [one]),
        ("<image>", [two]),
        ("a <image> b<image><image>", [three, one, four]),
        ("no image", []),
    ]
    expected = [expected_ids(module, processor, *prompt) for prompt in prompts]
    assert len(set(expected)) == len(expected)
    assert [
        model.generate(text, images=images, max_new_tokens=TOKENS).token_ids for text, images in prompts
    ] == expected
    together = model.generate_batch([model.image_prompt(*prompt) for prompt in prompts], max_new_tokens=TOKENS)
    assert [result.token_ids for result in together] == expected
    beams = expected_ids(module, processor, *prompts[0], num_beams=3)
    assert model.generate(prompts[0][0], images=[one], num_beams=3, max_new_tokens=TOKENS).token_ids == beams


def test_ids_and_tiles_match_the_processor(exported):
    _, processor, model, _ = exported
    images = [random_image(*size, seed) for seed, size in enumerate(SIZES)]
    text = "<image>".join(["a", "b", "c", "d", "e"])
    expected = processor(text=[text], images=images, return_tensors="np")
    sources, ids, _ = model.inputs.generation_inputs(model.image_prompt(text, images))
    assert ids.tolist() == expected["input_ids"][0].tolist()
    np.testing.assert_allclose(sources["pixel_values"], expected["pixel_values"][0], atol=1e-6)


def test_conversation_matches_transformers(exported):
    module, processor, model, _ = exported
    image = random_image(*SIZES[0])
    content = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True,
    )  # fmt: skip
    with torch.no_grad():
        ids = module.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=2)
    expected = tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())
    assert model.chat().send(content, max_new_tokens=TOKENS).token_ids == expected


def test_too_many_tiles_are_refused(exported):
    *_, model, _ = exported
    with pytest.raises(InputError, match=r"30 images take \d+ tokens and the model holds 772: give fewer"):
        model.generate("<image>" * 30, images=[random_image(64, 64)] * 30)


@pytest.mark.parametrize("splits", [True, False])
def test_tiles_of_any_shape_match_transformers(splits):
    processor = image_models.tiles_processor(do_image_splitting=splits).image_processor
    steps = read_image_steps(processor, 3)
    for height, width in ((1, 1), (1, 300), (300, 1), (87, 88), (88, 87), (31, 97), (500, 499), (64, 200)):
        image = random_image(height, width)
        read = processor([[image]], return_tensors="np", return_row_col_info=True)
        tiles, grid = steps.tiles(image)
        assert grid == (read["rows"][0][0], read["cols"][0][0])
        np.testing.assert_allclose(tiles, read["pixel_values"][0], atol=1e-6)
