"""Draws of the Python runtime from rows of logits, and the distributions that it draws from."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile

from tformer_runtime.decoding.sampling import Sampler, warp

DRAWS = 40
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1e-6},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 5, "temperature": 1.3},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999999, "temperature": 2.0},
    {"top_p": 0.5, "top_k": 20},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.02, "top_p": 0.95, "top_k": 40, "temperature": 0.8},
]


def rows(rng: np.random.Generator) -> list[np.ndarray]:
    """Return rows of logits: of small and large vocabularies, with ties, and with tokens that are forbidden."""
    some = [rng.normal(0, scale, size).astype(np.float32) for size in (1, 2, 7, 8, 129, 1000) for scale in (0.5, 4)]
    tied = [rng.integers(0, 4, size).astype(np.float32) for size in (4, 40, 500)]
    equal = [np.zeros(size, np.float32) for size in (3, 4, 10)]  # 1 - p is a multiple of a weight
    forbidden = [
        np.where(rng.random(300) < share, -np.inf, rng.normal(0, 3, 300)).astype(np.float32) for share in (0.3, 0.98)
    ]
    forbidden[-1][17] = 1
    return [*some, *tied, *equal, *forbidden, rng.normal(0, 2, 60_000).astype(np.float32)]


golden = GoldenFile()
cases = []
for number, logits in enumerate(rows(np.random.default_rng(3))):
    for options in OPTIONS[:: 1 if len(logits) < 10_000 else 3]:
        sampler = Sampler(2**40 + number, number, 2, **options)
        tokens, probabilities = warp(
            logits,
            options.get("temperature", 1.0),
            options.get("top_k", 0),
            options.get("top_p", 1.0),
            options.get("min_p", 0.0),
        )
        cases.append(
            {
                "seed": 2**40 + number,
                "index": number,
                "options": options,
                "logits": golden.array(logits),
                "draws": [sampler(logits) for _ in range(DRAWS)],
                "tokens": golden.array(tokens.astype(np.int32)),
                "probabilities": golden.array(probabilities),
            }
        )
golden.write(cases)
