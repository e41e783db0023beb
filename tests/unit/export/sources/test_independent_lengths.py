"""Lengths that are equal in the example stay equal only if forward needs them equal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tformer_export import padding
from tformer_export.sources import Source
from tformer_export.sources.call.independent_lengths import separate_lengths

LENGTH, WIDTH = 7, 8


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def lengths(function, names, step_input=None, masks=None, axes=None, length=LENGTH):
    """Return name → the sizes of its axes after the batch, in the example with separate lengths."""
    found = separated(function, names, step_input, masks, axes, length)
    return {name: tuple(value.shape[1:]) for name, value in found.example.items()}


def separated(function, names, step_input=None, masks=None, axes=None, length=LENGTH):
    lengths = [length] * len(names) if isinstance(length, int) else length
    example = {name: torch.ones(2, size, WIDTH) for name, size in zip(names, lengths, strict=True)}
    example |= {name: torch.ones(2, length, dtype=torch.int64) for name in masks or {}}
    source = Source(Call(function), example, step_input, "model", "task", masks=masks or {}, axes=axes or {})
    return separate_lengths(source)


def cut(a, b):
    return a + F.pad(b[:, : a.shape[1]], (0, 0, 0, a.shape[1] - b[:, : a.shape[1]].shape[1]))


def of_sums(*inputs):
    return sum(value.mean(1) for value in inputs)


def first_two_joined(a, b, c):
    return (a + b).mean(1) + c.mean(1)


def last_two_joined(a, b, c):
    return a.mean(1) + (b + c).mean(1)


def all_joined(a, b, c):
    return a + b + c


def two_threes(a, b, c, d, e, f):
    return (a + b + e).mean(1) + (c + d + f).mean(1)


def two_pairs(a, b, c, d):
    return (a + c).mean(1) + (b + d).mean(1)


@pytest.mark.parametrize(
    ("function", "names", "equal"),
    [
        (cut, "ab", ["a", "b"]),
        (of_sums, "ab", ["a", "b"]),
        (of_sums, "abc", ["a", "b", "c"]),
        (torch.add, "ab", ["ab"]),
        (first_two_joined, "abc", ["ab", "c"]),
        (last_two_joined, "abc", ["a", "bc"]),
        (all_joined, "abc", ["abc"]),
        (two_pairs, "abcd", ["ac", "bd"]),
        (two_threes, "abcdef", ["abe", "cdf"]),
    ],
)
@pytest.mark.parametrize("length", [1, LENGTH])
def test_lengths_are_equal_if_forward_needs_them_equal(function, names, equal, length):
    found = lengths(function, names, length=length)
    groups: dict[int, str] = {}
    for name in names:
        groups[found[name][0]] = groups.get(found[name][0], "") + name
    assert sorted(groups.values()) == equal


@pytest.mark.parametrize(("count", "length"), [(6, 2), (10, 3), (10, 7)])
def test_many_free_lengths_all_differ(count, length):
    found = lengths(of_sums, "abcdefghij"[:count], length=length)
    assert len(set(found.values())) == count


def test_mask_keeps_the_length_of_its_input():
    found = lengths(
        lambda a, b, keep: (a * keep[..., None]).mean(1) + b.mean(1), ("a", "b"), masks={"keep": padding("a")}
    )
    assert found["keep"][0] == found["a"][0] != found["b"][0]


def test_request_inputs_of_a_step_model_are_told_apart():
    """The step input has a length of its own in any case."""
    found = lengths(lambda a, b, ids: ids + a.mean(1, True) + b.mean(1, True), ("a", "b", "ids"), step_input="ids")
    assert found["a"][0] != found["b"][0]
    assert found["ids"] == (LENGTH, WIDTH)


def test_axes_of_one_input_are_told_apart():
    found = lengths(lambda a: a.mean((1, 2)), ("a",), axes={"a": (0, 1, 2)}, length=WIDTH)
    assert found["a"][0] != found["a"][1]


def test_lengths_that_cannot_change_stay():
    def fixed(a, b):
        assert a.shape[1] == b.shape[1] == LENGTH
        return a + b

    assert lengths(fixed, ("a", "b")) == {"a": (LENGTH, WIDTH), "b": (LENGTH, WIDTH)}


def test_single_input_costs_no_run():
    def fail(a):
        raise AssertionError

    assert lengths(fail, ("a",)) == {"a": (LENGTH, WIDTH)}


def within(a, b):
    if a.shape[1] > b.shape[1]:
        raise ValueError
    return a.mean(1) + b.mean(1)


def in_order(a, b, c):
    if not a.shape[1] <= b.shape[1] <= c.shape[1]:
        raise ValueError
    return a.mean(1) + b.mean(1) + c.mean(1)


def two_within(a, b, c):
    return (a + b).mean(1) + within(a, c)


@pytest.mark.parametrize(
    ("function", "names", "length", "order"),
    [
        (within, "ab", 7, ["ab"]),
        (within, "ab", (7, 12), ["ab"]),
        (lambda b, a: within(a, b), "ba", 7, ["ab"]),
        (lambda a, b: a + b[:, : a.shape[1]], "ab", 7, ["ab"]),
        (in_order, "abc", 7, ["ab", "bc"]),
        (two_within, "abc", 7, ["ac", "bc"]),
        (cut, "ab", 7, []),
        (cut, "ab", (7, 12), []),
        (torch.add, "ab", 7, []),
        (of_sums, "abc", (7, 12, 9), []),
    ],
)
def test_order_of_lengths_is_that_which_forward_needs(function, names, length, order):
    found = separated(function, names, length=length)
    assert {one + other for (one, _), (other, _) in found.length_order} >= {*order}
    for one in names:
        for other in names:
            if one + other not in order and (one, other) != ("a", "c"):
                assert ((one, 1), (other, 1)) not in found.length_order
    function(*found.example.values())


@pytest.mark.parametrize("function", [lambda *values: sum(values), lambda *values: torch.cat(values, 2), of_sums])
@pytest.mark.parametrize("count", [6, 12])
def test_runs_of_forward_grow_linearly_with_the_inputs(function, count):
    runs = []

    def count_runs(*values):
        runs.append(None)
        return function(*values)

    names = "abcdefghijkl"[:count]
    found = lengths(count_runs, names)
    assert len({*found.values()}) == (count if function is of_sums else 1)
    assert len(runs) <= 4 * count
