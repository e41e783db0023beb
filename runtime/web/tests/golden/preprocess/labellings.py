"""Paths and labellings of the Python runtime for random scores of frames, and texts of paths."""

from __future__ import annotations

from typing import Any

import numpy as np
from golden_file import GoldenFile
from msgspec.structs import asdict

from tformer_runtime.preprocess.ctc import CtcSpelling, align_path, beam_search, greedy_path

golden = GoldenFile()
rng = np.random.default_rng(81)
TEXTS = ("<pad>", "a", "B", "|", "'", ".", ",", "n", "t", "é", "a", "\x1f", " ")
cases: list[dict[str, Any]] = []
for number in range(120):
    frames, tokens = int(rng.integers(0, 40)), int(rng.integers(2, len(TEXTS) + 1))
    blank = int(rng.integers(tokens))
    logits = rng.normal(0, rng.choice([0.3, 2, 6]), (frames, tokens))
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    if number % 5 == 0:
        logprobs[rng.random(logprobs.shape) < 0.2] = -np.inf
        logprobs[:, blank] = np.maximum(logprobs[:, blank], -5)
    if number % 7 == 0:
        logprobs = np.round(logprobs)  # ties
    path, greedy = greedy_path(logprobs, blank)
    size = int(rng.choice([1, 2, 5, 40]))
    hypotheses = beam_search(logprobs, blank, size) if number % 7 else []
    ids = list(hypotheses[0].ids if hypotheses else greedy.ids)
    spelling = CtcSpelling(
        TEXTS[:tokens],
        blank,
        "|" if tokens > 3 and rng.random() < 0.8 else None,
        (" ", "_")[rng.integers(2)],
        bool(rng.integers(2)),
        bool(rng.integers(2)),
    )
    loose = np.repeat(rng.integers(0, tokens, 30), rng.integers(1, 4, 30))
    cases.append(
        {
            "scores": golden.array(logprobs),
            "blank": blank,
            "size": size,
            "path": golden.array(path.astype(np.int32)),
            "greedy": asdict(greedy),
            "hypotheses": [asdict(hypothesis) for hypothesis in hypotheses],
            "ids": ids,
            "aligned": golden.array(align_path(logprobs, ids, blank).astype(np.int32)) if frames else None,
            "spelling": {
                "tokens": spelling.tokens,
                "blank": blank,
                "delimiter": spelling.delimiter,
                "space": spelling.space,
                "lower": spelling.lower,
                "tidy": spelling.tidy,
            },
            "loose": loose.tolist(),
            "text": spelling.text(loose),
            "characters": [asdict(span) for span in spelling.characters(loose)],
            "words": [asdict(span) for span in spelling.words(loose)],
        }
    )
golden.write(cases)
