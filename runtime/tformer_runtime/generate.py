"""Options and prepared requests in, results out: the loops of search, bound to an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tformer_runtime.beam import BeamRules, beam_search
from tformer_runtime.engine import Engine, State
from tformer_runtime.manifest import ALIGNMENTS, HIDDEN
from tformer_runtime.options import Settings
from tformer_runtime.record import Record, cut_to
from tformer_runtime.requests import own_sizes
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
    alignments: float32 (tokens, source positions): what the step that chose each token attended to. None if not asked
        for.
    hidden: submodule of the source model → its output, (tokens, …) for one of the decoder, at the step that chose each
        token, or (source positions, …) for one of the encoder. Empty if not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    token_logprobs: tuple[float, ...]
    alternatives: tuple[Result, ...] = ()
    alignments: Array | None = field(default=None, compare=False, repr=False)
    hidden: Mapping[str, Array] = field(default_factory=dict, compare=False, repr=False)


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
    """The engine and a state, as search wants them, and a record of what is asked for beside logits."""

    def __init__(self, engine: Engine, requests: Sequence[Request], settings: Settings, repeat: int = 1) -> None:
        names = requests[0].sources
        sources = {name: [r.sources[name] for r in requests] for name in names} or None
        asked = {ALIGNMENTS: settings.alignments, HIDDEN: settings.hidden}
        self.engine, self._requests = engine, requests
        self._extras = {extra.name: extra for extra in engine.manifest.extras if asked.get(extra.kind)}
        self._state: State = engine.start(sources, len(requests), repeat, tuple(self._extras))
        self._record = Record()

    def step(self, tokens: Ints, counts: Ints | None = None) -> Floats:
        logits = self.engine.step(self._state, tokens, counts)
        if self._extras:
            self._record.add(self._state.extras)
        return logits

    def reorder(self, rows: Ints) -> None:
        self.engine.reorder(self._state, rows)
        self._record.moved(rows)

    def beside(self, result: Result, request: int, place: int) -> Result:
        """The result with what was asked for besides; place: the row whose logits gave its last token."""
        if not self._extras:
            return result
        given = self._record.trail(len(result.token_ids), place)
        given |= {name: values[request] for name, values in self._state.encoded.items()}
        encode = self.engine.manifest.encode
        sizes = own_sizes(encode.inputs, self._requests[request].sources) if encode else {}
        for name, value in given.items():
            # A row of encode has no batch axis any more, a trail has the tokens in the place of it and of one position.
            shape = self._extras[name].shape
            given[name] = cut_to(sizes, shape[-value.ndim :], value)
        hidden = {extra.module: given[name] for name, extra in self._extras.items() if extra.kind == HIDDEN}
        return replace(result, alignments=given.get(ALIGNMENTS), hidden=hidden)


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

    for _ in _tokens(EngineStepper(engine, [request], settings), [request], settings, stopped):
        if piece := "".join(pieces):
            yield piece
        pieces.clear()
    if piece := text.finish():
        yield piece


def _tokens(
    stepper: EngineStepper, requests: Sequence[Request], settings: Settings, stopped: Stopped | None
) -> Iterator[Token]:
    """Greedy or sampling: num_return rows for each request, next to each other."""
    copies = settings.num_return
    choose: Chooser = greedy
    if settings.sampling:
        keys = [(r.index, copy) for r in requests for copy in range(copies)]
        choose = Sampler(keys, settings.seed, settings.temperature, settings.top_k, settings.top_p)
    prompts = [r.prompt for r in requests for _ in range(copies)]
    most = [r.most for r in requests for _ in range(copies)]
    limits = Limits(stepper.engine.manifest.special.end, most, settings.min_new_tokens, stopped)
    return follow(stepper, prompts, choose, limits)


def _rows(engine: Engine, codec: Codec | None, requests: Sequence[Request], settings: Settings) -> list[Result]:
    count = len(requests) * settings.num_return
    texts = [Detokenizer(codec, settings.stop) for _ in range(count)] if codec and settings.stop else []

    def stopped(row: int, ids: Sequence[int]) -> bool:
        texts[row].push(ids[-1])
        return texts[row].stopped

    tokens: list[list[Token]] = [[] for _ in range(count)]
    stepper = EngineStepper(engine, requests, settings, settings.num_return)
    for token in _tokens(stepper, requests, settings, stopped if texts else None):
        tokens[token.row].append(token)
    results = []
    for number, row in enumerate(tokens):
        ids, logprobs = tuple(t.id for t in row), tuple(t.logprob for t in row)
        score = sum(logprobs) / len(row) ** settings.length_penalty
        result = _result(codec, settings, ids, logprobs, score, row[-1].finish or "length")
        results.append(stepper.beside(result, number // settings.num_return, row[-1].place))
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
    stepper = EngineStepper(engine, requests, settings)
    found = beam_search(stepper, [r.prompt for r in requests], rules, limits)
    return [
        [
            stepper.beside(_result(codec, settings, h.ids, h.logprobs, h.score, h.finish), request, h.place)
            for h in group[: settings.num_return]
        ]
        for request, group in enumerate(found)
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
