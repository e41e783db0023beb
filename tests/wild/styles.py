"""Models in the styles in which people publish them export unchanged and equal PyTorch, or are refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.handwritten_case import Case

from tformer_export import export
from tformer_runtime import UnsupportedModelError


def exported(*styles: ModuleType) -> list[Any]:
    """Return the cases of these modules that export, as parameters."""
    return [_parameter(case) for style in styles for case in style.CASES if not case.refusal]


def refused(*styles: ModuleType) -> list[Any]:
    """Return the cases of these modules that are refused, as parameters."""
    return [_parameter(case) for style in styles for case in style.CASES if case.refusal]


def _parameter(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[pytest.mark.thorough] * case.thorough)


def check_refusal(case: Case, folder: Path) -> None:
    """Check that a model is refused with its sentence, and that nothing is written."""
    with pytest.raises(UnsupportedModelError) as caught:
        export(case.module, folder / "model.onnx", **case.arguments)
    assert case.refusal is not None
    assert case.refusal in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())
