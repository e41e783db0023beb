"""The floor: the bytes and multiply-adds that a request needs in any engine, at the rates of the machine.

A stage takes at least max(bytes / bandwidth, multiply-adds / rate). Its weights are read once, in the precision of the
file, and the cache of each row up to its valid length, in fp32. Scales, biases and norms are left out: the floor is a
bound. Multiply-adds with int8 and int4 weights have the rate of int8, those of attention the rate of fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from versus.shapes import Case, Shape

BITS = {"fp32": 32, "int8": 8, "int4": 4}
FLOAT = 4  # bytes


@dataclass(frozen=True)
class Work:
    """The work of one pass through a stage. weights: numbers that are read and multiplied. cached: further bytes to
    read.

    rows: rows that are multiplied with all weights. attended: multiply-adds of attention, of all rows.
    """

    weights: int
    rows: int
    cached: int = 0
    attended: int = 0

    def bytes(self, precision: str) -> int:
        return self.weights * BITS[precision] // 8 + self.cached

    def seconds(self, precision: str, rates: Mapping[str, float]) -> float:
        """Return seconds. rates: the result of `engines.rates`."""
        products = self.weights * self.rows / rates["fp32" if precision == "fp32" else "int8"]
        return max(self.bytes(precision) / rates["bandwidth"], products + self.attended / rates["fp32"])


def _layer(shape: Shape) -> int:
    """Return the number of weights of self-attention and feed-forward."""
    attention = 2 * shape.width * shape.width + 2 * shape.width * shape.keys
    return attention + (3 if shape.gated else 2) * shape.width * shape.feedforward


def output(shape: Shape) -> int:
    """Return the number of weights of the output projection."""
    return shape.width * shape.written


def encode(shape: Shape, case: Case) -> Work:
    """Return the work of the encoder; of an encoder-decoder with the keys and values of cross-attention."""
    weights = shape.layers * _layer(shape)
    if shape.kind == "translate":
        weights += shape.layers * 2 * shape.width * shape.width
    attended = 2 * shape.layers * shape.width * case.prompt * case.prompt * case.batch
    return Work(weights, case.batch * case.prompt, attended=attended)


def prompt(shape: Shape, case: Case) -> Work:
    """Return the work of reading a prompt, without the output projection, which one position needs."""
    pairs = case.prompt * (case.prompt + 1) // 2
    attended = 2 * shape.layers * shape.width * pairs * case.batch
    return Work(shape.layers * _layer(shape), case.batch * case.prompt, attended=attended)


def step(shape: Shape, case: Case, position: int) -> Work:
    """Return the work of one more token for each row, at `position` from 0: it attends to position + 1 positions."""
    rows, seen = case.batch * case.beams, position + 1
    weights = shape.layers * _layer(shape) + output(shape)
    cached = 2 * shape.layers * shape.keys * seen * rows * FLOAT
    attended = 2 * shape.layers * shape.width * seen * rows
    if shape.kind == "translate":
        weights += shape.layers * 2 * shape.width * shape.width
        cached += 2 * shape.layers * shape.width * case.prompt * case.batch * FLOAT  # all beams share one source
        attended += 2 * shape.layers * shape.width * case.prompt * rows
    return Work(weights, rows, cached, attended)


def room(shape: Shape, case: Case) -> int:
    """Return about how many bytes a case needs without the weights: keys and values, twice while they grow, and the
    scores
    of one layer's attention before and after the softmax."""
    rows, max_tokens = case.batch * case.beams, case.prompt + case.new
    cached = 2 * shape.layers * (shape.keys if case.new else 0) * max_tokens * rows
    scores = shape.heads * case.prompt * case.prompt * case.batch
    return FLOAT * 2 * (cached + scores)


def floors(shape: Shape, case: Case, precision: str, rates: Mapping[str, float]) -> dict[str, float]:
    """Return measure → seconds: of a "request", the "first" token and a "step", where the case has them."""

    def seconds(work: Work) -> float:
        return work.seconds(precision, rates)

    if shape.kind == "embed":
        return {"request": seconds(encode(shape, case))}
    if shape.kind == "translate":
        steps = [seconds(step(shape, case, i)) for i in range(case.new)]
        return {"request": seconds(encode(shape, case)) + sum(steps)}
    first = seconds(prompt(shape, case)) + seconds(Work(output(shape), case.batch))
    steps = [seconds(step(shape, case, case.prompt + i)) for i in range(case.new - 1)]
    result = {"request": first + sum(steps), "first": first}
    return result | ({"step": sum(steps) / len(steps)} if steps and case.beams == 1 else {})
