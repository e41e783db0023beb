"""Windows and forecasts of the Python runtime for random histories and settings of files."""

from __future__ import annotations

from typing import Any

import numpy as np
from golden_file import GoldenFile
from msgspec.structs import asdict

from tformer_runtime.preprocess.series import SeriesPreprocessor

golden = GoldenFile()
rng = np.random.default_rng(71)
cases: list[dict[str, Any]] = []
for number in range(150):
    features = int(rng.choice([1, 1, 2, 3, 9]))
    targets = tuple(rng.permutation(features)[: rng.integers(1, features + 1)].tolist())
    rows = int(rng.choice([2, 7, 8, 130, 1001]))
    begin: Any = [0, 1, 3, ((0.5,) * len(targets), (1.5,) * len(targets))][rng.integers(4)]
    series = SeriesPreprocessor(
        "history",
        features,
        targets=targets,
        feedback=tuple(range(len(targets))),
        begin=begin,
        normalize=("none", "fixed", "instance")[number % 3],
        mean=tuple(rng.normal(size=features).tolist()),
        scale=tuple((rng.random(features) + 0.1).tolist()),
        max_context_length=[None, 100][rng.integers(2)],
    )
    history = (rng.normal(size=(rows, features)) * 10.0 ** rng.integers(-3, 5) + rng.normal() * 100).round(3)
    room = [None, 50][rng.integers(2)]
    window = series.window(history, room, truncate=True)
    forecast = rng.normal(size=(5, len(targets))).astype(np.float32)
    settings = asdict(series)
    del settings["input"]
    cases.append(
        {
            "settings": settings,
            "history": golden.array(history),
            "room": room,
            "values": golden.array(window.values),
            "mean": golden.array(window.mean),
            "scale": golden.array(window.scale),
            "start": golden.array(series.decoder_start(window)),
            "forecast": golden.array(forecast),
            "denormalized": golden.array(series.denormalize(forecast, window)),
            "names": series.names,
        }
    )
golden.write(cases)
