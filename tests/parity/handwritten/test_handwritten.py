"""Exported files and staged programs of hand-written and third-party models give PyTorch's logits of each row."""

from __future__ import annotations

import attention_styles
import block_styles
import encoder_decoder_styles
import gpt_styles
import position_styles
import pytest
import xtransformers_styles
from staged import Staged
from support.handwritten_case import Case
from support.handwritten_checks import assert_close, check_exported_file, draw_batch, teacher_forced

from tformer_runtime import TformerError, UnsupportedModelError

STYLES = (gpt_styles, attention_styles, position_styles, block_styles, encoder_decoder_styles, xtransformers_styles)
CASES = [case for style in STYLES for case in style.CASES]

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
    check_exported_file(case, tmp_path)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.refusal])
def test_unsupported_model_is_refused_in_one_line(case: Case) -> None:
    """The refusal is one line with the reason."""
    with pytest.raises(UnsupportedModelError) as caught:
        Staged(case)
    assert case.refusal is not None
    assert case.refusal in str(caught.value)
    assert "\n" not in str(caught.value)
