"""Rows of a batch: the places of rows that continue other rows, padding, and masks of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tformer_runtime.base.arrays import F32, Ints


def is_identity(rows: Ints, count: int) -> bool:
    """Return whether `rows` are all of `count` rows in their order."""
    return len(rows) == count and bool((rows == np.arange(count)).all())


def place_rows(parents: Ints, requests: Ints | None = None) -> tuple[Ints, Ints]:
    """Find places for rows that continue other rows, so that few rows must be copied.

    parents: (n,) the present row that each row continues.
    requests: the number of the request of each present row. Rows of one request become neighbours if all requests have
        the same number of rows. Otherwise, and without `requests`, rows may go anywhere. Return the place of each row
        among 0 … n-1, and the present row that each place continues. A row takes the place of its parent if possible.
    """
    places = _assign_places(parents)
    if requests is not None:
        first_rows, block = _number_requests(requests[parents])
        sizes = np.bincount(block)
        size = int(sizes[0])
        if size > 1 and bool((sizes == size).all()):
            blocks = _assign_places(parents[first_rows] // size)
            places = _assign_places(parents, size, blocks[block])
    order = np.empty(len(parents), np.int64)
    order[places] = parents
    return places, order


def _number_requests(requests: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each request, and the number of each row's request, counted from 0."""
    begins = np.empty(len(requests), np.bool_)
    begins[0] = True
    np.not_equal(requests[1:], requests[:-1], out=begins[1:])
    first_rows = np.flatnonzero(begins)
    if (np.diff(requests[first_rows]) > 0).all():  # frequent, and much faster than sorting
        return first_rows, np.cumsum(begins) - 1
    _, first_rows, numbers = np.unique(requests, return_index=True, return_inverse=True)
    return first_rows, numbers


def _assign_places(parents: Ints, size: int = 0, blocks: Ints | None = None) -> Ints:
    """Return a place for each row: the place of its parent, if that is one of 0 … n-1 and no earlier row has it, or
    else a free place.

    blocks: the block of `size` places in which each row must be. Every block has as many rows as places.
    """
    count = len(parents)
    places = np.full(count, -1)
    free = np.ones(count, np.bool_)
    first_child = np.full(int(parents.max()) + 1, -1)
    first_child[parents[::-1]] = np.arange(count - 1, -1, -1)  # the last of equal indices counts
    rows = np.flatnonzero(first_child >= 0)
    first_children = first_child[rows]
    stays = rows < count if blocks is None else rows // size == blocks[first_children]
    places[first_children[stays]] = rows[stays]
    free[rows[stays]] = False
    others = np.flatnonzero(places < 0)
    if blocks is not None:
        others = others[np.argsort(blocks[others], kind="stable")]
    places[others] = np.flatnonzero(free)
    return places


@contextmanager
def mask_forbidden(logits: F32, rows: Sequence[int], forbidden: Sequence[Ints]) -> Iterator[None]:
    """Set the logits of the forbidden tokens of some rows to -inf within a `with` block. Restore them afterwards.

    Cost: proportional to the number of forbidden tokens, because no row is copied.
    """
    masked_rows = [(row, tokens) for row, tokens in zip(rows, forbidden, strict=True) if len(tokens)]
    if not masked_rows:
        yield
        return
    first_tokens = masked_rows[0][1]
    if all(tokens is first_tokens for _, tokens in masked_rows):  # frequent: rules that read lengths alone
        row_index: Ints = np.array([[row] for row, _ in masked_rows])
        columns = first_tokens
    else:
        row_index = np.repeat([row for row, _ in masked_rows], [len(tokens) for _, tokens in masked_rows])
        columns = np.concatenate([tokens for _, tokens in masked_rows])
    saved = logits[row_index, columns]
    logits[row_index, columns] = -np.inf
    try:
        yield
    finally:
        logits[row_index, columns] = saved


def pad_rows(rows: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return rows as (rows, max length), padded with zeros on the right, and the length of each."""
    counts = np.array([len(row) for row in rows], np.int64)
    tokens = np.zeros((len(rows), counts.max()), np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, counts
