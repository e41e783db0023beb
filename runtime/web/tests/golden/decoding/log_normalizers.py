"""log Σ exp of rows of logits: of numpy in float64, and of the Python runtime."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile

from tformer_runtime.decoding.sampling import log_normalizer

golden = GoldenFile()
rng = np.random.default_rng(11)
cases = []
for size in [1, 2, 7, 8, 9, 127, 128, 129, 300, 1000, 8192, 50_257]:
    for scale in (0.01, 1, 6, 60):
        rows = rng.normal(rng.normal() * 9, scale, (3 if size > 5000 else 12, size)).astype(np.float32)
        rows[0, rng.random(size) < 0.2] = -np.inf
        rows[0, 0] = 1
        exact = np.logaddexp.reduce(rows.astype(np.float64), 1)
        cases.append(
            {
                "rows": golden.array(rows),
                "exact": golden.array(exact),
                "norms": golden.array(log_normalizer(rows)),
            }
        )
golden.write(cases)
