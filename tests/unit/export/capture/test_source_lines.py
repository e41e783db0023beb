"""Refusals name the line of the user's code with the refused operation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tformer_export import export
from tformer_runtime import UnsupportedModelError


def in_reverse(x):
    doubled = x * 2
    return doubled.flip(1)


class WithHelpers(nn.Module):
    """A look ahead in a method or in a function that forward calls."""

    def __init__(self, in_method):
        super().__init__()
        self.embed, self.out, self.in_method = nn.Embedding(10, 8), nn.Linear(8, 10), in_method

    def scaled_reverse(self, x):
        return x.flip(1) / x.shape[1]

    def forward(self, ids):
        x = self.embed(ids)
        x = self.scaled_reverse(x) if self.in_method else in_reverse(x)
        return self.out(x)


@pytest.mark.parametrize(
    ("in_method", "code"), [(True, "return x.flip(1) / x.shape[1]"), (False, "return doubled.flip(1)")]
)
def test_refusal_names_the_line_of_a_helper(tmp_path, monkeypatch, in_method, code):
    ids = torch.ones(2, 3, dtype=torch.long)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = 1 + lines.index(f"    {'    ' * in_method}{code}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        export(WithHelpers(in_method), tmp_path / "x.onnx", {"ids": ids}, "ids")
    assert f"{__file__}:{number}: {code} " in str(caught.value)


def test_path_below_the_working_directory_is_relative(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    path = tmp_path / "package" / "own_model.py"
    path.write_text("def forward(self, ids):\n    return self.out(self.embed(ids).flip(1))\n")
    namespace = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    model = type("Own", (WithHelpers,), {"forward": namespace["forward"]})(True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r" at package/own_model\.py:2: return self\.out"):
        export(model, tmp_path / "x.onnx", {"ids": torch.ones(2, 3, dtype=torch.long)}, "ids")
