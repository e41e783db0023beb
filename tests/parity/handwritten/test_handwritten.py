"""Models as people write them, and code that no one here wrote: each computes from its file, or from its staged
programs, what PyTorch computes for each row alone."""

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

PROMPTS, SOURCES, STEPS, NEW_TOKENS = (4, 9, 1, 6), (7, 2, 12, 5), 4, 10
ORDER = np.array([2, 0, 2])  # rows dropped, moved and repeated, as beams are
# A logit is a sum of at most 96 products after at most eight sublayers, each of as many; float32 rounds each partial
# sum by 2⁻²⁴ of it, in an order that differs from kernel to kernel: 9 · 96 · 2⁻²⁴ ≈ 5e-5 of the logits' range if all
# errors add up. A wrong position or mask moves logits by 1e-2 of the range and more.
TOLERANCE = 5e-5

Step = Callable[[np.ndarray, np.ndarray], np.ndarray]


def draw(seed: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Rows of ids, none of them special."""
    random = np.random.default_rng(seed)
    return [random.integers(END + 1, VOCABULARY, length) for length in lengths]


def teacher_forced(step: Step, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Each row's logits (time, vocabulary): ragged prompts at once, then single tokens."""
    counts = np.array(PROMPTS)
    tokens = np.full((len(rows), counts.max()), PAD)
    for row, padded, count in zip(rows, tokens, counts, strict=True):
        padded[:count] = row[:count]
    logits = step(tokens, counts)
    found = [[*values[:count].copy()] for values, count in zip(logits, counts, strict=True)]
    for i in range(STEPS):
        new = np.array([[row[count + i]] for row, count in zip(rows, PROMPTS, strict=True)])
        for row, values in zip(found, step(new, np.ones(len(rows), np.int64)), strict=True):
            row.append(values[0].copy())
    return [np.stack(values) for values in found]


def drawn(case: Case) -> tuple[list[np.ndarray | None], dict[str, list[np.ndarray]] | None, list[np.ndarray]]:
    """Each row's source, the request, and the rows."""
    rows = draw(2, tuple(count + STEPS for count in PROMPTS))
    if case.request is None:
        return [None] * len(rows), None, rows
    sources = draw(1, SOURCES)
    return [*sources], {case.request: sources}, rows


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


# To families, to others of these, or to what other tests export.
ALIKE = (
    "annotated", "torch-pair-pre-gelu", "yu-hsiang", "llama2.c-flash", "experts-index-add", "heads-in-front",
    "rotary-slices-qk-norm",
)  # fmt: skip


def marked(cases: list[Case], raises: type[Exception] = TformerError) -> list:
    """One parameter for each case; strict, so that a model that begins to work turns the suite red."""

    def marks(case: Case) -> list:
        thorough = [pytest.mark.thorough] if case.name in ALIKE else []
        return thorough + [pytest.mark.xfail(strict=True, raises=raises, reason=case.fails)] * bool(case.fails)

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]


@pytest.mark.thorough
@pytest.mark.parametrize("case", marked([case for case in CASES if not case.full and not case.refused]))
def test_staged_programs(case: Case) -> None:
    """Encode and decode as they are before torch.onnx, whose time this saves."""
    staged = Staged(case)
    sources, requests, rows = drawn(case)
    state = staged.start(requests, len(rows))
    for source, row, found in zip(sources, rows, teacher_forced(state.step, rows), strict=True):
        assert_close(found, case.logits(source, row))


@pytest.mark.parametrize("case", marked([case for case in CASES if case.full]))
def test_exported_file(case: Case, tmp_path) -> None:
    """The gate, every logit of a ragged batch, rows moved as beams are, greedy tokens."""
    path = tmp_path / "model.onnx"
    report = export(case.module, path, **case.arguments, special_tokens=SPECIAL, max_length=BLOCK)
    assert report.tokens_equal
    engine = Engine(path, device="cpu", threads=1)
    sources, requests, rows = drawn(case)
    state = engine.start(requests, len(rows))
    for source, row, found in zip(
        sources, rows, teacher_forced(lambda t, n: engine.step(state, t, n, logit_positions="all"), rows), strict=True
    ):
        assert_close(found, case.logits(source, row))

    engine.reorder(state, ORDER)
    after = engine.step(state, np.array([[3], [4], [5]]))
    for i, last, found in zip(ORDER, (3, 4, 5), after, strict=True):
        assert_close(found, case.logits(sources[i], np.append(rows[i], last))[-1])

    prompts = draw(0, (5, 9, 2, 7))
    expected = [case.greedy(row, NEW_TOKENS) for row in prompts]
    results = Model(engine).generate_batch(prompts, max_new_tokens=NEW_TOKENS)
    assert [list(result.token_ids) for result in results] == expected
    assert len({token for row in expected for token in row}) >= 5  # worth comparing: not one token for ever


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.refused])
def test_refused(case: Case) -> None:
    """In one sentence that says what it is."""
    with pytest.raises(UnsupportedModelError) as caught:
        Staged(case)
    assert case.refused is not None
    assert case.refused in str(caught.value)
    assert "\n" not in str(caught.value)
