"""Results of the Python runtime for tiny models that read images in their prompts, whole and in tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from golden_file import GoldenFile
from plain_result import plain

from tformer_runtime import Model, TformerError

BUILD = Path(__file__).resolve().parents[4] / "build" / "web"
SIZES = {
    "tiny-llava": ((20, 31, 3), (40, 22, 1), (16, 16, 4)),  # height, width, channels
    "tiny-smolvlm": ((20, 90, 3), (64, 64, 3), (200, 31, 3)),  # a row of tiles, a square, a column
}
PROMPTS: list[tuple[str, list[int]]] = [
    ("what <image> is <image>this", [0, 1]),
    ("no image here", []),
    ("<image>abc", [2]),
    ("look <image><image><image> now", [2, 0, 1]),
]
OPTIONS: list[dict[str, Any]] = [
    {"max_new_tokens": 12},
    {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2},
    {"max_new_tokens": 5, "forced_prefix": "ab", "top_logprobs": 2},
    {"max_new_tokens": 9, "temperature": 1.2, "seed": 3},
]


def given(image: np.ndarray) -> np.ndarray:
    """Return an image as an array that the Python runtime reads."""
    return image[:, :, 0] if image.shape[2] == 1 else image


def refusals(model: Model, images: list[np.ndarray]) -> list[list[Any]]:
    calls: list[tuple[Any, list[int]]] = [
        ("one <image>", [0, 1]),
        ("one <image>", []),
        ("<image>" * 400, [0] * 400),
        ([9, 5, 9], [0]),
    ]
    cases = []
    for prompt, places in calls:
        try:
            model.generate(prompt, images=[images[place] for place in places])
        except TformerError as error:
            cases.append([prompt, places, str(error)])
    assert len(cases) == len(calls)
    return cases


def case(name: str, file: GoldenFile) -> dict[str, Any]:
    model, random = Model.load(BUILD / f"{name}.onnx", threads=1), np.random.default_rng(5)
    drawn = [random.integers(0, 256, size, np.uint8) for size in SIZES[name]]
    images = [given(image) for image in drawn]
    inputs = [model.image_prompt(text, [images[place] for place in places]) for text, places in PROMPTS]
    reads = [model.inputs.generation_inputs(value) for value in inputs]
    prefix = model.cache_prefix(model.image_prompt("what <image> is", [images[0]]))
    chat = model.chat()
    parts = [{"type": "image", "image": images[0]}, {"type": "text", "text": "what?"}]
    turns = [parts, "and then?", [*parts, {"type": "image", "image": images[2]}]]
    answers = [chat.send(message, max_new_tokens=8) for message in turns]
    prompt = model.prompt([{"role": "user", "content": parts}])
    return {
        "name": name,
        "images": [file.array(image) for image in drawn],
        "prompts": PROMPTS,
        "ids": [ids.tolist() for _, ids, _ in reads],
        "pixels": [file.array(sources["pixel_values"]) for sources, _, _ in reads],
        "runs": [[options, [plain(r) for r in model.generate_batch(inputs, **options)]] for options in OPTIONS],
        "scores": [model.score(value, "abc").tolist() for value in inputs],
        "continued": [plain(r) for r in model.generate_batch([" it", "?", " now"], prefix=prefix, max_new_tokens=7)],
        "prompt": prompt["input_ids"].tolist(),
        "answers": [plain(answer) for answer in answers],
        "refused": refusals(model, images),
    }


def main() -> None:
    file = GoldenFile()
    file.write([case(name, file) for name in SIZES])


main()
