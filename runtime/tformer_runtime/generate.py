"""Options and prepared requests in, results out: the loops of search, bound to an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tformer_runtime.beam import BeamRules, beam_search
from tformer_runtime.engine import Engine, State
from tformer_runtime.options import Settings
from tformer_runtime.sampling import Chooser, Floats, Ints, Sampler, greedy
from tformer_runtime.search import FinishReason, Limits, Stopped, Token, follow
from tformer_runtime.session import Array
from tformer_runtime.text import Codec, Detokenizer, cut


@dataclass(frozen=True)
class Result:
    """What was generated for one input.

    text: the text of the tokens, without the end token and up to a stop string; empty if the file has no tokenizer.
    token_ids: every generated id, the end token included if it came to that.
    score: Σ token_logprobs / len(token_ids) ** length_penalty.
    finish_reason: "end" (an end token), "length" (no more tokens allowed) or "stop" (a stop string).
    token_logprobs: the model's natural-log probability of each id; sampling options do not change it.
    alternatives: the other results if num_return is more than 1: next best first, or the other samples.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    token_logprobs: tuple[float, ...]
    alternatives: tuple[Result, ...] = ()


@dataclass(frozen=True)
class Request:
    """One input, ready to run. index: its place in the list of inputs. sources: request input → its ids or features.

    prompt: the step input's first ids.  most: how many tokens may be generated.
    """

    index: int
    sources: Mapping[str, Array]
    prompt: Ints
    most: int

    @property
    def size(self) -> int:
        """How many positions are to be computed before the first token: what batches are packed by."""
        return len(self.prompt) + sum(len(array) for array in self.sources.values())


class EngineStepper:
    """The engine and a state, as search wants them."""

    def __init__(self, engine: Engine, requests: Sequence[Request], repeat: int = 1) -> None:
        names = requests[0].sources
        sources = {name: [r.sources[name] for r in requests] for name in names} or None
        self._engine = engine
        self._state: State = engine.start(sources, len(requests), repeat)

    def step(self, tokens: Ints, counts: Ints | None = None) -> Floats:
        return self._engine.step(self._state, tokens, counts)

    def reorder(self, rows: Ints) -> None:
        self._engine.reorder(self._state, rows)


def generate_all(engine: Engine, codec: Codec | None, requests: Sequence[Request], settings: Settings) -> list[Result]:
    """Results of a batch of requests, in their order."""
    if settings.beam_size > 1 and not settings.sampling:
        groups = _beams(engine, codec, requests, settings)
    else:
        copies = settings.num_return
        rows = _rows(engine, codec, requests, settings)
        groups = [rows[i * copies : (i + 1) * copies] for i in range(len(requests))]
    return [replace(group[0], alternatives=tuple(group[1:])) for group in groups]


def generate_stream(engine: Engine, codec: Codec, request: Request, settings: Settings) -> Iterator[str]:
    """Pieces of one request's text as they become certain. Beams are known at their end only: one piece."""
    if settings.beam_size > 1 and not settings.sampling:
        yield generate_all(engine, codec, [request], settings)[0].text
        return
    text = Detokenizer(codec, settings.stop)
    pieces: list[str] = []

    def stopped(row: int, ids: Sequence[int]) -> bool:
        pieces.append(text.push(ids[-1]))
        return text.stopped

    for _ in _tokens(engine, [request], settings, stopped):
        if piece := "".join(pieces):
            yield piece
        pieces.clear()
    if piece := text.finish():
        yield piece


def _tokens(
    engine: Engine, requests: Sequence[Request], settings: Settings, stopped: Stopped | None
) -> Iterator[Token]:
    """Greedy or sampling: num_return rows for each request, next to each other."""
    copies = settings.num_return
    choose: Chooser = greedy
    if settings.sampling:
        keys = [(r.index, copy) for r in requests for copy in range(copies)]
        choose = Sampler(keys, settings.seed, settings.temperature, settings.top_k, settings.top_p)
    prompts = [r.prompt for r in requests for _ in range(copies)]
    most = [r.most for r in requests for _ in range(copies)]
    limits = Limits(engine.manifest.special.end, most, settings.min_new_tokens, stopped)
    return follow(EngineStepper(engine, requests, copies), prompts, choose, limits)


def _rows(engine: Engine, codec: Codec | None, requests: Sequence[Request], settings: Settings) -> list[Result]:
    count = len(requests) * settings.num_return
    texts = [Detokenizer(codec, settings.stop) for _ in range(count)] if codec and settings.stop else []

    def stopped(row: int, ids: Sequence[int]) -> bool:
        texts[row].push(ids[-1])
        return texts[row].stopped

    tokens: list[list[Token]] = [[] for _ in range(count)]
    for token in _tokens(engine, requests, settings, stopped if texts else None):
        tokens[token.row].append(token)
    results = []
    for row in tokens:
        ids, logprobs = tuple(t.id for t in row), tuple(t.logprob for t in row)
        score = sum(logprobs) / len(row) ** settings.length_penalty
        results.append(_result(codec, settings, ids, logprobs, score, row[-1].finish or "length"))
    return results


def _beams(engine: Engine, codec: Codec | None, requests: Sequence[Request], settings: Settings) -> list[list[Result]]:
    rules = BeamRules(settings.beam_size, settings.length_penalty, settings.early_stopping)

    def stopped(row: int, ids: Sequence[int]) -> bool:
        return codec is not None and cut(codec.decode(ids), settings.stop) is not None

    limits = Limits(
        engine.manifest.special.end,
        [r.most for r in requests],
        settings.min_new_tokens,
        stopped if settings.stop else None,
    )
    found = beam_search(EngineStepper(engine, requests), [r.prompt for r in requests], rules, limits)
    return [
        [_result(codec, settings, h.ids, h.logprobs, h.score, h.finish) for h in group[: settings.num_return]]
        for group in found
    ]


def _result(
    codec: Codec | None,
    settings: Settings,
    ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    score: float,
    finish: FinishReason,
) -> Result:
    text = codec.decode(ids[:-1] if finish == "end" else ids) if codec else ""
    before = cut(text, settings.stop)
    if before is not None:
        text, finish = before, "stop"
    return Result(text, ids, float(np.float64(score)), finish, logprobs)
