"""Checks of handwritten models: teacher-forced logits of a ragged batch, reordered rows and greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.handwritten_case import BLOCK, END, PAD, SPECIAL, VOCABULARY, Case
from tformer_export import export
from tformer_runtime import Model
from tformer_runtime.engine.engine import Engine

PROMPTS, SOURCES, NUM_STEPS, MAX_NEW_TOKENS = (4, 9, 1, 6), (7, 2, 12, 5), 4, 10
ORDER = np.array([2, 0, 2])  # drops, moves and repeats rows, as beam search does
# A logit is a sum of at most 96 products after at most eight sublayers, each with as many. float32 rounds each partial
# sum by 2⁻²⁴ of its value, in an order that depends on the kernel. The bound is 9 · 96 · 2⁻²⁴ ≈ 5e-5 of the logits'
# range. A wrong position or mask changes logits by at least 1e-2 of the range.
TOLERANCE = 5e-5

Step = Callable[[np.ndarray, np.ndarray], np.ndarray]


def draw_rows(seed: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Return rows of ids without special tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(END + 1, VOCABULARY, length) for length in lengths]


def teacher_forced(step: Step, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Return each row's logits (time, vocabulary). The first step has ragged prompts, the others have one token."""
    counts = np.array(PROMPTS)
    tokens = np.full((len(rows), counts.max()), PAD)
    for row, padded, count in zip(rows, tokens, counts, strict=True):
        padded[:count] = row[:count]
    logits = step(tokens, counts)
    actual = [[*values[:count].copy()] for values, count in zip(logits, counts, strict=True)]
    for i in range(NUM_STEPS):
        new = np.array([[row[count + i]] for row, count in zip(rows, PROMPTS, strict=True)])
        for row, values in zip(actual, step(new, np.ones(len(rows), np.int64)), strict=True):
            row.append(values[0].copy())
    return [np.stack(values) for values in actual]


def draw_batch(case: Case) -> tuple[list[np.ndarray | None], dict[str, list[np.ndarray]] | None, list[np.ndarray]]:
    """Return each row's source, the request, and the rows."""
    rows = draw_rows(2, tuple(count + NUM_STEPS for count in PROMPTS))
    if case.request is None:
        return [None] * len(rows), None, rows
    sources = draw_rows(1, SOURCES)
    return [*sources], {case.request: sources}, rows


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


def check_exported_file(case: Case, folder: Path) -> None:
    """Export a case, and compare its file with PyTorch: all logits of a ragged batch, reordered rows, greedy tokens."""
    path = folder / "model.onnx"
    report = export(case.module, path, **case.arguments, special_tokens=SPECIAL, max_length=BLOCK)
    assert report.tokens_equal
    engine = Engine(path, device="cpu", threads=1)
    sources, requests, rows = draw_batch(case)
    state = engine.start(requests, len(rows))
    for source, row, actual in zip(
        sources, rows, teacher_forced(lambda t, n: engine.step(state, t, n, logit_positions="all"), rows), strict=True
    ):
        assert_close(actual, case.logits(source, row))

    engine.reorder(state, ORDER)
    logits_after_reorder = engine.step(state, np.array([[3], [4], [5]]))
    for i, last_token, actual in zip(ORDER, (3, 4, 5), logits_after_reorder, strict=True):
        assert_close(actual, case.logits(sources[i], np.append(rows[i], last_token))[-1])

    prompts = draw_rows(0, (5, 9, 2, 7))
    expected = [case.greedy(row, MAX_NEW_TOKENS) for row in prompts]
    results = Model(engine).generate_batch(prompts, max_new_tokens=MAX_NEW_TOKENS)
    assert [list(result.token_ids) for result in results] == expected
    assert len({token for row in expected for token in row}) >= 5  # the expected tokens vary
