"""Fill-mask: what may stand where a text has a mask, by the scores that the model gives each token of its vocabulary,
as transformers' pipeline does.

p = softmax(z)    over the whole vocabulary, at each mask by itself; so also where `targets` are all that is asked for
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError, UnsupportedCallError
from tformer_runtime.base.validation import refused, whole
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.text_reader import Reader
from tformer_runtime.tasks.base import Outputs, Reading, Task
from tformer_runtime.tasks.settings import Flag

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

MASK = "mask"  # of the outcome's settings: its id
USUAL = ("[MASK]", "<mask>")  # how the vocabulary calls it, where the file does not tell its id
TOP_K = 5


@dataclass(frozen=True)
class Candidate:
    """token: what the vocabulary's entry `id` is as text. score: its probability. text: the whole, with it."""

    token: str
    id: int
    score: float
    text: str


Filled = tuple[tuple[Candidate, ...], ...]  # of each mask, the likeliest first


class Filling(Task):
    names = ("fill-mask",)
    does = "fills in masks"
    call = "fill()"
    of_texts = True
    flags = {  # noqa: RUF012
        "Masks": {
            "top_k": Flag("--top-k", "N", "Write the N likeliest tokens; by default 5.", int),
            "targets": Flag("--target", "TOKEN", "Choose among these; repeat it for each.", list, repeated=True),
        }
    }
    batch_size = 8  # for a score is computed for each token of the vocabulary at each position

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._reader = Reader(manifest.tokenizers[next(iter(manifest.tokenizer_of.values()))])

    @cached_property
    def mask(self) -> int:
        """Its id."""
        held = self.outcome.settings.get(MASK)
        found = [held] if held is not None else [i for name in USUAL if (i := self._reader.id_of(name)) is not None]
        if not found:
            raise UnsupportedCallError(f"the file's tokenizer has no mask: none of its tokens is {' or '.join(USUAL)}")
        return int(found[0])

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """targets: tokens, as text or as the vocabulary calls them, or ids; one, or several of them."""
        given = {name: value for name, value in given.items() if value is not None}
        top, targets = given.pop("top_k", TOP_K), given.pop("targets", None)
        super().settings(given)
        if targets is not None:
            if isinstance(targets, (str, Integral)):
                targets = [targets]
            if not isinstance(targets, Iterable) or isinstance(targets, bytes):
                raise refused("targets", "tokens, as texts or ids", targets)
            targets = list(dict.fromkeys(map(self._target, targets)))
            if not targets:
                raise OptionError("targets names no token: give one, or leave it out")
        return {"top_k": whole("top_k", top), "targets": targets}

    def _target(self, target: Any) -> int:
        """Its id. OptionError for what is no token, for another would answer another question."""
        found = self._id(target)
        if not 0 <= found < self._vocabulary:
            raise OptionError(f"the target {found} is not in the model's vocabulary, which has {self._vocabulary} ids")
        return found

    def _id(self, target: Any) -> int:
        if isinstance(target, Integral) and not isinstance(target, bool):
            return int(target)
        if not isinstance(target, str):
            raise refused("each of targets", "a text or an id", target)
        known = self._reader.id_of(target)
        if known is not None:
            return known
        ids = self._reader.ids(target)
        if len(ids) != 1 or ids[0] == self._reader.unknown:
            parts = " ".join(self._reader.token(i) for i in ids)
            raise OptionError(
                f"the target {target!r} is not one token of the model's vocabulary, but {parts or 'none'}"
            )
        return ids[0]

    @property
    def _vocabulary(self) -> int:
        """How many ids the model gives scores of."""
        assert self.manifest.encode is not None
        size = self.manifest.encode.outputs[0].shape[-1]
        return size if isinstance(size, int) else self._reader.size

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        if not isinstance(text, str):
            return None
        mask = self._reader.token(self.mask)
        return f"{mask} {text}" if len(text) % 2 else f"{mask} {text} {mask}"  # the first of which is not cut

    def reading(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> Reading:
        request = inputs.once(input, truncate)
        ids = next(request[spec.name] for spec in self._specs if spec.role == "ids")
        if not (ids == self.mask).any():
            cut = ", or what was cut had it" if truncate else ""
            raise InputError(f"the input has no mask: write {self._reader.token(self.mask)} where it belongs{cut}")
        return Reading([request], ids)

    @property
    def _specs(self) -> Sequence[Any]:
        assert self.manifest.encode is not None
        return self.manifest.encode.inputs

    def keep(self, outputs: Outputs, request: Mapping[str, Array]) -> Outputs:
        """The scores of the masks alone: all positions' would be a hundred times as many."""
        ids = next(request[spec.name] for spec in self._specs if spec.role == "ids")
        return [outputs[0][ids == self.mask]]

    def made(self, reading: Reading, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Filled:
        ids, ((logits, *_), *_) = reading.beside, outputs
        places = np.flatnonzero(ids == self.mask)
        return tuple(
            tuple(self._candidates(ids, int(place), row, settings, several=len(places) > 1))
            for place, row in zip(places, np.asarray(logits, np.float64), strict=True)
        )

    def _candidates(
        self, ids: Array, place: int, logits: Array, settings: Mapping[str, Any], several: bool
    ) -> Iterable[Candidate]:
        """several: whether there are other masks, which the whole text then shows."""
        powers = np.exp(logits - logits.max())
        scores = powers / powers.sum()
        targets = settings["targets"]
        among = np.arange(len(scores)) if targets is None else np.array(targets)
        most = min(settings["top_k"], len(among))
        likely = among[np.argpartition(-scores[among], most - 1)[:most]]
        for token in sorted(map(int, likely), key=lambda token: -scores[token]):
            filled = ids.copy()
            filled[place] = token
            text = self._reader.text(filled, special=several)
            yield Candidate(self._reader.text([token], special=True), token, float(scores[token]), text)

    def numbers(self, result: Filled) -> Array:
        return np.array([[candidate.score for candidate in mask] for mask in result])

    def line(self, result: Filled) -> str:
        """Of each mask its tokens and their probabilities, with a bar between masks."""
        masks = ("\t".join(f"{c.token.strip()}\t{c.score:.6g}" for c in candidates) for candidates in result)
        return "\t|\t".join(masks)

    def fields(self, result: Filled) -> dict[str, Any]:
        return {"masks": [[asdict(candidate) for candidate in candidates] for candidates in result]}
