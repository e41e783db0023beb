"""Loops, conditions and numbers of Python in the styles in which people write them."""

from __future__ import annotations

import experts
import numbers_from_data
import pytest
import recurrent_state
import window_branch
from styles import check_refusal, exported, refused
from support.handwritten_case import Case
from support.handwritten_checks import check_exported_file

STYLES = experts, numbers_from_data, window_branch, recurrent_state


@pytest.mark.parametrize("case", exported(*STYLES))
def test_exported_file_matches_pytorch(case: Case, tmp_path) -> None:
    check_exported_file(case, tmp_path)


@pytest.mark.parametrize("case", refused(*STYLES))
def test_model_that_is_not_proven_is_refused(case: Case, tmp_path) -> None:
    check_refusal(case, tmp_path)
