"""Sums of numpy over numbers whose sums are rounded at every step."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile

golden = GoldenFile()
rng = np.random.default_rng(5)
sizes = [*range(20), 127, 128, 129, 135, 136, 255, 256, 257, 1000, 4096, 100_003]
rows = [rng.normal(size=size) * 10.0 ** rng.integers(-8, 8, size) for size in sizes]
golden.write([{"values": golden.array(row), "sum": float(row.sum())} for row in rows])
