"""Arithmetic of free sizes, which torch repeats thousands of times in a trace.

A tensor of free sizes asks for the product of its sizes, and whether its strides are contiguous, each time that torch
makes one: some 80,000 operations in a trace of a small model, of which 2,000 differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import sympy
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# What each gives follows from its operands and from what a ShapeEnv replaces. `mod` asks for ranges as well.
KEPT_TYPES = int, bool  # of the example's value: fractions and sizes that follow from data are rare
OPERATIONS = ("_add", "_sub", "_mul", "_sym_max", "_sym_min", "_eq", "_ne", "_ge", "_gt", "_le", "_lt", "_and_", "_or_")


@contextmanager
def size_arithmetic_kept() -> Iterator[None]:
    """Patch the operations of torch's symbolic sizes: equal ones of a trace are computed once.

    The result is a new node each time, because a trace knows a size by its node. The patch is process-wide: the caller
    holds TORCH_PATCH_LOCK. With a version of torch whose sizes have other attributes, nothing is patched.
    """
    if not _knows_torch():
        yield
        return
    originals = {name: vars(SymNode)[name] for name in (*OPERATIONS, "maybe_as_int")}
    for name in OPERATIONS:
        setattr(SymNode, name, _kept(originals[name]))
    SymNode.maybe_as_int = _symbols_skipped(originals["maybe_as_int"])  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(SymNode, name, original)


@cache
def _knows_torch() -> bool:
    """Return whether torch's sizes have the private attributes that this module reads."""
    environment = ShapeEnv()
    node = SymNode(sympy.Integer(1), environment, int, 1)
    return (
        {*OPERATIONS, "maybe_as_int"} <= {*vars(SymNode)}
        and {"_expr", "_hint", "_optimized_summation", "shape_env"} <= {*vars(node)}
        and {"_replacements_version_counter", "_translation_validation_enabled", "replacements"} <= {*vars(environment)}
    )


def _kept(original: Callable[[SymNode, SymNode], SymNode]) -> Callable[[SymNode, SymNode], SymNode]:
    """Return the operation with its results kept for the latest ShapeEnv and its latest replacements."""
    results: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    environment: ShapeEnv | None = None
    version = -1

    def operation(one: SymNode, other: SymNode) -> SymNode:
        nonlocal environment, version
        sizes = one.shape_env
        if (
            type(one._hint) not in KEPT_TYPES
            or type(other._hint) not in KEPT_TYPES
            or sizes is None
            or sizes._translation_validation_enabled  # notes each operation
            or get_proxy_mode() is not None  # the operation becomes a node of the graph
        ):
            return original(one, other)
        if sizes is not environment or sizes._replacements_version_counter != version:
            results.clear()
            environment, version = sizes, sizes._replacements_version_counter
        # An expression is known by its identity, which is faster than its hash. `results` keeps it alive.
        key = (
            id(one._expr),
            id(other._expr),
            one._hint,
            other._hint,
            one._optimized_summation,
            other._optimized_summation,
        )
        if (kept := results.get(key)) is not None:
            node: SymNode = object.__new__(SymNode)
            node.__dict__.update(kept[0])
            return node
        expressions = one._expr, other._expr
        node = original(one, other)
        if sizes._replacements_version_counter == version:
            results[key] = dict(vars(node)), expressions
        return node

    return operation


def _symbols_skipped(maybe_as_int: Callable[[SymNode], int | None]) -> Callable[[SymNode], int | None]:
    """Return the function without the work for a size that no other one replaces: it is not a number."""

    def number(size: SymNode) -> int | None:
        sizes = size.shape_env
        if size._expr.is_symbol and sizes is not None and size._expr not in sizes.replacements:  # type: ignore[attr-defined]
            return None
        return maybe_as_int(size)

    return number
