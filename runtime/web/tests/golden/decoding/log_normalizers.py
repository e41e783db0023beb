"""The Python runtime's log Σ exp of rows of logits."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile

from tformer_runtime.decoding.sampling import log_normalizer

features = np._core._multiarray_umath.__cpu_features__
exact = bool(features.get("AVX512F") or (features.get("AVX2") and features.get("FMA3")))

golden = GoldenFile()
rng = np.random.default_rng(11)
cases = []
for size in [1, 2, 7, 8, 9, 127, 128, 129, 300, 1000, 8192, 50_257]:
    for scale in (0.01, 1, 6, 60):
        rows = rng.normal(rng.normal() * 9, scale, (3 if size > 5000 else 12, size)).astype(np.float32)
        rows[0, rng.random(size) < 0.2] = -np.inf
        rows[0, 0] = 1
        norms = log_normalizer(rows)
        cases.append({"rows": golden.array(rows), "norms": golden.array(norms), "exact": exact})
golden.write(cases)
