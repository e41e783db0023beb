"""How many inputs are read before the first is given back."""

from __future__ import annotations

import pytest

from tformer_runtime.tasks.windows import in_windows


def windows(weights, **how):
    """The windows that inputs of such weights are run in, which are given back in their order; and what was raised."""
    ran, back = [], []

    def inputs():
        for weight in weights:
            if weight is None:
                raise ValueError("cannot be read")
            yield weight

    try:
        back.extend(in_windows(inputs(), lambda some: [list(some)], ran.append, weigh=int, **how))
    except ValueError:
        back.append(None)
    assert back == weights
    return [window for window in ran if window]


@pytest.mark.parametrize(
    ("weights", "how", "expected"),
    [
        ([1] * 7, {"size": 3, "most": 100}, [[1] * 3, [1] * 3, [1]]),
        ([1] * 6, {"size": 3, "most": 100}, [[1] * 3, [1] * 3]),
        ([5, 1, 1, 5, 5, 1], {"size": 4, "most": 6}, [[5, 1], [1, 5], [5, 1]]),
        ([9, 9, 9, 9, 9], {"size": 4, "most": 6, "least": 2}, [[9, 9], [9, 9], [9]]),
        ([9, 9, 9, 1], {"size": 4, "most": 6, "least": 4, "count": lambda weight: 1 + weight // 4}, [[9, 9], [9, 1]]),
        ([9, 1, None], {"size": 4, "most": 6}, [[9], [1]]),
        ([], {"size": 4, "most": 6}, []),
    ],
)
def test_a_window_ends_where_its_inputs_are_many_or_large(weights, how, expected):
    assert windows(weights, **how) == expected
