"""Seeded requests of every shape, drawn from the manifest alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tformer_export.verify.golden.values import MAX_STORED_INPUT, Json, encode_array, pattern
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import ADAPTER_INPUT, BASE_ADAPTER, Manifest, RequestInput
from tformer_runtime.preprocess.series import SeriesPreprocessor

FEW_IDS = 2  # of whole numbers of which the manifest does not say how many there are


@dataclass(frozen=True)
class DrawnCase:
    """Rows that run together.

    rows: inputs by name, as JSON, without a batch axis; and for a model that decodes its tokens.
    prompts: the number of tokens of each row's prompt.
    steps: the numbers of new tokens of the calls after the prompts.
    """

    name: str
    rows: list[Json]
    prompts: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def to_json(self) -> Json:
        decodes = {"prompts": self.prompts, "steps": self.steps} if self.prompts else {}
        return {"name": self.name, "rows": self.rows, **decodes}


class ManifestDraws:
    """Draws requests for a file."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.manifest: Manifest = engine.manifest
        self.random = np.random.default_rng(seed)
        self.series = SeriesPreprocessor.of(engine.manifest)
        self._sizes = [Tokenizer.from_str(text).get_vocab_size() for text in self.manifest.tokenizers]
        self._requests = 0

    def decode_cases(self) -> list[DrawnCase]:
        """Return one row, ragged rows, a long prompt, several new tokens after a prompt, and a row for each adapter."""
        longest = self.manifest.max_length
        cases = [
            self._case("one row", (1,), (1, 1, 1), (4,), longest),
            self._case("ragged rows", (2, 7, 1, 4), (1, 1, 1), (6, 11, 2, 8), longest),
            self._case("a long prompt", (64,), (1, 1), (48,), longest),
            self._case("several new tokens", (3,), (4, 1, 2), (5,), longest),
        ]
        adapters = len(self.manifest.adapters) + 1
        if adapters > 1:
            cases.append(self._case("a row for each adapter", (3,) * adapters, (1, 1), (5,) * adapters, longest))
        return cases

    def output_cases(self) -> list[DrawnCase]:
        """Return cases of a single-pass model: one row, and rows of several lengths."""
        rows = 4 if not self.manifest.adapters else len(self.manifest.adapters) + 1
        lengths = [(6, 11, 2, 8)[row % 4] for row in range(rows)]
        return [
            DrawnCase("one row", [self.request(4)]),
            DrawnCase("rows of several lengths", [self.request(length) for length in lengths]),
        ]

    def generation_cases(self) -> list[Json]:
        """Return inputs of generation: a longer and a shorter one, each with a prompt if the file takes one."""
        cases = []
        for length in (6, 3):
            inputs = self.inputs(length)
            if self.manifest.takes_prompt:
                assert self.manifest.decode is not None
                prompt = self.tokens(min(length, max(1, self.manifest.max_length // 2)))
                inputs[self.manifest.decode.step.name] = encode_array(prompt)
            cases.append({"inputs": inputs})
        return cases

    def _case(
        self, name: str, prompts: Sequence[int], steps: Sequence[int], sources: Sequence[int], longest: int
    ) -> DrawnCase:
        """Draw the rows of a case, shortened to what the file holds."""
        steps = list(steps)
        while sum(steps) > max(1, (longest - 1) // 2):
            steps.pop()
        steps = steps or [1]
        places = self._placeholder_positions
        items = [(row + 1) % 2 for row in range(len(prompts))] if places and places < longest - sum(steps) else []
        prompts = [max(1, min(n, longest - sum(steps) - (items[row] if items else 0) * places))
                   for row, n in enumerate(prompts)]  # fmt: skip
        if self.series is not None and not self.series.ragged:
            sources = [sources[0]] * len(sources)
        rows, lengths = [], []
        for row, (prompt, source) in enumerate(zip(prompts, sources, strict=True)):
            count = items[row] if items else 0
            tokens = self.tokens(prompt + sum(steps))
            if count:
                (placeholder,) = self.manifest.placeholders.values()
                block = np.full(places, placeholder.token_id, tokens.dtype)
                start = min(len(self.manifest.special_tokens.bos_token_ids), prompt)
                tokens = np.concatenate([tokens[:start], block, tokens[start:]])
            rows.append({"inputs": self.inputs(source, count), "tokens": encode_array(tokens)})
            lengths.append(prompt + count * places)
        return DrawnCase(name, rows, lengths, steps)

    @property
    def _placeholder_positions(self) -> int:
        return sum(placeholder.positions for placeholder in self.manifest.placeholders.values())

    def tokens(self, length: int) -> np.ndarray:
        """Return tokens of the step input that begin as decoding does; numbers (length, features) of a series."""
        decode, special = self.manifest.decode, self.manifest.special_tokens
        assert decode is not None
        if decode.features:
            return self.random.standard_normal((length, *decode.features)).astype(np.float32)
        size = int(decode.logits.shape[-1]) if decode.vocabulary is None else decode.vocabulary
        left_out = [decode.hidden_id, special.pad_token_id, *(p.token_id for p in self.manifest.placeholders.values())]
        ids = np.setdiff1d(np.arange(size), [i for i in left_out if i is not None])
        drawn = self.random.choice(ids if len(ids) else np.arange(size), length)
        start = special.bos_token_ids[:length]
        drawn[: len(start)] = start
        return drawn.astype(np.int64)

    def request(self, length: int) -> Json:
        return {"inputs": self.inputs(length)}

    def inputs(self, length: int, items: int = 0) -> dict[str, Json]:
        """Return the inputs of a request, by name. items: of an input whose items have placeholders."""
        encode = self.manifest.encode
        sizes = {
            rule.of: rule.minimum + rule.stride * length for rule in (encode.derived_lengths if encode else {}).values()
        }
        drawn: dict[str, Json] = {}
        for spec in encode.inputs if encode else ():
            if spec.role == "mask":
                continue
            shape = [self._size(axis, spec, place, length, sizes) for place, axis in enumerate(spec.shape[1:])]
            if spec.name in self.manifest.placeholders:
                shape[0] = items
            drawn[spec.name] = self._values(spec, shape)
        if self.manifest.adapters:
            self._requests += 1
            drawn[ADAPTER_INPUT] = encode_array(np.array(self._requests % (len(self.manifest.adapters) + 1)))
        return drawn

    def _size(self, axis: int | str, spec: RequestInput, place: int, length: int, sizes: dict[str, int]) -> int:
        """Return the size of an axis. Axes of one name have one size."""
        if isinstance(axis, int):
            return axis
        if axis not in sizes:
            assert self.manifest.encode is not None
            sizes[axis] = max(length, self.manifest.encode.min_lengths.get(axis, 1))
        if place == 0:
            limits = [other.max_length for other in self._no_shorter(axis) if other.max_length is not None]
            sizes[axis] = min([sizes[axis], *limits])
        if self.series is not None and spec.name == self.series.input and place == 0:
            most = self.series.max_context_length or sizes[axis]
            sizes[axis] = max(self.series.min_context_length, min(sizes[axis], most))
        return sizes[axis]

    def _no_shorter(self, axis: str) -> list[RequestInput]:
        """Return the inputs that have an axis in front, or one of those that may not be shorter."""
        assert self.manifest.encode is not None
        axes = {axis, *self.manifest.encode.no_longer_than.get(axis, ())}
        return [spec for spec in self.manifest.encode.inputs if spec.shape[1:2] and spec.shape[1] in axes]

    def _values(self, spec: RequestInput, shape: Sequence[int]) -> Json:
        dtype = np.dtype(spec.dtype)
        if dtype.kind == "f":
            count = int(np.prod(shape))
            if count > MAX_STORED_INPUT:
                seed = int(self.random.integers(2**31))
                return encode_array(pattern(seed, shape).astype(dtype), seed)
            return encode_array(self.random.standard_normal(shape).astype(dtype))
        if dtype.kind == "b":
            return encode_array(self.random.integers(0, 2, shape).astype(dtype))
        at = self.manifest.tokenizer_of.get(spec.name)
        size = spec.vocabulary or (FEW_IDS if at is None else self._sizes[at])
        size = min(size, FEW_IDS) if spec.role == "types" else size
        ids = np.arange(size)
        ids = ids[ids != spec.pad] if spec.role == "ids" and size > 1 else ids
        return encode_array(self.random.choice(ids, shape).astype(dtype))


def adapter_name(manifest: Manifest, inputs: Mapping[str, Any]) -> str | None:
    """Return the name of the adapter that the inputs of a request choose."""
    if ADAPTER_INPUT not in inputs:
        return None
    return str((BASE_ADAPTER, *manifest.adapters)[inputs[ADAPTER_INPUT]["values"][0]])
