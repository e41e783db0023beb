"""Recordings that soxr has resampled, with the quality that the Python runtime asks for."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile

from tformer_runtime.preprocess.audio import AudioPreprocessor

RATES = [
    *((rate, 16000) for rate in (8000, 32000, 48000, 24000, 4000, 12000, 44100, 22050, 11025, 96000, 16001)),
    (48000, 24000),
    (16000, 44100),
]

golden = GoldenFile()
rng = np.random.default_rng(61)
cases = []
for rate, target in RATES:
    for size in (1, 50, 4001):
        samples = rng.normal(0, 0.1, size).astype(np.float32)
        resampled = AudioPreprocessor(target).read((samples, rate)) if size * target > rate else None
        if resampled is not None:
            cases.append(
                {"rate": rate, "target": target, "samples": golden.array(samples), "resampled": golden.array(resampled)}
            )
golden.write(cases)
