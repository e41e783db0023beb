"""Power spectra of numpy for frames of many lengths."""

from __future__ import annotations

import numpy as np
from golden_file import GoldenFile

golden = GoldenFile()
rng = np.random.default_rng(95)
cases = []
for size in [*range(1, 40), 61, 67, 134, 400, 512, 551, 1009, 2048, 4096, 4099, 30_030]:
    values = rng.normal(size=2 * size).astype(np.float32)
    window = rng.random(size)
    power = np.abs(np.fft.rfft(values.reshape(2, size) * window)) ** 2
    cases.append({"values": golden.array(values), "window": golden.array(window), "power": golden.array(power)})
golden.write(cases)
