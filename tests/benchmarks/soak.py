"""Concurrent requests of all kinds for a long time, each result compared with that of the request alone. By hand:

    python tests/benchmarks/soak.py MODEL.onnx [--minutes 60] [--seed N]

A pool of requests with random ids is made for the file: greedy decoding, beams, samples, penalties, stop strings,
constraints (if the file has a tokenizer and llguidance is installed) and cross-attentions (if the file has them). Each
is computed alone. Then they are submitted to an `AsyncModel` at random, in bursts, as streams or not; some are
cancelled, some have deadlines. Every result must have the ids, texts and finish reasons of the request alone, for all
alternatives. Log-probabilities may differ by rounding, which depends on the other rows. Rounding could also decide
between two nearly equal tokens. So the pool leaves out a request if a difference of less than `TIE` decides anything in
it: its result must stay the same while every logit is disturbed by up to `TIE`, `DISTURBED` times.

Then `generate_batch` gets 10,000 requests for a few tokens each. At the end the script prints a table. The exit status
is 1 if a result was wrong, a request was lost, bytes of caches are still allocated, or the resident memory is more than
5 % above its value after the first requests (the first burst, of 224, and the first hundred of the batch).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from tformer_runtime import AsyncModel, DeadlineError, Model, Result

TIE = 1e-3  # of logits; rounding is some 1e-5
DISTURBED = 6
CLOSE = 1e-3  # of log-probabilities
MOST_GROWTH = 1.05  # of resident memory
WARM = 100  # requests, after which memory is expected to stay
PATIENCE = 300.0  # seconds after which a request counts as lost


@dataclass(frozen=True)
class Request:
    """A request and its result alone."""

    kind: str
    input: Any
    options: dict[str, Any]
    expected: Result

    @property
    def streams(self) -> bool:
        return "num_return_sequences" not in self.options and "cross_attentions" not in self.options


@dataclass
class Tally:
    """The outcomes of requests by kind. wrong: descriptions of wrong results. resident: samples in bytes."""

    done: Counter[str] = field(default_factory=Counter)
    streamed: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    resident: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum((self.done + self.streamed + self.cancelled + self.late).values())

    @property
    def growth(self) -> float:
        """Return the resident memory at the end over that after warm-up."""
        return self.resident[-1] / self.resident[0] if self.resident else 1.0


# The pool


def pool(model: Model, count: int, seed: int) -> list[Request]:
    """Return requests of all kinds that the file allows, one kind after another, each with its result."""
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    texts = [model.generate(_input(model, rng), max_new_tokens=_length(model, rng)).text for _ in range(12)]
    kinds = _kinds(model, [text for text in texts if text.strip()])
    while len(requests) < count:
        kind = list(kinds)[len(requests) % len(kinds)]
        options = {"max_new_tokens": _length(model, rng), **kinds[kind](rng)}
        request = _settled(model, kind, _input(model, rng), options, rng)
        requests += [request] if request else []
    return requests


def tiny(model: Model, count: int, seed: int) -> list[Request]:
    """Return inputs of mixed lengths for a few new tokens each."""
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    while len(requests) < count:
        request = _settled(model, "tiny", _input(model, rng), {"max_new_tokens": 4}, rng)
        requests += [request] if request else []
    return requests


def _kinds(model: Model, texts: list[str]) -> dict[str, Callable[[np.random.Generator], dict[str, Any]]]:
    """Return name of a kind → a function that makes its options. texts: texts that the model generates."""
    kinds: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
        "greedy": lambda rng: {},
        "penalised": lambda rng: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "top_logprobs": 3},
        "beams": lambda rng: {"num_beams": int(rng.integers(2, 6))},
        "many beams": lambda rng: {
            "num_beams": 4,
            "num_return_sequences": 4,
            "num_beam_groups": 2,
            "diversity_penalty": 0.5,
        },
        "sample": lambda rng: {"temperature": 0.9, "top_p": 0.9, "seed": int(rng.integers(1000))},
        "samples": lambda rng: {
            "temperature": 1.2,
            "top_k": 9,
            "num_return_sequences": 3,
            "seed": int(rng.integers(1000)),
        },
    }
    if texts:
        kinds["stop"] = lambda rng: {"stop_strings": _part(rng.choice(texts), rng)}
        kinds["beams, stop"] = lambda rng: {"stop_strings": [_part(rng.choice(texts), rng)], "num_beams": 3}
        if importlib.util.find_spec("llguidance"):
            kinds["choices"] = lambda rng: {"choices": sorted(set(texts)), "max_new_tokens": None}
            kinds["regex"] = lambda rng: {
                "regex": f"({_escaped(texts[0])}|{_escaped(texts[-1])})",
                "max_new_tokens": None,
            }
    if any(extra.name == "cross_attentions" for extra in model.manifest.extras):
        kinds["cross_attentions"] = lambda rng: {"cross_attentions": True}
    return kinds


def _part(text: str, rng: np.random.Generator) -> str:
    at = int(rng.integers(len(text)))
    return text[at : at + int(rng.integers(1, 4))]


def _escaped(text: str) -> str:
    return "".join(c if c.isalnum() else f"\\{c}" for c in text)


def _input(model: Model, rng: np.random.Generator) -> list[int]:
    manifest = model.manifest
    assert manifest.decode is not None
    specs = [s for s in (manifest.encode.inputs if manifest.encode else ()) if s.role != "mask"]
    if len(specs) > 1 or any(spec.role != "ids" for spec in specs):
        raise click.ClickException("the soak knows models that read ids alone")
    size, max_length = int(manifest.decode.logits.shape[-1]), manifest.max_length // 2
    if specs:
        size, max_length = specs[0].vocabulary or size, specs[0].max_length or 64
    special = {
        *manifest.special_tokens.bos_token_ids,
        *manifest.special_tokens.eos_token_ids,
        manifest.special_tokens.pad_token_id,
    }
    usual = [i for i in range(size) if i not in special]
    length = min(int(rng.geometric(0.12)), max_length, 40)
    return [int(i) for i in rng.choice(usual, length)]


def _length(model: Model, rng: np.random.Generator) -> int:
    return min(int(rng.geometric(0.06)), model.manifest.max_length // 2)


def _settled(
    model: Model, kind: str, input: list[int], options: dict[str, Any], rng: np.random.Generator
) -> Request | None:
    """Return a request with its result; None if a difference of less than TIE decides it."""
    expected = model.generate(input, **options)

    def disturb(ids: Any, logits: Any) -> Any:
        return logits + rng.uniform(-TIE, TIE, logits.shape).astype(np.float32)

    for _ in range(DISTURBED):
        disturbed = model.generate(input, **options, logits_processor=disturb)
        if _difference(disturbed, expected, close=1e9):
            return None
    return Request(kind, input, options, expected)


def _difference(actual: Result, expected: Result, close: float = CLOSE) -> str | None:
    """Return a description of the difference; empty if there is none."""
    ours, theirs = (actual, *actual.alternatives), (expected, *expected.alternatives)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("token_ids", "text", "finish_reason"):
            if getattr(one, name) != getattr(other, name):
                return f"{name} {getattr(one, name)!r} instead of {getattr(other, name)!r}"
        if not np.allclose((one.score, *one.token_logprobs), (other.score, *other.token_logprobs), atol=close):
            return f"log-probabilities {one.token_logprobs} instead of {other.token_logprobs}"
        if other.cross_attentions is not None and not np.allclose(
            one.cross_attentions, other.cross_attentions, atol=close
        ):
            return "other alignments"
    return None


# The soak


async def soak(
    model: Model, requests: list[Request], seed: int, tally: Tally, more: Callable[[bool], bool], rows: int = 16
) -> None:
    """Submit requests of a pool at random.

    more: called before each burst with whether no request runs; false ends the soak.
    """
    rng = np.random.default_rng(seed)
    running: set[asyncio.Task[None]] = set()
    # The largest batch with the longest requests comes first, so that memory reaches its maximum.
    burst, max_running = sorted(requests, key=lambda request: -len(request.input))[: 14 * rows], 0
    async with AsyncModel(model, max_batch_size=rows, max_pending=4 * rows) as aio:
        while more(not running):
            for request in burst:
                running.add(asyncio.create_task(_one(aio, request, np.random.default_rng(rng.integers(2**32)), tally)))
            while len(running) > max_running:
                running -= (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]
            size = int(rng.choice([1, 2, 4, 8 * rows], p=[0.5, 0.3, 0.15, 0.05]))
            burst = [requests[int(i)] for i in rng.integers(len(requests), size=size)]
            max_running = int(rng.choice([0, rows, 6 * rows], p=[0.1, 0.5, 0.4]))
        if running:
            await asyncio.wait(running)


async def _one(aio: AsyncModel, request: Request, rng: np.random.Generator, tally: Tally) -> None:
    """Submit one request in some way, and check its outcome."""
    ways = [_generated, _cancelled, _late] + ([_streamed, _left] if request.streams and request.expected.text else [])
    chances = np.array([0.6, 0.1, 0.1, 0.3, 0.1][: len(ways)])
    way = ways[int(rng.choice(len(ways), p=chances / chances.sum()))]
    try:
        async with asyncio.timeout(PATIENCE):
            await way(aio, request, rng, tally)
    except TimeoutError:
        tally.lost += 1
    except Exception as error:
        tally.wrong.append(f"{request.kind}: {way.__name__.strip('_')}: {type(error).__name__}: {error}")


def _check(tally: Tally, request: Request, result: Result) -> None:
    tally.done[request.kind] += 1
    if (difference := _difference(result, request.expected)) is not None:
        tally.wrong.append(f"{request.kind} of {request.input}: {difference}")


def _check_text(tally: Tally, request: Request, text: str, whole: bool) -> None:
    tally.streamed[request.kind] += 1
    expected = request.expected.text
    if text != expected if whole else not expected.startswith(text):
        tally.wrong.append(f"{request.kind} of {request.input}, streamed: {text!r} instead of {expected!r}")


def _moment(rng: np.random.Generator) -> float:
    """Return a short time in seconds, in which some requests finish."""
    return float(rng.exponential(0.02)) + 1e-4


async def _generated(aio: AsyncModel, request: Request, rng: np.random.Generator, tally: Tally) -> None:
    _check(tally, request, await aio.generate(request.input, **request.options))


async def _cancelled(aio: AsyncModel, request: Request, rng: np.random.Generator, tally: Tally) -> None:
    task = asyncio.ensure_future(aio.generate(request.input, **request.options))
    await asyncio.sleep(_moment(rng))
    task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        tally.cancelled[request.kind] += 1
    else:
        _check(tally, request, task.result())


async def _late(aio: AsyncModel, request: Request, rng: np.random.Generator, tally: Tally) -> None:
    try:
        _check(tally, request, await aio.generate(request.input, deadline=_moment(rng), **request.options))
    except DeadlineError:
        tally.late[request.kind] += 1


async def _streamed(aio: AsyncModel, request: Request, rng: np.random.Generator, tally: Tally) -> None:
    pieces = [piece async for piece in aio.stream(request.input, **request.options)]
    _check_text(tally, request, "".join(pieces), whole=True)


async def _left(aio: AsyncModel, request: Request, rng: np.random.Generator, tally: Tally) -> None:
    stream, pieces = aio.stream(request.input, **request.options), []
    async for piece in stream:
        pieces.append(piece)
        if rng.random() < 0.3:
            break
    await stream.aclose()
    _check_text(tally, request, "".join(pieces), whole=False)


def batch(model: Model, requests: list[Request], count: int, tally: Tally, sample: Callable[[], None]) -> None:
    """Run `generate_batch` with `count` requests of equal options from the pool; call `sample` after each result."""
    chosen = [requests[int(i)] for i in np.random.default_rng(count).integers(len(requests), size=count)]
    inputs = (request.input for request in chosen)
    for request, result in zip(chosen, model.generate_batch(inputs, **requests[0].options), strict=True):
        _check(tally, request, result)
        sample()


# By hand


def resident() -> int:
    """Return the resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def returning() -> None:
    """Let glibc's free() return large buffers to the system, and use one heap for all threads.

    Otherwise glibc keeps some MB for later requests, and the resident memory does not show the allocated memory.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 1 << 17)
        mallopt(_ARENA_MAX, 1)


_MMAP_THRESHOLD, _ARENA_MAX = -3, -8


class Meter:
    """Samples resident memory into a tally: once after warm-up, and then every `every` seconds."""

    def __init__(self, tally: Tally, every: float) -> None:
        self._tally, self._every = tally, every
        self._began = self._last = time.monotonic()

    def sample(self, at_once: bool = False) -> None:
        now, tally = time.monotonic(), self._tally
        if tally.total < WARM or (tally.resident and now < self._last + self._every and not at_once):
            return
        self._last = now
        tally.resident.append(resident())
        minutes, more = (now - self._began) / 60, 100 * (tally.growth - 1)
        click.echo(f"{minutes:6.1f} min  {tally.total:9,} requests  {tally.resident[-1] / 1e6:7.1f} MB ({more:+.1f} %)")


@click.command()
@click.argument("model", type=click.Path(exists=True))
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--threads", default=1, show_default=True, help="Threads of one operator.")
def main(model: str, minutes: float, seed: int, threads: int) -> None:
    returning()
    loaded = Model.load(model, threads=threads)
    requests, small = pool(loaded, 300, seed), tiny(loaded, 100, seed)
    click.echo(f"{len(requests)} requests of {len({r.kind for r in requests})} kinds have been computed alone")
    mixed, end = Tally(), time.monotonic() + 60 * minutes
    meter = Meter(mixed, 60.0)

    def more(quiet: bool) -> bool:
        if quiet:  # otherwise memory includes the running requests
            meter.sample()
        return time.monotonic() < end and not mixed.lost

    asyncio.run(soak(loaded, requests, seed, mixed, more))
    meter.sample(at_once=True)
    click.echo("generate_batch")
    batched = Tally()
    meter = Meter(batched, 5.0)
    batch(loaded, small, 10_000, batched, meter.sample)
    meter.sample(at_once=True)
    _table(mixed, batched)
    used_bytes = loaded.memory()["used_bytes"]
    wrong = [*mixed.wrong, *batched.wrong][:20]
    wrong += [f"{mixed.lost} requests were lost"] if mixed.lost else []
    wrong += [f"{used_bytes} bytes are still in use"] if used_bytes else []
    wrong += [
        f"resident memory grew to {t.growth:.1%} of what it was" for t in (mixed, batched) if t.growth > MOST_GROWTH
    ]
    for line in wrong:
        click.echo(line, err=True)
    sys.exit(1 if wrong else 0)


def _table(mixed: Tally, batched: Tally) -> None:
    table = Table("", "results", "streams", "cancelled", "late", title="equal to the same request alone")
    for tally in (mixed, batched):
        counts = (tally.done, tally.streamed, tally.cancelled, tally.late)
        for kind in sorted(set().union(*counts)):
            table.add_row(kind, *(f"{count[kind]:,}" for count in counts))
        table.add_section()
        grown = f"{tally.resident[0] / 1e6:.1f} → {tally.resident[-1] / 1e6:.1f} MB" if tally.resident else ""
        table.add_row(f"{len(tally.wrong)} wrong, {tally.lost} lost", *(f"{c.total():,}" for c in counts))
        table.add_row("resident", grown)
        table.add_section()
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
