"""Generation for the routes: opens requests of a model under the limits of the server.

Constraints have a size and are compiled in a thread of their own, and a request has no more rows than a batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tformer_runtime.async_model import OpenRequest
from tformer_runtime.base.errors import OptionError
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.decoding.request import Result
from tformer_runtime.decoding.streaming import Piece
from tformer_runtime.preprocess.inputs import Input
from tformer_serve.metrics import Metrics
from tformer_serve.registry import ServedModel
from tformer_serve.request_context import RequestContext, on_body, run_limited
from tformer_serve.responses.event_stream import all_of, merged
from tformer_serve.state import ServerState

MAX_CONSTRAINT_BYTES = 64 << 10  # llguidance takes about a second for as much
MAX_TOP_LOGPROBS = 100  # a token has as many pairs of numbers
MAX_STOP_CHARACTERS = 1024  # each token is compared with the beginnings of all stop strings
MAX_IDS = 10_000  # of an option; those of bad_words_ids are compared with each token
_OPTIONS_OF_IDS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "logit_bias")

T = TypeVar("T")


class Generation:
    """A request of a model that runs, whose tokens are counted."""

    def __init__(self, opened: OpenRequest, context: RequestContext, served: ServedModel, metrics: Metrics) -> None:
        self._opened, self._exchange, self._served, self._metrics = opened, context, served, metrics
        self.prompt_tokens = opened.prompt_tokens
        self.completion_tokens = 0
        self._has_ended = False

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the pieces of the results. Raise the error that ended the request."""
        async for piece in self._opened:
            self._count(len(piece.token_ids))
            yield piece
        self._end(await self._opened.result())

    async def result(self) -> Result:
        """Return the whole result, also after its pieces. Raise the error that ended the request."""
        result = await self._opened.result()
        if not self._has_ended:
            tokens = sum(len(one.token_ids) for one in (result, *result.alternatives)) - self.completion_tokens
            self._count(tokens, self._opened.first_token_at)
        self._end(result)
        return result

    def _count(self, tokens: int, first_at: float | None = None) -> None:
        """Count tokens. first_at: when the first token of the request came; None for now."""
        self.completion_tokens += tokens
        self._metrics.add_tokens(self._exchange, self._served.name, tokens, first_at)

    def _end(self, result: Result) -> None:
        if not self._has_ended and result.timing is not None and len(result.token_ids) > 1:
            self._metrics.add_rate(self._served.name, result.timing.per_token)
        self._has_ended = True


async def checked_settings(
    state: ServerState, context: RequestContext, served: ServedModel, options: GenerationOptions
) -> Settings:
    """Return the settings of a request, for any number of inputs. Compile their constraint.

    Raise the errors of `Model.settings`, and OptionError for a request that is too large for a server.
    """
    context.model = served.name
    settings = await on_body(context, _settings, served, options)
    if settings.constraint is not None:  # compiled here, and then in the cache of the runtime
        await run_limited(state.models.constraints, context, served.model.generator.guide, settings)
    return settings


@contextlib.asynccontextmanager
async def open_generation(
    state: ServerState,
    context: RequestContext,
    served: ServedModel,
    input: Input,
    settings: Settings,
    in_pieces: bool,
) -> AsyncIterator[Generation]:
    """Submit a request and yield it. Leaving the block frees its rows at once.

    settings: of `checked_settings`.
    in_pieces: whether it has pieces, besides its result.
    Raise the errors of `AsyncModel.open`.
    """
    async with served.aio.open(input, settings, context.seconds_left(), in_pieces=in_pieces) as opened:
        state.metrics.add_prompt(context, served.name, opened.prompt_tokens)
        yield Generation(opened, context, served, state.metrics)


@dataclass
class Usage:
    """Numbers of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, generation: Generation) -> None:
        self.prompt_tokens += generation.prompt_tokens
        self.completion_tokens += generation.completion_tokens

    def body(self) -> dict[str, int]:
        """Return the numbers as OpenAI's API has them."""
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


async def results_of(
    state: ServerState,
    context: RequestContext,
    served: ServedModel,
    inputs: Sequence[Input],
    options: GenerationOptions,
    usage: Usage,
) -> list[Result]:
    """Return the result of each input. usage: to add the tokens to."""
    settings = await checked_settings(state, context, served, options)

    async def result_of(input: Input) -> Result:
        async with open_generation(state, context, served, input, settings, in_pieces=False) as generation:
            result = await generation.result()
            usage.add(generation)
            return result

    with state.admission.more_places(len(inputs) - 1):
        return await all_of([result_of(input) for input in inputs])


async def pieces_of(
    state: ServerState,
    context: RequestContext,
    served: ServedModel,
    inputs: Sequence[Input],
    options: GenerationOptions,
    usage: Usage,
) -> AsyncGenerator[tuple[int, Piece]]:
    """Yield the pieces of the results of inputs as they come, each with the number of its input. usage: to add to."""
    settings = await checked_settings(state, context, served, options)

    async def pieces(input: Input) -> AsyncGenerator[Piece]:
        async with open_generation(state, context, served, input, settings, in_pieces=True) as generation:
            async for piece in generation.pieces():
                yield piece
            usage.add(generation)

    with state.admission.more_places(len(inputs) - 1):
        async with contextlib.aclosing(merged([pieces(input) for input in inputs])) as all_pieces:
            async for numbered in all_pieces:
                yield numbered


def _settings(served: ServedModel, options: GenerationOptions) -> Settings:
    _check_ids(options)
    settings = served.model.settings(options, {})
    _check_size(settings, served.max_batch_size)
    return settings


def _check_ids(options: GenerationOptions) -> None:
    """Raise OptionError for too many ids of a client. Those of the file may be as many as they are."""
    for name in _OPTIONS_OF_IDS:
        ids = getattr(options, name) or ()
        count = sum(map(len, ids)) if name == "bad_words_ids" else len(ids)
        if count > MAX_IDS:
            raise OptionError(
                f"{name} has {count:,} ids, and this server takes at most {MAX_IDS:,}: leave some out", option=name
            )


def _check_size(settings: Settings, max_rows: int) -> None:
    """Raise OptionError for a request that is too large for a server."""
    if settings.width > max_rows:
        name = "num_beams" if settings.num_beams >= settings.num_return_sequences else "num_return_sequences"
        raise OptionError(f"{name}={settings.width} needs more rows than the {max_rows} of this server", option=name)
    if settings.top_logprobs > MAX_TOP_LOGPROBS:
        raise OptionError(
            f"top_logprobs={settings.top_logprobs} is more than the {MAX_TOP_LOGPROBS} of this server",
            option="top_logprobs",
        )
    stop = sum(map(len, settings.stop_strings))
    if stop > MAX_STOP_CHARACTERS:
        raise OptionError(
            f"stop_strings has {stop:,} characters, and this server takes at most {MAX_STOP_CHARACTERS:,}: shorten it",
            option="stop_strings",
        )
    if settings.constraint is not None:
        kind, definition = settings.constraint
        parts = [definition] if isinstance(definition, str) else definition
        size = sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)
        if size > MAX_CONSTRAINT_BYTES:
            raise OptionError(
                f"{kind} has {size:,} bytes, and this server compiles at most {MAX_CONSTRAINT_BYTES:,}: shorten it",
                option=kind,
            )
