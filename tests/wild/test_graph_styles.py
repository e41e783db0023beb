"""Masks, heads, keys and outputs in the styles in which people write them."""

from __future__ import annotations

import constant_keys
import copied_functions
import masks_from_sizes
import merged_heads
import outputs_and_buffers
import pytest
from styles import exported
from support.handwritten_case import Case
from support.handwritten_checks import check_exported_file

from tformer_export import export

STYLES = masks_from_sizes, outputs_and_buffers, constant_keys, merged_heads, copied_functions


@pytest.mark.parametrize("case", exported(*STYLES))
def test_exported_file_matches_pytorch(case: Case, tmp_path) -> None:
    check_exported_file(case, tmp_path)


def test_mask_by_product_is_that_of_an_attention(tmp_path) -> None:
    case = next(case for case in masks_from_sizes.CASES if case.name == "mask-product")
    report = export(case.module, tmp_path / "model.onnx", **case.arguments)
    assert (report.counts["attentions"], report.unrecognised) == (1, ())
