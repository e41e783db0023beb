"""`head` names what a caller applies to the result of forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tformer_export.sources.torch_module import from_module
from tformer_runtime import SourceError

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.heads = nn.ModuleDict({"words": nn.Linear(6, 9)})

    def forward(self, ids):
        return {"states": self.embed(ids), "mean": self.embed(ids).mean(1)}

    def tied(self, states):
        return states @ self.embed.weight.T


@pytest.mark.parametrize(
    ("head", "apply"),
    [
        ("heads.words", lambda m, x: m.heads["words"](x)),
        (["norm", "heads.words"], lambda m, x: m.heads["words"](m.norm(x))),
        ("tied", lambda m, x: x @ m.embed.weight.T),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_applied_in_turn(head, apply, dtype):
    """A model in half precision is converted to float32, with its heads."""
    model = Model().to(dtype)
    source = from_module(model, {"ids": IDS}, "ids", head=head, output="states")
    with torch.no_grad():
        own = model.float()
        torch.testing.assert_close(source.module(IDS), apply(own, own(IDS)["states"]))


def test_unknown_head_is_refused_with_the_names_that_exist():
    with pytest.raises(SourceError, match=r"no submodule or method 'generator' for a head: it has embed, norm, heads"):
        from_module(Model(), {"ids": IDS}, "ids", head="generator")


def test_head_goes_with_one_output():
    with pytest.raises(SourceError, match="a model with a head: name one output, not 2"):
        from_module(Model(), {"ids": IDS}, None, head="norm", output=["states", "mean"])
