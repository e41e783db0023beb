"""Pixels of the Python runtime, for random images and settings of files."""

from __future__ import annotations

from typing import Any

import numpy as np
from golden_file import GoldenFile
from msgspec.structs import asdict

from tformer_runtime.preprocess.images import FILTERS, ImagePreprocessor, target_size

CASES = 250


def edge(rng: np.random.Generator) -> int:
    return int(rng.integers(8, 60))


def random_settings(rng: np.random.Generator) -> ImagePreprocessor:
    channels = int(rng.choice([1, 3]))
    sizes: list[dict[str, int]] = [
        {},
        {"height": edge(rng), "width": edge(rng)},
        {"shortest_edge": edge(rng)},
        {"shortest_edge": edge(rng), "longest_edge": edge(rng) + 30},
        {"max_height": edge(rng), "max_width": edge(rng)},
    ]
    fields: dict[str, Any] = {
        "size": sizes[rng.integers(len(sizes))],
        "resample": FILTERS[rng.integers(len(FILTERS))],
        "crop": (edge(rng), edge(rng)) if rng.random() < 0.5 else (),
        "scale": [None, 1 / 255, 1 / 127.5][rng.integers(3)],
        "channels": channels,
        "on_white": bool(rng.random() < 0.5),
    }
    if rng.random() < 0.3:
        fields |= {"tile": int(rng.integers(6, 16)), "splits": bool(rng.random() < 0.7), "crop": ()}
        fields["size"] = {"longest_edge": edge(rng)}
    if rng.random() < 0.6:
        mean, std = rng.random(channels), rng.random(channels) + 0.1
        fields |= {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
    settings = ImagePreprocessor(**fields)
    settings.check()
    return settings


golden = GoldenFile()
rng = np.random.default_rng(41)
cases: list[dict[str, Any]] = []
while len(cases) < CASES:
    settings = random_settings(rng)
    height, width = (int(n) for n in rng.integers(1, 80, 2))
    if max(height, width) > 20 * min(height, width):
        continue  # an edge could become 0, which is refused
    image = rng.integers(0, 256, (height, width, rng.choice([1, 3, 4]))).astype(np.uint8)
    tiles, grid = settings.tiles(image)
    cases.append(
        {
            "settings": asdict(settings),
            "width": width,
            "height": height,
            "data": golden.array(image),
            "tiles": golden.array(tiles),
            "grid": grid,
            "shape": settings.shape,
            "sizes": [
                [h, w, *target_size(settings.size, h, w)]
                for h, w in (rng.integers(1, 5000, (20, 2)).tolist() if settings.size else [])
            ],
        }
    )
golden.write(cases)
