"""A branch on a buffer is followed, and a refusal names the line after it that cannot be exported."""

from __future__ import annotations

import pytest
import torch
from support.handwritten_case import BLOCK
from tiny import WIDTH, TinyDecoder

from tformer_export import export
from tformer_runtime import UnsupportedModelError


class Rotary(TinyDecoder):
    """Angles that are computed at the first call, as tables that were on the meta device are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("freqs_cos", torch.zeros(BLOCK, WIDTH))
        self.register_buffer("angles", torch.arange(BLOCK).float()[:, None].expand(BLOCK, WIDTH))

    def embed(self, idx):
        if self.freqs_cos[0, 0] == 0:
            self.freqs_cos = self.angles.cos()
        return self.tokens(idx) * self.freqs_cos[: idx.shape[1]]


class Condition(Rotary):
    def forward(self, idx):
        x = self.embed(idx)
        return self.head(x) if idx.sum() % 2 else self.head(-x)  # HERE


class Numpy(Rotary):
    def forward(self, idx):
        return self.head(self.embed(idx) + torch.from_numpy(idx.numpy() % 2).float()[..., None])  # HERE


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Condition, "lets the values of its data decide"),
        (Numpy, "hands a tensor to numpy"),
    ],
)
def test_line_of_the_cause_is_named(model, reason, tmp_path, capfd):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        export(model().eval(), tmp_path / "model.onnx", {"idx": torch.tensor([[3, 4, 5]])}, "idx")
    assert "# HERE" in str(caught.value)
    assert "freqs_cos" not in str(caught.value)
    assert capfd.readouterr().err == ""
