"""Rows of a batch: the places of rows that continue other rows, padding, and masks of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tformer_runtime.base.arrays import F32, Ints


def is_identity(rows: Ints, count: int) -> bool:
    """Return whether `rows` are all of `count` rows in their order."""
    return len(rows) == count and rows.tolist() == list(range(count))


def place_rows(parents: Ints, requests: Ints | None = None) -> tuple[Ints, Ints]:
    """Find places for rows that continue other rows, so that few rows must be copied.

    parents: (n,) the present row that each row continues.
    requests: the number of the request of each present row. Rows of one request become neighbours if all requests have
        the same number of rows. Otherwise, and without `requests`, rows may go anywhere. Return the place of each row
        among 0 … n-1, and the present row that each place continues. A row takes the place of its parent if possible.
    """
    rows = parents.tolist()
    places = [-1] * len(rows)
    children: dict[int, list[int]] = {}  # of each request
    if requests is not None:
        for row, request in enumerate(requests[parents].tolist()):
            children.setdefault(request, []).append(row)
    if requests is not None and len(children) < len(rows) and len({*map(len, children.values())}) == 1:
        size = len(rows) // len(children)
        # The first beams of a request have one row in front of them, but the context of a request stays where it is.
        block_of = {request: block for block, request in enumerate(dict.fromkeys(requests.tolist()))}
        block_requests = sorted(children)
        blocks = [-1] * len(children)
        everything = range(len(children))
        _assign_places([block_of[request] for request in block_requests], everything, everything, blocks)
        for request, block in zip(block_requests, blocks, strict=True):
            _assign_places(rows, children[request], range(block * size, (block + 1) * size), places)
    else:
        _assign_places(rows, range(len(rows)), range(len(rows)), places)
    place_array = np.array(places, np.int64)
    order = np.empty(len(rows), np.int64)
    order[place_array] = parents
    return place_array, order


def _assign_places(parents: Sequence[int], rows: Sequence[int], free_places: range, places: list[int]) -> None:
    """Write one of the free places of each row: that of its parent, if it is free and no earlier row has it, or else
    the next. Lists are faster than arrays for the rows of most batches.
    """
    free = dict.fromkeys(free_places)
    others = []
    for row in rows:
        parent = parents[row]
        if parent in free:
            del free[parent]
            places[row] = parent
        else:
            others.append(row)
    for row, place in zip(others, free, strict=True):
        places[row] = place


@contextmanager
def mask_forbidden(logits: F32, rows: Sequence[int], forbidden: Sequence[Ints]) -> Iterator[None]:
    """Set the logits of the forbidden tokens of some rows to -inf within a `with` block. Restore them afterwards.

    Cost: proportional to the number of forbidden tokens, because no row is copied.
    """
    if not any(map(len, forbidden)):
        yield
        return
    if len({id(tokens) for tokens in forbidden}) == 1:  # frequent: rules that read lengths alone
        row_index, columns = np.array(rows)[:, None], forbidden[0]
    else:
        row_index = np.repeat(rows, [len(tokens) for tokens in forbidden])
        columns = np.concatenate(forbidden)
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
