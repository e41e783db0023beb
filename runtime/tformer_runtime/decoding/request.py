"""A request, ready to run, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError
from tformer_runtime.decoding.options import Settings
from tformer_runtime.decoding.sequence import Alternatives, FinishReason
from tformer_runtime.engine.state import State
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.inputs import Input, Inputs


@dataclass(frozen=True)
class Timing:
    """Seconds of one request: from when it was given to its first token, and from there for each token more."""

    first_token: float
    per_token: float


@dataclass(frozen=True)
class Speculation:
    """Tokens that were guessed, and how many of them came: so many steps of the model fewer than tokens."""

    guessed: int
    accepted: int


@dataclass(frozen=True)
class Result:
    """What was generated for one input.

    text: the text of the tokens, without the end token and up to a stop string; empty if the file has no tokenizer.
    token_ids: every generated id, a prefix that was asked for and the end token, if it came to that, included.
    score: Σ log-probability / length ** length_penalty of what was generated after the prefix; of beam search, of the
        log-probabilities as rules and penalties left them.
    finish_reason: "end" (an end token), "length" (no more tokens allowed) or "stop" (a stop string; or a constrained
        text is complete, and the model has no end token to say so).
    token_logprobs: the model's natural-log probability of each id; options do not change it.
    top_logprobs: for each id, the likeliest ids at its place and their log-probabilities, if asked for.
    alternatives: the other results if num_return_sequences is more than 1: next best first, or the other samples.
    alignments: float32 (tokens, source positions): what the step that chose each token attended to. None if not asked
        for.
    hidden: submodule of the source model → its output, (tokens, …) for one of the decoder, at the step that chose each
        token, or (source positions, …) for one of the encoder. Empty if not asked for.
    timing: of the request; the same for all of its alternatives.
    speculation: what came of a draft. None if there was none.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    token_logprobs: tuple[float, ...]
    alternatives: tuple[Result, ...] = ()
    top_logprobs: tuple[Alternatives, ...] = ()
    alignments: Array | None = field(default=None, compare=False, repr=False)
    hidden: Mapping[str, Array] = field(default_factory=dict, compare=False, repr=False)
    timing: Timing | None = field(default=None, compare=False, repr=False)
    speculation: Speculation | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Base:
    """What has been read before a request: the state of one row that has, and the ids."""

    state: State
    ids: Ints


@dataclass(frozen=True)
class Request:
    """One input, ready to run. index: its place in the list of inputs. sources: request input → its ids or features.

    prompt: the step input's first ids, those that `base` has read included. most: how many tokens may be generated.
    given: how many of the prompt's last ids are a prefix, which the result begins with.
    """

    index: int
    sources: Mapping[str, Array]
    prompt: Ints
    most: int
    given: int = 0
    base: Base | None = None

    @property
    def prefix(self) -> list[int]:
        """The ids that the result begins with."""
        return [int(i) for i in self.prompt[len(self.prompt) - self.given :]]


def make_request(
    manifest: Manifest, inputs: Inputs, input: Input, index: int, settings: Settings, base: Base | None = None
) -> Request:
    """base: what has been read before the input. InputError tells what is wrong with it."""
    sources, prompt, _ = inputs.parts(input, first=base is None)
    if base is not None:
        prompt = np.concatenate([base.ids, prompt])
    if not len(prompt):
        raise InputError("the file names no token to start from: export the model with special={'start': [id], …}")
    prefix = _prefix(inputs, settings)
    first = (
        [settings.forced_bos_token_id] if settings.forced_bos_token_id is not None and len(prefix) else []
    )  # else it is a rule
    prompt = np.concatenate([prompt, first, prefix]).astype(np.int64)
    held = manifest.max_length
    if len(prompt) >= held:
        so_far = f", with the {len(base.ids)} before it," if base is not None else ""
        raise InputError(
            f"the input{so_far} is {len(prompt)} tokens long and the model holds {held}, what it generates included"
        )
    most = held - len(prompt)
    if settings.max_new_tokens is not None:
        most = min(most, settings.max_new_tokens)
    return Request(index, sources, prompt, most, len(first) + len(prefix), base)


def _prefix(inputs: Inputs, settings: Settings) -> Ints:
    """The ids that a result is to begin with."""
    if not settings.forced_prefix:
        return np.zeros(0, np.int64)
    prefix = settings.forced_prefix
    return inputs.ids(inputs.step, prefix if isinstance(prefix, str) else list(prefix), special=False)
