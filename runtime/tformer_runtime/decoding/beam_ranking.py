"""The best continuations of beams: by the library of native kernels, or by numpy with the same results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tformer_runtime.backend.native_kernels import find_native_ranking
from tformer_runtime.base.arrays import F32, Ints

Ranking = Callable[[F32, F32, Ints, F32, int], tuple[F32, F32, Ints, Ints]]

_BLOCK_COLUMNS = 32  # the fastest size: docs/design/runtime.md#search-on-the-host


def find_ranking() -> Ranking:
    """Return the fastest implementation of `rank_beams`."""
    return find_native_ranking() or rank_beams


def rank_beams(logits: F32, norms: F32, rows: Ints, scores: F32, width: int) -> tuple[F32, F32, Ints, Ints]:
    """Return the `width` best continuations of groups of beams, best first: their scores, the log-probabilities of the
    tokens, the beams within their group, and the tokens. Each array is (groups, width).

    Each beam's best are those by its logits: norm and score so far shift all values alike. Of continuations with equal
    scores the first beam's come first, then those with the greater logit, then the first tokens. Scores are -inf if
    there are not enough continuations. Cost: see `best`.

    logits, norms: (rows, vocabulary) and (rows,); a logit minus the norm of its row is a log-probability. No NaN.
    rows, scores: (groups, beams), the row of each beam, and its score so far.
    """
    groups, flat_rows = np.arange(len(rows))[:, None], rows.ravel()
    is_whole_batch = len(flat_rows) >= len(logits)
    top, tokens = best(logits if is_whole_batch else logits[flat_rows], width)
    if is_whole_batch:
        top, tokens = top[flat_rows], tokens[flat_rows]
    all_gains = (top - norms[flat_rows, None]).reshape(*rows.shape, width)
    top, picks = best((all_gains + scores[:, :, None]).reshape(len(rows), -1), width)
    gains = all_gains.reshape(len(rows), -1)[groups, picks]
    return top, gains, picks // width, tokens.reshape(len(rows), -1)[groups, picks]


def best(scores: F32, count: int) -> tuple[F32, Ints]:
    """Return the `count` best values of each row of (rows, columns), best first, and their columns. Equal values are in
    the order of their columns, and the first of them are returned.

    If a row has fewer columns, the last values are -inf. Cost: one pass over the scores, for the maxima. A row with
    more than `count` values from the last of the best on is sorted.
    """
    missing = count - scores.shape[1]
    columns = scores.shape[1]
    if missing > 0:
        scores = np.concatenate([scores, np.full((len(scores), missing), -np.inf, np.float32)], 1)
    row = np.arange(len(scores))[:, None]
    maxima, index = None, None
    if scores.shape[1] > 4 * count * _BLOCK_COLUMNS:
        maxima, index = _columns_with_best(scores, count)
    candidates = scores if index is None else scores[row, index]
    picks = np.argpartition(-candidates, count - 1)[:, :count]
    picks = picks if index is None else index[row, picks]
    top = scores[row, picks]
    order = np.lexsort((picks, -top))
    top, picks = top[row, order], picks[row, order]
    for i in _rows_with_ties(top[:, -1:], candidates, maxima, count):
        picks[i] = np.argsort(-scores[i], kind="stable")[:count]
    return top, np.minimum(picks, columns - 1)


def _rows_with_ties(last: F32, candidates: F32, maxima: F32 | None, count: int) -> list[int]:
    """Return the rows with more values from the `last` of the best on than the `count` best.

    If all candidates that are as good are among the best, any other is in a block whose maximum is as good, too.
    """
    tied = (candidates >= last).sum(1) > count
    if maxima is not None:
        tied |= (maxima >= last).sum(1) > count
    rows: list[int] = np.flatnonzero(tied & (last[:, 0] > -np.inf)).tolist()
    return rows


def _columns_with_best(scores: F32, count: int) -> tuple[F32, Ints]:
    """Return the maxima of the blocks of columns of (rows, columns), and columns that contain the `count` best: those
    of the blocks with the greatest maxima.

    Partitioning a whole vocabulary is slow, and maxima are fast. They are fastest if the columns of a block are no
    neighbours: column c is in block c mod the number of blocks.
    """
    rows, columns = scores.shape
    blocks = columns // _BLOCK_COLUMNS
    columns_of_blocks = blocks * _BLOCK_COLUMNS
    maxima: F32 = scores[:, :columns_of_blocks].reshape(rows, _BLOCK_COLUMNS, blocks).max(1)
    blocks_with_best = np.argpartition(-maxima, count - 1)[:, :count]
    columns_in_blocks = (blocks_with_best[:, :, None] + blocks * np.arange(_BLOCK_COLUMNS)).reshape(rows, -1)
    last_columns = np.broadcast_to(np.arange(columns_of_blocks, columns), (rows, columns - columns_of_blocks))
    return maxima, np.concatenate([columns_in_blocks, last_columns], 1)
