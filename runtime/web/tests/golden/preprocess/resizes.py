"""Images that Pillow has resized, with all filters."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile
from PIL import Image

from tformer_runtime.preprocess.images import FILTERS

golden = GoldenFile()
rng = np.random.default_rng(31)
cases = []
for number in range(60):
    width, height, new_width, new_height = (int(n) for n in rng.integers(1, 90, 4))
    if number % 10 == 0:
        new_width = width
    if number % 10 == 5:
        new_height = height
    if number % 10 == 3:  # the height shrinks by twice as many pixels as the width, where the order of Pillow changes
        new_width, new_height, width, height = 20, 10, 20 + number, 10 + 2 * number
    channels = (1, 3)[number % 2]
    shape = (height, width, channels)
    pixels = rng.integers(0, 256, shape) if number % 3 else 255 * rng.integers(0, 2, shape)  # sharp edges overshoot
    image = Image.fromarray((pixels[..., 0] if channels == 1 else pixels).astype(np.uint8))
    for index, name in enumerate(FILTERS):
        resized = np.asarray(image.resize((new_width, new_height), resample=index))
        cases.append(
            {
                "width": width,
                "height": height,
                "channels": channels,
                "data": golden.array(pixels.astype(np.uint8)),
                "filter": name,
                "new_width": new_width,
                "new_height": new_height,
                "resized": golden.array(resized),
            }
        )
golden.write(cases)
