"""Drawn requests: lengths that are free of each other differ both ways, and others are equal and long enough."""

from __future__ import annotations

import torch
from torch import nn

from tformer_export.analysis.input_facts import InputFacts
from tformer_export.sources import Source
from tformer_export.verify.input_draws import InputDraws

LENGTHS = (6, 11, 2, 8, 4, 96)


def facts(traced_length, min_length=1, max_length=None):
    return InputFacts(
        ids=None, vocabulary=None, pad=0, masked=False, max_length=max_length, min_length=min_length,
        traced_length=traced_length,
    )  # fmt: skip


def drawn(**inputs):
    """Return name → the length of each drawn request."""
    source = Source(nn.Identity(), {name: torch.randn(2, 7, 3) for name in inputs}, None, "model", "task")
    requests = [InputDraws(source, inputs).draw_request(length) for length in LENGTHS]
    return {name: [len(request[name]) for request in requests] for name in inputs}


def test_free_lengths_are_shorter_and_longer_than_each_other():
    lengths = drawn(a=facts(5), b=facts(7), c=facts(9))
    assert tuple(lengths["a"]) == LENGTHS
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        signs = {x > y for x, y in zip(lengths[one], lengths[other], strict=True) if x != y}
        assert signs == {True, False}, (one, other)


def test_lengths_that_have_to_be_equal_are_equal_within_the_limits_of_all():
    lengths = drawn(a=facts(5, max_length=9), b=facts(5), c=facts(7))
    assert lengths["a"] == lengths["b"] == [min(length, 9) for length in LENGTHS]


def test_lengths_are_no_shorter_than_forward_needs():
    lengths = drawn(a=facts(5, min_length=4), b=facts(7, min_length=3))
    assert min(lengths["a"]) == 4
    assert min(lengths["b"]) >= 3
