"""Clients in closed loops, and arrivals by a Poisson process. A loop is over when its seconds have passed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

MAX_CONNECTIONS = 64
WARM_SECONDS = 2.0  # of a closed loop, in which the batch fills


@dataclass
class Record:
    """A request that has its answer. Times are in seconds.

    number: of the request in the workload.
    due_at: when it should have been sent: the time of its arrival, or that of the answer before it.
    first_at, last_at: of its first and last token; first_at is None without a stream.
    tokens: that were generated.
    """

    number: int
    due_at: float
    first_at: float | None
    last_at: float
    tokens: int


@dataclass
class Load:
    """The counted requests of a run.

    seconds: in which they were answered.
    processor: seconds of the processor in this time.
    """

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    processor: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return rates and percentiles; times are in milliseconds."""
        firsts = [record.first_at - record.due_at for record in self.records if record.first_at is not None]
        rates = [
            (record.last_at - record.first_at) / (record.tokens - 1)
            for record in self.records
            if record.first_at is not None and record.tokens > 1
        ]
        wholes = [record.last_at - record.due_at for record in self.records]
        tokens = sum(record.tokens for record in self.records)
        found = {
            "requests": float(len(self.records)),
            "requests_per_second": len(self.records) / self.seconds,
            "tokens_per_second": tokens / self.seconds,
            "processor_per_request": 1e3 * self.processor / max(len(self.records), 1),
            "processor_share": self.processor / self.seconds,
        }
        for name, values in (("first", firsts), ("token", rates), ("whole", wholes)):
            if values:
                p50, p99 = np.percentile(values, [50, 99])
                found |= {f"{name}_p50": 1e3 * float(p50), f"{name}_p99": 1e3 * float(p99)}
        return found


async def closed_loop(
    send: Callable[[int, int, float], Awaitable[Record]],
    order: Sequence[int],
    clients: int,
    seconds: float,
    meter: Callable[[], float],
) -> Load:
    """Run clients that each send a request as soon as the one before has its answer.

    Answers of the seconds after WARM_SECONDS count. A request that began earlier counts whole, and one that ends later
    does not, so that their sum is that of the seconds.

    send: called with the client, the request and the time at which it is due.
    order: of the requests; it is repeated.
    meter: returns processor time so far.
    """
    load, sent = Load(), 0
    begun = time.perf_counter()
    counts_from, ends_at = begun + WARM_SECONDS, begun + WARM_SECONDS + seconds

    async def run(client: int) -> None:
        nonlocal sent
        while (now := time.perf_counter()) < ends_at:
            number = order[sent % len(order)]
            sent += 1
            record = await send(client, number, now)
            if counts_from < record.last_at <= ends_at:
                load.records.append(record)

    async def measure() -> None:
        await asyncio.sleep(counts_from - time.perf_counter())
        before = meter()
        await asyncio.sleep(ends_at - time.perf_counter())
        load.processor = meter() - before

    await asyncio.gather(measure(), *(run(client) for client in range(clients)))
    load.seconds = seconds
    return load


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the times of arrivals by a Poisson process. rate: a second."""
    draw, at, times = random.Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        times.append(at)
    return times


async def open_loop(
    send: Callable[[int, int, float], Awaitable[Record]],
    order: Sequence[int],
    times: Sequence[float],
    meter: Callable[[], float],
) -> Load:
    """Send a request at each time, whether or not the earlier ones have their answers.

    At most MAX_CONNECTIONS requests are sent at once. Others wait, and their wait counts.
    """
    load, begun, before = Load(), time.perf_counter(), meter()
    free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
    for client in reversed(range(MAX_CONNECTIONS)):
        free.put_nowait(client)

    async def run(number: int, due_at: float) -> None:
        client = await free.get()
        try:
            load.records.append(await send(client, number, due_at))
        finally:
            free.put_nowait(client)

    tasks = []
    for index, at in enumerate(times):
        if (wait := begun + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(run(order[index % len(order)], begun + at)))
    await asyncio.gather(*tasks)
    load.seconds = max((record.last_at for record in load.records), default=begun + 1) - begun
    load.processor = meter() - before
    return load
