"""Many requests: taken in windows, sorted by length, run in batches of like lengths, given back in their order.

Memory is that of one window, whatever the number of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from tformer_runtime.generate import Request, Result

WINDOW = 16  # batches that are sorted together
TOKENS = 16384  # padded positions that a batch may have before its first token


def in_batches(
    requests: Iterable[Request],
    run: Callable[[Sequence[Request]], Sequence[Result]],
    batch_size: int,
    tokens: int = TOKENS,
) -> Iterator[Result]:
    """Results of `run` over all requests, in the order of the requests.

    A window is taken before any of it is run: a request that cannot be prepared raises before its window's results.
    """
    source = iter(requests)
    while window := list(islice(source, WINDOW * batch_size)):
        results: dict[int, Result] = {}
        for batch in packed(window, batch_size, tokens):
            for request, result in zip(batch, run(batch), strict=True):
                results[request.index] = result
        for request in window:
            yield results.pop(request.index)


def packed(requests: Sequence[Request], batch_size: int, tokens: int) -> Iterator[list[Request]]:
    """Batches of at most `batch_size` requests and, padded to the longest, `tokens` positions; the longest first."""
    batch: list[Request] = []
    for request in sorted(requests, key=lambda r: -r.size):
        if batch and (len(batch) == batch_size or (len(batch) + 1) * batch[0].size > tokens):
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch
