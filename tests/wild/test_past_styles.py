"""Earlier positions are read in the styles in which people write it: caches, convolutions, blocks, scans."""

from __future__ import annotations

import at_one_length
import blocks_of_positions
import looking_back
import own_caches
import pytest
from styles import check_refusal, exported, refused
from support.handwritten_case import Case
from support.handwritten_checks import check_exported_file

from tformer_export import export

STYLES = own_caches, looking_back, blocks_of_positions, at_one_length


@pytest.mark.parametrize("case", exported(*STYLES))
def test_exported_file_matches_pytorch(case: Case, tmp_path) -> None:
    check_exported_file(case, tmp_path)


@pytest.mark.parametrize("case", refused(*STYLES))
def test_model_that_is_not_proven_is_refused(case: Case, tmp_path) -> None:
    check_refusal(case, tmp_path)


def test_report_tells_the_cost_of_a_model_that_runs_at_its_greatest_length(tmp_path) -> None:
    case = next(case for case in at_one_length.CASES if case.name == "scan-by-halves")
    report = export(case.module, tmp_path / "model.onnx", **case.arguments | {"max_length": 16})
    assert "the whole model, for 16 positions in each step" in dict(report.rows())["recomputed"]
