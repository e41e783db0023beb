"""Comparison of a file with candidates and without: equal logits for the candidates of a row, and no others."""

from __future__ import annotations

import numpy as np

from tformer_export.verify.parity import ParityGate, cases
from tformer_export.verify.report import TOLERANCE
from tformer_export.verify.teacher_forcing import run_case
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine

VOCABULARY_DIVISOR = 20  # ids for each candidate of a row; so few candidates have their columns gathered


def check_columns(gate: ParityGate, engine: Engine) -> float:
    """Return the greatest difference of a logit over the range of the logits.

    Rows are run in a batch and alone, with gathered columns and with all. Raises ParityError if the difference exceeds
    the tolerance.
    """
    vocabulary = int(engine.decode.logits.shape[-1])
    case = next(case for case in cases(engine.manifest.max_length) if len(case.prompts) > 1)
    case, requests, sequences = gate.draw_case(case, engine.manifest.max_length)
    every, *_ = run_case(engine, requests, sequences, case.prompts)
    (lone,), *_ = run_case(engine, requests[:1], sequences[:1], case.prompts[:1])  # one row may have separate kernels
    worst = 0.0
    for divisor in (VOCABULARY_DIVISOR * len(requests), 2):  # with the second, all columns are computed
        count = max(1, vocabulary // divisor)
        candidates = [np.sort(gate.random.choice(vocabulary, count, replace=False)) for _ in requests]
        gathered, *_ = run_case(engine, requests, sequences, case.prompts, candidates)
        (alone,), *_ = run_case(engine, requests[:1], sequences[:1], case.prompts[:1], candidates[:1])
        for logits, whole, ids in ((alone, lone, candidates[0]), *zip(gathered, every, candidates, strict=True)):
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
