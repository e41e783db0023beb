"""Fill-mask: the most probable tokens for each mask of a text, as in transformers' pipeline.

p = softmax(z)    over the whole vocabulary, for each mask independently, also if `candidate_tokens` are set
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError, UnsupportedCallError
from tformer_runtime.base.validation import check_int, invalid_value
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.text_reader import TextReader
from tformer_runtime.tasks.base import BaseTask, Outputs, TaskInput
from tformer_runtime.tasks.settings import Flag

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input, Inputs

MASK = "mask"  # setting of the manifest: the id of the mask
DEFAULT_MASK_TOKENS = ("[MASK]", "<mask>")  # for a file without that setting
DEFAULT_TOP_K = 5


class MaskCandidate(Struct, frozen=True):
    """A token for a mask.

    token: the text of the token.
    id: its id.
    score: its probability.
    text: the whole text with the token in place of the mask.
    """

    token: str
    id: int
    score: float
    text: str


Filled = tuple[tuple[MaskCandidate, ...], ...]  # for each mask, the most probable candidate first


class FillMask(BaseTask):
    names = ("fill-mask",)
    does = "fills in masks"
    call = "fill()"
    file_settings = {MASK: int}  # noqa: RUF012
    needs_tokenizer = True
    flags = {  # noqa: RUF012
        "Masks": {
            "top_k": Flag("--top-k", "N", f"Write the N likeliest tokens.  [default: {DEFAULT_TOP_K}]", int),
            "candidate_tokens": Flag(
                "--candidate-tokens", "TOKEN", "Choose among these tokens only; repeatable.", list, repeated=True
            ),
        }
    }
    batch_size = 8  # outputs are large: a score per position and token of the vocabulary

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._reader = TextReader(manifest.tokenizers[next(iter(manifest.tokenizer_of.values()))])

    @cached_property
    def mask(self) -> int:
        """The id of the mask. Raise UnsupportedCallError for a tokenizer without one."""
        id_from_file = self.output_meaning.settings.get(MASK)
        if id_from_file is not None:
            return int(id_from_file)
        for token in DEFAULT_MASK_TOKENS:
            id_ = self._reader.id_of(token)
            if id_ is not None:
                return id_
        tokens = " or ".join(DEFAULT_MASK_TOKENS)
        raise UnsupportedCallError(f"the file's tokenizer has no mask: none of its tokens is {tokens}")

    @property
    def mask_token(self) -> str:
        """The text of the mask, as in an input. Raise UnsupportedCallError for a tokenizer without one."""
        return self._reader.token(self.mask)

    def settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Check the settings. The candidate tokens in the result are ids.

        top_k: the number of candidates of a mask.
        candidate_tokens: the only tokens to choose from, one or several: texts, names in the vocabulary, or ids.
        """
        values = {name: value for name, value in values.items() if value is not None}
        top_k, candidates = values.pop("top_k", DEFAULT_TOP_K), values.pop("candidate_tokens", None)
        super().settings(values)
        if candidates is not None:
            if isinstance(candidates, (str, Integral)):
                candidates = [candidates]
            if not isinstance(candidates, Iterable) or isinstance(candidates, bytes):
                raise invalid_value("candidate_tokens", "tokens, as texts or ids", candidates)
            candidates = list(dict.fromkeys(map(self._candidate_id, candidates)))
            if not candidates:
                raise OptionError(
                    "candidate_tokens names no token: give one, or leave it out", option="candidate_tokens"
                )
        return {"top_k": check_int("top_k", top_k), "candidate_tokens": candidates}

    def _candidate_id(self, candidate: Any) -> int:
        """Return the id of a candidate. Raise OptionError if it is not exactly one token of the vocabulary."""
        id_ = self._id(candidate)
        if not 0 <= id_ < self._vocabulary_size:
            raise OptionError(
                f"the candidate token {id_} is not in the model's vocabulary, which has {self._vocabulary_size} ids"
            )
        return id_

    def _id(self, candidate: Any) -> int:
        if isinstance(candidate, Integral) and not isinstance(candidate, bool):
            return int(candidate)
        if not isinstance(candidate, str):
            raise invalid_value("each of candidate_tokens", "a text or an id", candidate)
        id_ = self._reader.id_of(candidate)
        if id_ is not None:
            return id_
        ids = self._reader.ids(candidate)
        if len(ids) != 1 or ids[0] == self._reader.unknown:
            parts = " ".join(self._reader.token(i) for i in ids)
            raise OptionError(
                f"the candidate token {candidate!r} is not one token of the model's vocabulary, but {parts or 'none'}"
            )
        return ids[0]

    @property
    def _vocabulary_size(self) -> int:
        """The number of ids that the model scores."""
        assert self.manifest.encode is not None
        size = self.manifest.encode.outputs[0].shape[-1]
        return size if isinstance(size, int) else self._reader.size

    def sample(self, text: str | tuple[str, str]) -> Input | None:
        if not isinstance(text, str):
            return None
        mask = self.mask_token
        return f"{mask} {text}" if len(text) % 2 else f"{mask} {text} {mask}"  # truncation keeps the first mask

    def read_input(self, input: Input, inputs: Inputs, truncate: bool, settings: Mapping[str, Any]) -> TaskInput:
        request = inputs.single_pass_arrays(input, truncate)
        ids = next(request[spec.name] for spec in self._specs if spec.role == "ids")
        if not (ids == self.mask).any():
            cut = " (or truncation removed it)" if truncate else ""
            raise InputError(f"the input has no mask{cut}: write {self.mask_token} where it belongs")
        return TaskInput([request], ids)

    @property
    def _specs(self) -> Sequence[Any]:
        assert self.manifest.encode is not None
        return self.manifest.encode.inputs

    def select_outputs(self, outputs: Outputs, request: Mapping[str, Array]) -> Outputs:
        """Return the scores of the masks. The scores of all positions would take much more memory."""
        ids = next(request[spec.name] for spec in self._specs if spec.role == "ids")
        return [outputs[0][ids == self.mask]]

    def make_result(self, reading: TaskInput, outputs: Sequence[Outputs], settings: Mapping[str, Any]) -> Filled:
        ids, ((logits, *_), *_) = reading.details, outputs
        positions = np.flatnonzero(ids == self.mask)
        return tuple(
            tuple(self._candidates(ids, int(position), row, settings, several_masks=len(positions) > 1))
            for position, row in zip(positions, np.asarray(logits, np.float64), strict=True)
        )

    def _candidates(
        self, ids: Array, position: int, logits: Array, settings: Mapping[str, Any], several_masks: bool
    ) -> Iterable[MaskCandidate]:
        """Yield the candidates for a mask, the most probable first.

        ids: of the whole text. position, logits: of the mask.
        several_masks: whether the text has other masks, which then remain in the text of a candidate.
        """
        exponentials = np.exp(logits - logits.max())
        scores = exponentials / exponentials.sum()
        candidates = settings["candidate_tokens"]
        tokens = np.arange(len(scores)) if candidates is None else np.array(candidates)
        count = min(settings["top_k"], len(tokens))
        top = tokens[np.argpartition(-scores[tokens], count - 1)[:count]]
        for token in sorted(map(int, top), key=lambda token: -scores[token]):
            filled = ids.copy()
            filled[position] = token
            text = self._reader.text(filled, special=several_masks)
            yield MaskCandidate(self._reader.text([token], special=True), token, float(scores[token]), text)

    def numbers(self, result: Filled) -> Array:
        return np.array([[candidate.score for candidate in mask] for mask in result])

    def format_line(self, result: Filled) -> str:
        """Format the tokens of each mask and their probabilities, with a bar between masks."""
        masks = ("\t".join(f"{c.token.strip()}\t{c.score:.6g}" for c in candidates) for candidates in result)
        return "\t|\t".join(masks)

    def format_fields(self, result: Filled) -> dict[str, Any]:
        return {"masks": [[asdict(candidate) for candidate in candidates] for candidates in result]}
