"""A request that is ready to run, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import numpy as np
from msgspec import Struct, field

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.sequence import Alternatives, FinishReason
from tformer_runtime.engine.state import State
from tformer_runtime.format.manifest import BASE_ADAPTER, Manifest
from tformer_runtime.preprocess.inputs import Input, Inputs


class Timing(Struct, frozen=True):
    """Seconds of one request.

    first_token: from the call to the first token.
    per_token: from the first token on, for each further token.
    """

    first_token: float
    per_token: float


class Speculation(Struct, frozen=True):
    """Tokens that were guessed, and the number of guesses that came true. Each of these saves a step of the model."""

    guessed: int
    accepted: int


class Result(Struct, frozen=True):
    """The generated text of one input.

    text: the text of the tokens, without the end token and up to a stop string; empty if the file has no tokenizer.
        Ids for which the tokenizer has no token add nothing to it, as in transformers.
    token_ids: every id, with the forced prefix, and with the end token if it was generated.
    score: Σ log-probability / length ** length_penalty of the ids after the prefix. Beam search sums the
        log-probabilities after rules and penalties.
    finish_reason: "end" (an end token), "length" (no more tokens allowed) or "stop" (a stop string; or a constrained
        text is complete, and the model has no end token).
    token_logprobs: the natural logarithm of the model's probability of each id; options do not change it.
    top_logprobs: the likeliest ids at each position with their log-probabilities, if the options ask for them.
    alternatives: the other results if num_return_sequences is more than 1: the next best hypotheses, or the other
        samples.
    cross_attentions: float32 (tokens, source positions): the attention weights of the step that chose each token. None
        if the options do not ask for them.
    hidden_states: submodule of the source model → its output. The output of a decoder's submodule is (tokens, …), at
        the step that chose each token, and the output of an encoder's submodule is (source positions, …). Empty if the
        options do not ask for them.
    timing: of the request; the same for all alternatives.
    speculation: None without speculation.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    token_logprobs: tuple[float, ...]
    alternatives: tuple[Result, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    cross_attentions: Array | None = None
    hidden_states: Mapping[str, Array] = field(default_factory=dict)
    timing: Timing | None = None
    speculation: Speculation | None = None

    # Arrays and times are not compared, and they would fill the screen.

    def __eq__(self, other: object) -> bool:
        return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(_compared(self))

    def __repr__(self) -> str:
        return f"Result({', '.join(f'{name}={getattr(self, name)!r}' for name in _COMPARED)})"


_COMPARED = Result.__struct_fields__[: Result.__struct_fields__.index("cross_attentions")]
_compared = attrgetter(*_COMPARED)


class PromptPrefix(Struct, frozen=True):
    """Ids that were read before a request, and the state of one row that has read them."""

    state: State
    token_ids: Ints


class Request(Struct, frozen=True):
    """One input, ready to run.

    index: its place in the list of inputs.
    sources: request input → its ids or features; also ADAPTER_INPUT in a file with adapters.
    prompt: the first ids of the step input, with the ids of `cached_prefix`.
    max_tokens: the maximum number of tokens to generate.
    prefix_tokens: the number of last ids of the prompt with which the result begins.
    """

    index: int
    sources: Mapping[str, Array]
    prompt: Ints
    max_tokens: int
    prefix_tokens: int = 0
    cached_prefix: PromptPrefix | None = None

    @property
    def prefix(self) -> list[int]:
        """The ids with which the result begins."""
        return [int(i) for i in self.prompt[len(self.prompt) - self.prefix_tokens :]]


def make_request(
    manifest: Manifest,
    inputs: Inputs,
    input: Input,
    index: int,
    settings: Settings,
    cached_prefix: PromptPrefix | None = None,
) -> Request:
    """Return the request of an input.

    Raise InputError for an impossible input, OptionError for an adapter that the file does not have or that is not the
    one of the cached prefix.

    index: the place of the input in the list of inputs.
    cached_prefix: ids that were read before the input.
    """
    sources, prompt, _ = inputs.generation_inputs(input, starts_prompt=cached_prefix is None)
    if cached_prefix is not None:
        if any(len(items) for items in sources.values()):
            raise InputError(
                f"{', '.join(sources)} cannot follow a cached prefix, whose images are read at once: put them "
                "into the prefix, or leave the prefix out"
            )
        prompt = np.concatenate([cached_prefix.token_ids, prompt])
    if not len(prompt):
        raise InputError(
            "the file names no token to start from: export the model with special_tokens={'bos_token_id': id, …}"
        )
    sources |= manifest.adapter_input(settings.adapter)
    if cached_prefix is not None:
        _check_same_adapter(manifest, cached_prefix, manifest.adapter_number(settings.adapter))
    prefix = _forced_prefix(inputs, settings)
    bos = (
        [settings.forced_bos_token_id] if settings.forced_bos_token_id is not None and len(prefix) else []
    )  # without a prefix, a rule forces the id
    prompt = np.concatenate([prompt, bos, prefix]).astype(np.int64)
    max_length = manifest.max_length
    if len(prompt) >= max_length:
        with_prefix = f", with the {len(cached_prefix.token_ids)} before it," if cached_prefix is not None else ""
        raise InputError(
            f"the input{with_prefix} is {len(prompt)} tokens long and the model holds {max_length}, what it "
            f"generates included"
        )
    max_tokens = max_length - len(prompt)
    if settings.max_new_tokens is not None:
        max_tokens = min(max_tokens, settings.max_new_tokens)
    return Request(index, sources, prompt, max_tokens, len(bos) + len(prefix), cached_prefix)


def _check_same_adapter(manifest: Manifest, prefix: PromptPrefix, number: int) -> None:
    """Raise OptionError for a prefix that was read with another adapter: its cache holds other keys and values."""
    if prefix.state.adapters is not None and prefix.state.adapters[0] != number:
        names = (BASE_ADAPTER, *manifest.adapters)
        own, asked = names[prefix.state.adapters[0]], names[number]
        raise OptionError(
            f"the prefix was read with the adapter {own!r}, and the request has {asked!r}: read it with "
            f"cache_prefix(…, adapter={asked!r})",
            option="adapter",
        )


def _forced_prefix(inputs: Inputs, settings: Settings) -> Ints:
    """Return the ids with which a result must begin."""
    if not settings.forced_prefix:
        return np.zeros(0, np.int64)
    prefix = settings.forced_prefix
    return inputs.ids(inputs.step, prefix if isinstance(prefix, str) else list(prefix), add_special_tokens=False)
