"""Models in the styles in which people publish them export unchanged and equal PyTorch, or are refused."""

from __future__ import annotations

import at_one_length
import blocks_of_positions
import constant_keys
import copied_functions
import experts
import looking_back
import masks_from_sizes
import merged_heads
import numbers_from_data
import outputs_and_buffers
import own_caches
import pytest
import recurrent_state
import window_branch
from support.handwritten_case import Case
from support.handwritten_checks import check_exported_file

from tformer_export import export
from tformer_runtime import UnsupportedModelError

STYLES = (
    masks_from_sizes, own_caches, experts, numbers_from_data, outputs_and_buffers, constant_keys, looking_back,
    merged_heads, recurrent_state, window_branch, copied_functions, blocks_of_positions, at_one_length,
)  # fmt: skip
CASES = [case for style in STYLES for case in style.CASES]


def parameters(cases: list[Case]) -> list:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.mark.parametrize("case", parameters([case for case in CASES if not case.refusal]))
def test_exported_file_matches_pytorch(case: Case, tmp_path) -> None:
    check_exported_file(case, tmp_path)


@pytest.mark.parametrize("case", parameters([case for case in CASES if case.refusal]))
def test_model_that_is_not_proven_is_refused(case: Case, tmp_path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        export(case.module, tmp_path / "model.onnx", **case.arguments)
    assert case.refusal is not None
    assert case.refusal in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_mask_by_product_is_that_of_an_attention(tmp_path) -> None:
    case = next(case for case in CASES if case.name == "mask-product")
    report = export(case.module, tmp_path / "model.onnx", **case.arguments)
    assert (report.counts["attentions"], report.unrecognised) == (1, ())


def test_report_tells_the_cost_of_a_model_that_runs_at_its_greatest_length(tmp_path) -> None:
    case = next(case for case in CASES if case.name == "scan-by-halves")
    report = export(case.module, tmp_path / "model.onnx", **case.arguments | {"max_length": 16})
    assert "the whole model, for 16 positions in each step" in dict(report.rows())["recomputed"]
