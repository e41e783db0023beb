"""The windows of inputs that are read before the first result."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tformer_runtime.decoding.ordered import BatchRunner, WindowLimits, in_order


@dataclass
class Item:
    index: int
    weight: int
    finished: bool = True
    error: Exception | None = None


def windows(weights, **how):
    """Return the windows in which inputs of these weights run, and the error; results keep the order of inputs."""
    ran, back = [], []

    def inputs():
        for index, weight in enumerate(weights):
            if weight is None:
                raise ValueError("cannot be read")
            yield Item(index, weight)

    runner = BatchRunner(lambda items: [[item.weight for item in items]], ran.append)
    limits = WindowLimits(count_values=lambda item: item.weight, **how)
    try:
        back.extend(in_order(inputs(), runner, lambda item: item.weight, limits))
    except ValueError:
        back.append(None)
    assert back == weights
    return [window for window in ran if window]


@pytest.mark.parametrize(
    ("weights", "how", "expected"),
    [
        ([1] * 7, {"max_inputs": 3, "enough_values": 100}, [[1] * 3, [1] * 3, [1]]),
        ([1] * 6, {"max_inputs": 3, "enough_values": 100}, [[1] * 3, [1] * 3]),
        ([5, 1, 1, 5, 5, 1], {"max_inputs": 4, "enough_values": 6}, [[5, 1], [1, 5], [5, 1]]),
        ([9, 9, 9, 9, 9], {"max_inputs": 4, "enough_values": 6, "min_rows": 2}, [[9, 9], [9, 9], [9]]),
        (
            [9, 9, 9, 1],
            {"max_inputs": 4, "enough_values": 6, "min_rows": 4, "count_rows": lambda item: 1 + item.weight // 4},
            [[9, 9], [9, 1]],
        ),
        ([9, 1, None], {"max_inputs": 4, "enough_values": 6}, [[9], [1]]),
        ([], {"max_inputs": 4, "enough_values": 6}, []),
    ],
)
def test_window_ends_at_its_number_or_size_of_inputs(weights, how, expected):
    assert windows(weights, **how) == expected
