"""Sizes that pass through tensors stay sizes, so that slices fit any length."""

from __future__ import annotations

import pytest
import torch
from support.small_models import Mixer, Small, captured_of
from torch import nn

from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import capture
from tformer_export.common.fx_nodes import aten
from tformer_export.sources.torch_module import from_module

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
MAX_SPAN = 12


class Spans(nn.Module):
    """Add rows from the middle of a table, one on each side for each position, and limit the added rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.table = nn.Embedding(20, 4), nn.Parameter(torch.randn(2 * MAX_SPAN, 4))

    def forward(self, ids):
        span = torch.tensor(min(ids.shape[1], MAX_SPAN))
        rows = self.table[MAX_SPAN - span : MAX_SPAN + span, :]
        row_indices = torch.clamp(torch.arange(ids.shape[1]) * 3 - 2, 0, span * 2 - 1)
        return self.embed(ids) + rows[row_indices] + span.item()


class Data(Spans):
    """A slice whose size depends on data."""

    def forward(self, ids):
        return self.embed(ids) + self.table[: ids.max(), :].sum()


@pytest.fixture
def module():
    torch.manual_seed(0)
    return from_module(Spans().eval(), {"ids": IDS}, None).module


@pytest.mark.parametrize("length", [2, 5, 11, 17])
def test_size_through_a_tensor_is_traced(module, length):
    captured = capture(module, {"ids": IDS}, None)
    assert not any(node.target is aten.item.default for node in captured.nodes)
    ids = torch.arange(2 * length).reshape(2, length) % 20
    with torch.no_grad():
        actual, expected = run(captured, {"ids": ids})[captured.output], module(ids)
    torch.testing.assert_close(actual, expected)
    assert "forward" not in vars(module)  # the patch of forward is removed


def test_data_are_not_sizes():
    captured = capture(from_module(Data().eval(), {"ids": IDS}, None).module, {"ids": IDS}, None)
    assert any(node.target is aten.item.default for node in captured.nodes)


class FromTensor(Mixer):
    """A size that does not vary goes through a tensor, of which Python reads it."""

    def forward(self, x, tgt):
        width, half = torch.tensor([x.shape[-1], 2]) // torch.tensor([1, 1])
        return x * torch.arange(int(width) // int(half)).repeat(2)


def test_numbers_of_a_small_constant_tensor_are_numbers():
    captured = captured_of(Small(FromTensor))
    assert not any("item" in str(node.target) for node in captured.nodes)
