"""Logarithms of sums and of probabilities are finite in the file where they are in torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tformer_export import export
from tformer_runtime.engine.engine import Engine


class Logarithms(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(24, 24)

    def forward(self, x):
        values = F.logsigmoid(x), torch.logaddexp(x, x - 1), torch.special.log_ndtr(x / 10), self.project(x)
        return torch.cat(values, -1)


def test_logarithms_do_not_overflow(tmp_path):
    module = Logarithms().eval()
    export(module, tmp_path / "model.onnx", {"x": torch.randn(2, 5, 24)})
    x = torch.linspace(-120, 120, 24 * 9).reshape(9, 24)
    (got,) = Engine(str(tmp_path / "model.onnx"), "cpu").encode({"x": [x.numpy()]}, 1).values()
    np.testing.assert_allclose(got.numpy(), module(x[None]).detach().numpy(), rtol=1e-4, atol=1e-4)
