"""Random requests for a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tformer_export.analysis.input_facts import InputFacts
from tformer_export.common.example_sizes import in_order
from tformer_export.sources import Source
from tformer_export.verify.report import TOLERANCE
from tformer_export.verify.torch_reference import Reference
from tformer_runtime.format.manifest import ADAPTER_INPUT
from tformer_runtime.preprocess.series import SeriesPreprocessor

MAX_LONGER = 64  # the length of an input up to which another one may be longer


class InputDraws:
    """Draws random inputs. Padding is never among the ids.

    inputs: the facts that bound the draws.
    tolerance: the allowed error of a file, over the range of the compared values.
    """

    def __init__(
        self,
        source: Source,
        inputs: Mapping[str, InputFacts],
        seed: int = 0,
        gives_last: bool = False,
        tolerance: float = TOLERANCE,
        series: SeriesPreprocessor | None = None,
    ) -> None:
        self.source, self.inputs, self.tolerance, self.series = source, inputs, tolerance, series
        self.reference = Reference(source, gives_last)
        self.random = np.random.default_rng(seed)
        self._requests = 0  # drawn so far: each has the adapter after that of the request before it

    @property
    def hidden(self) -> list[int]:
        """Return the ids that are not decoded.

        The model would not see padding among decoded tokens, and has no embedding for further placeholders.
        """
        facts = self.inputs[self.source.step_input or ""]
        if facts.ids is None:
            return []
        is_padded = facts.masked and facts.pad not in self.source.special_tokens.bos_token_ids
        return [*([facts.pad] if is_padded else []), *self._placeholder_ids]

    @property
    def _placeholder_ids(self) -> list[int]:
        return [placeholder.token_id for placeholder in self.source.placeholders.values()]

    def start(self, max_length: int) -> np.ndarray:
        """Return the tokens with which decoding begins: the special tokens, or a prompt if there are none."""
        if self.source.special_tokens.bos_token_ids:
            return np.array(self.source.special_tokens.bos_token_ids, np.int64)
        return self.draw(self.source.step_input, min(3, max_length - 1))

    def draw_sequence(self, length: int) -> np.ndarray:
        """Return ids of the step input that begin as decoding does, or steps of a series."""
        drawn = self.draw(self.source.step_input, length)
        start = self.source.special_tokens.bos_token_ids[:length]
        if start:
            drawn[: len(start)] = start
        return drawn

    def draw(self, name: str | None, length: int) -> np.ndarray:
        """Return random ids of an input without padding, or numbers, (length, …)."""
        facts, example = self.inputs[name or ""], self.source.example[name or ""]
        if facts.ids is None:
            return self._numbers(example.numpy(), length)
        ids = np.arange(facts.ids or 0)
        if len(ids) > 1 and name not in self.source.token_types:  # padding is an id like others if it is the only one
            ids = ids[ids != facts.pad]
        ids = np.setdiff1d(ids, self._placeholder_ids) if name == self.source.step_input else ids
        return self.random.choice(ids, (length, *example.shape[2:])).astype(example.numpy().dtype)

    def _numbers(self, example: np.ndarray, length: int) -> np.ndarray:
        """Return normal numbers (length, …); whole ones from the example's range if it has several, and no others.

        Whole numbers may be the ids of a table, such as months, which has rows for the range alone.
        """
        whole = np.array_equal(example, np.round(example)) and len(np.unique(example)) > 1
        if not whole:
            return self.random.standard_normal((length, *example.shape[2:])).astype(example.dtype)
        rows = example.reshape(-1, *example.shape[2:])
        return self.random.integers(rows.min(0), rows.max(0) + 1, (length, *example.shape[2:])).astype(example.dtype)

    def draw_requests(self, lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return a request for each length; of one length if histories of a series run together only so."""
        if self.series is not None and not self.series.ragged:
            lengths = [lengths[0]] * len(lengths)
        return [self.draw_request(length) for length in lengths]

    def draw_prompt(self, request_length: int, length: int, items: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return a request and ids of the step input that begin as decoding does.

        length: of the ids without placeholders. items: of each request input with placeholders; all the placeholders of
            an item stand together, at a random place.
        """
        request, tokens = self.draw_request(request_length, items), self.draw_sequence(length)
        start = len(self.source.special_tokens.bos_token_ids)
        for placeholder in self.source.placeholders.values():
            places = np.sort(self.random.integers(min(start, length), length + 1, items))
            block = np.full(placeholder.positions, placeholder.token_id)
            parts = np.split(tokens, places)
            tokens = np.concatenate([part for i, ids in enumerate(parts) for part in ((block, ids) if i else (ids,))])
        return request, tokens

    def draw_starts(
        self, lengths: Sequence[int], max_length: int
    ) -> tuple[list[dict[str, np.ndarray]], list[np.ndarray]]:
        """Return a request of each length, and the tokens with which its decoding begins, equally many for all.

        max_length: of a sequence. Requests whose items have placeholders have one item, if it fits.
        """
        starts = [self.start(max_length) for _ in lengths]
        if not self.source.placeholders:
            return [self.draw_request(length) for length in lengths], starts
        items = int(len(starts[0]) + self._positions_of_items < max_length)
        prompts = [self.draw_prompt(n, len(start), items) for n, start in zip(lengths, starts, strict=True)]
        return [request for request, _ in prompts], [tokens for _, tokens in prompts]

    def draw_long_sequence(self, request_length: int, length: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return a request and a sequence of this length; with one item if the request's items have placeholders."""
        if not self.source.placeholders:
            tokens = self.draw_sequence(length)
            return self.draw_request(request_length), tokens
        items = int(self._positions_of_items < length)
        return self.draw_prompt(request_length, length - items * self._positions_of_items, items)

    @property
    def _positions_of_items(self) -> int:
        """The positions of one item of each input whose items have placeholders."""
        return sum(placeholder.positions for placeholder in self.source.placeholders.values())

    def draw_request(self, length: int, items: int = 0) -> dict[str, np.ndarray]:
        """Return one row of each request input, without its batch axis, of this length or the maximum length.

        items: the number of items of an input whose items have placeholders.
        """
        drawn: dict[str, np.ndarray] = {}
        sizes: dict[str, int] = {}
        lengths: dict[int | None, int] = {}  # length in the trace → length here
        for name, value in self.source.example.items():
            if name == self.source.step_input or name in self.source.masks:
                continue
            if name == ADAPTER_INPUT:
                self._requests += 1
                drawn[name] = np.array(self._requests % (len(self.source.adapters) + 1))
                continue
            facts, axes = self.inputs[name], self.source.axes.get(name, (0, 1))
            longest, own = self._longest(facts) if 1 in axes else value.shape[1], length
            if 1 in axes and self.series is None:  # the runtime makes the inputs of a series of one history
                own = lengths.setdefault(facts.traced_length, _other_length(length, len(lengths)))
            is_padded = any(mask.of == name for mask in self.source.masks.values())
            size = min(own, longest or own) if 1 in axes or is_padded else value.shape[1]
            size = max(size, facts.min_length)
            if name in self.source.min_lengths and 1 in axes:  # half of the model's minimum for each position
                size = max(self.source.min_lengths[name], self.source.min_lengths[name] * own // 2)
                size = min(size, longest or size)
            size = items if name in self.source.placeholders else size
            if self.series is not None and name == self.series.input:
                size = max(self.series.min_context_length, min(size, self.series.max_context_length or size))
            sizes[name] = size
        order = ((name, other) for name in sizes for other in self.inputs[name].no_longer_than)
        return drawn | {name: self.draw(name, size) for name, size in in_order(sizes, order).items()}

    def _longest(self, facts: InputFacts) -> int | None:
        """Return the maximum length of an input and of those whose lengths have to equal its own; None for no limit."""
        equal = [other for other in self.inputs.values() if other.traced_length == facts.traced_length]
        return min((other.max_length for other in equal if other.max_length is not None), default=None)


def _other_length(length: int, number: int) -> int:
    """Return the length of one of the inputs whose lengths are free of each other, by its number from 0.

    That of the first is `length`. Those of others are shorter in some rows and longer in others, and equal for rows of
    one length, which may run together.
    """
    if number == 0:
        return length
    return max(1, length // 2 - number + 1) if length % 2 or length > MAX_LONGER else length + 2 * number + 1
