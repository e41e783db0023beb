"""Branches and sizes that depend on the length: the compiler follows them up to the length at which they change."""

from __future__ import annotations

import pytest
import sympy
import torch
from support.small_models import EXAMPLE, Mixer, Small, captured_of
from torch.utils._sympy.functions import Max, Min

from tformer_export.common.fx_nodes import simplify_size
from tformer_export.soundness.size_branches import limit_by_branches, sizes_below
from tformer_export.sources.torch_module import from_module
from tformer_export.trace.captured_model import capture_model
from tformer_runtime import UnsupportedModelError


class Longer(Mixer):
    """A branch on the length, read from a tensor of positions, as in rotary embeddings that scale with the length."""

    def forward(self, x, tgt):
        positions = torch.arange(x.shape[1])
        return x * 0.5 if positions.max() + 1 > 20 else x * 2.0


class ByData(Mixer):
    def forward(self, x, tgt):
        return x * 0.5 if x.sum() > 0 else x * 2.0


def test_branch_on_length_limits_the_length():
    captured = captured_of(Small(Longer))
    limit_by_branches(captured, max_length=64)
    assert captured.time_limit == 20
    assert not any("assert" in str(node.target) for node in captured.nodes)


def test_branch_on_data_is_refused():
    captured = captured_of(Small(ByData))
    with pytest.raises(UnsupportedModelError, match="values of its data decide which code runs"):
        limit_by_branches(captured, max_length=64)


class ShortOtherwise(Mixer):
    def forward(self, x, tgt):
        return x * 0.5 if x.shape[1] <= 20 else x * 2.0


class ShortAlike(Mixer):
    def forward(self, x, tgt):
        return x * 2.0 if x.shape[1] <= 20 else x + x


@pytest.mark.parametrize(("mixer", "limit"), [(ShortOtherwise, 20), (ShortAlike, 40)])
def test_way_of_long_rows_is_taken_if_it_holds_for_short_ones(mixer, limit):
    source = from_module(Small(mixer), EXAMPLE, step_input="tgt")
    assert capture_model(source).graph.time_limit == limit


def test_sizes_below_are_those_next_to_either_end_and_some_between():
    assert sizes_below(1) == []
    assert sizes_below(9) == [8, 7, 6, 5, 4, 3, 2, 1]
    sizes = sizes_below(257)
    assert {1, 2, 16, 240, 256} <= set(sizes)
    assert len(sizes) < 50


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (lambda n: 96 - Max(0, 96 - n), ("n", 96)),
        (lambda n: Min(2048, n), ("n", 2048)),
        (lambda n: 1 - Max(0, 1 - n), (1, None)),
        (lambda n: Max(n, 1), ("n", None)),
        (lambda n: n + 1, (None, None)),
        (lambda n: Min(8, n), (None, None)),  # equals n for too few lengths
    ],
)
def test_sizes_are_simplified_to_the_length(expression, expected):
    n = sympy.Symbol("n", positive=True, integer=True)
    size, limit = expected
    expected_size = {"n": n, None: expression(n)}.get(size, size)
    assert simplify_size(expression(n)) == (expected_size, limit)
