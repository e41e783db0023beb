"""Exported files and staged programs of hand-written and third-party models give PyTorch's logits of each row."""

from __future__ import annotations

from collections.abc import Callable

import attention_styles
import block_styles
import encoder_decoder_styles
import gpt_styles
import numpy as np
import position_styles
import pytest
import xtransformers_styles
from catalogue import BLOCK, END, PAD, SPECIAL, VOCABULARY, Case
from staged import Staged

from tformer_export import export
from tformer_runtime import Model, TformerError, UnsupportedModelError
from tformer_runtime.engine.engine import Engine

STYLES = (gpt_styles, attention_styles, position_styles, block_styles, encoder_decoder_styles, xtransformers_styles)
CASES = [case for style in STYLES for case in style.CASES]

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


# Cases with the same graph structure as a family, another case or a model of another test.
REDUNDANT_CASES = (
    "annotated", "torch-pair-pre-gelu", "yu-hsiang", "llama2.c-flash", "experts-index-add", "heads-in-front",
    "rotary-slices-qk-norm",
)  # fmt: skip


def case_parameters(cases: list[Case], raises: type[Exception] = TformerError) -> list:
    """Return one parameter per case. A known failure is a strict xfail, so that a model that begins to export fails."""

    def marks(case: Case) -> list:
        thorough = [pytest.mark.thorough] if case.name in REDUNDANT_CASES else []
        return thorough + [pytest.mark.xfail(strict=True, raises=raises, reason=case.known_failure)] * bool(
            case.known_failure
        )

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", case_parameters([case for case in CASES if not case.exports_file and not case.refusal])
)
def test_staged_programs_match_pytorch(case: Case) -> None:
    """The programs before the translation to ONNX give PyTorch's logits."""
    staged = Staged(case)
    sources, requests, rows = draw_batch(case)
    state = staged.start(requests, len(rows))
    for source, row, actual in zip(sources, rows, teacher_forced(state.step, rows), strict=True):
        assert_close(actual, case.logits(source, row))


@pytest.mark.parametrize("case", case_parameters([case for case in CASES if case.exports_file]))
def test_exported_file_matches_pytorch(case: Case, tmp_path) -> None:
    """Check the gate, all logits of a ragged batch, reordered rows and greedy tokens."""
    path = tmp_path / "model.onnx"
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


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.refusal])
def test_unsupported_model_is_refused_in_one_line(case: Case) -> None:
    """The refusal is one line with the reason."""
    with pytest.raises(UnsupportedModelError) as caught:
        Staged(case)
    assert case.refusal is not None
    assert case.refusal in str(caught.value)
    assert "\n" not in str(caught.value)
