"""Draws of numpy's generators for many seeds."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile

SEEDS: list[list[int]] = [
    *([seed, index, copy] for seed in range(12) for index in range(4) for copy in range(3)),
    *([seed] for seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**64 - 1, 2**128 - 1, 2**200 + 12345)),
    *([2**64 - 1, 2**31 - 1, copy] for copy in range(5)),  # 4 words fill the pool, and more are mixed into it
    *([2**64 - 1, 2**32, 2**32, 7] for _ in range(1)),
    *(np.random.default_rng(0).integers(0, 2**63, (150, 3)).tolist()),
]

golden = GoldenFile()
golden.write(
    [{"seed": list(map(str, seed)), "draws": golden.array(np.random.default_rng(seed).random(64))} for seed in SEEDS]
)
