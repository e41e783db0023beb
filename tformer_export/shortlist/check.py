"""The file with candidates against the file without: the same logits where a row has candidates, and none elsewhere."""

from __future__ import annotations

import numpy as np

from tformer_export.verify.parity import Gate, cases
from tformer_export.verify.report import TOLERANCE
from tformer_export.verify.teacher_forcing import run_case
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine

FEW = 20  # a row has a candidate of so many ids, few enough for their columns to be gathered


def check_columns(gate: Gate, engine: Engine) -> float:
    """The largest difference of a logit over the logits' range, of rows in a batch and alone, with columns gathered or
    not. ParityError if it is beyond what the gate allows."""
    vocabulary = int(engine.decode.logits.shape[-1])
    case = next(case for case in cases(engine.manifest.max_length) if len(case.prompts) > 1)
    requests = [gate.draw_request(length) for length in case.sources]
    sequences = [gate.draw_sequence(length + case.steps) for length in case.prompts]
    every, *_ = run_case(engine, requests, sequences, case.prompts)
    (lone,), *_ = run_case(engine, requests[:1], sequences[:1], case.prompts[:1])  # which may have kernels of its own
    worst = 0.0
    for few in (FEW * len(requests), 2):  # of the second all columns are computed
        count = max(1, vocabulary // few)
        own = [np.sort(gate.random.choice(vocabulary, count, replace=False)) for _ in requests]
        found, *_ = run_case(engine, requests, sequences, case.prompts, own)
        (alone,), *_ = run_case(engine, requests[:1], sequences[:1], case.prompts[:1], own[:1])
        for logits, whole, ids in ((alone, lone, own[0]), *zip(found, every, own, strict=True)):
            expected = np.full_like(whole, -np.inf)
            expected[:, ids] = whole[:, ids]
            finite = np.isfinite(expected)
            span = float(np.ptp(whole[np.isfinite(whole)])) or 1.0
            same = np.array_equal(finite, np.isfinite(logits))
            error = float(np.abs(logits[finite] - expected[finite]).max(initial=0.0)) / span if same else np.inf
            worst = max(worst, error)
    if worst > TOLERANCE:
        raise ParityError(
            f"logits of candidates differ from those of all ids by {worst:.3g} of their range ({TOLERANCE:g} is "
            "allowed); no file was written"
        )
    return worst
