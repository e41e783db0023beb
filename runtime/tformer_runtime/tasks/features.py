"""Features: the output of the model for each input, one vector if the file pools, else one per token.

A file with several outputs gives a mapping from their names to arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import UnsupportedCallError
from tformer_runtime.format.manifest import TensorSpec
from tformer_runtime.tasks.base import BaseTask, numbers_of
from tformer_runtime.tasks.settings import switch

if TYPE_CHECKING:
    from tformer_runtime.preprocess.inputs import Input

Vectors = Array | Mapping[str, Array]
PROMPT = "prompt"  # setting of the manifest: a text that goes before each input text


class Features(BaseTask):
    names: ClassVar[tuple[str, ...]] = ("feature-extraction", "sentence-similarity")
    does = "turns each input into numbers"
    call = "embed()"
    file_settings = {PROMPT: str}  # noqa: RUF012
    flags = {  # noqa: RUF012
        "Vectors": {
            "similarity": switch(
                "--similarity",
                "Write cosine similarities: a table of all inputs, or a number per input if inputs are pairs.",
            )
        }
    }

    @property
    def width(self) -> int | None:
        """The size of the vector of an input; None if there is one per position, no fixed size, or several outputs."""
        shape = self._outputs[0].shape[1:]
        return shape[0] if len(self._outputs) == len(shape) == 1 and isinstance(shape[0], int) else None

    @property
    def _outputs(self) -> Sequence[TensorSpec]:
        assert self.manifest.encode is not None
        return self.manifest.encode.outputs

    def must_pool(self, caller: str) -> int:
        """Return the size of the vectors. Raise UnsupportedCallError if inputs have several.

        caller: the feature that needs one vector per input, for the error.
        """
        if len(self._outputs) > 1:
            names = ", ".join(output.name for output in self._outputs)
            raise UnsupportedCallError(
                f"this file gives {names} for an input, not one vector, which {caller} needs: take them with predict()"
            )
        if self.width is None:
            raise UnsupportedCallError(
                f"this file gives numbers for each position of an input, not a vector for the whole, which {caller} "
                "needs: export it with --pooling mean (Task(pooling='mean')), or take them with predict()"
            )
        return self.width

    def model_input(self, input: Input) -> Input:
        prompt = self.output_meaning.settings.get(PROMPT, "")
        return prompt + input if prompt and isinstance(input, str) else input

    def result(self, outputs: Sequence[Array], settings: Mapping[str, Any]) -> Vectors:
        if len(self._outputs) == 1:
            return outputs[0]
        return {spec.name: output for spec, output in zip(self._outputs, outputs, strict=True)}

    def numbers(self, result: Vectors) -> Array:
        return (
            result if isinstance(result, np.ndarray) else np.concatenate([array.ravel() for array in result.values()])
        )

    def format_line(self, result: Vectors) -> str:
        return str(numbers_of(result) if isinstance(result, np.ndarray) else self.format_fields(result))

    def format_fields(self, result: Vectors) -> dict[str, Any]:
        if isinstance(result, np.ndarray):
            return {"vector" if result.ndim == 1 else "vectors": numbers_of(result)}
        return {name: numbers_of(array) for name, array in result.items()}


def cosines(one: Array, other: Array) -> Array:
    """Return the cosines (n, m) of the rows of (n, d) and (m, d); 0 for a row of zeros."""
    return _unit(one) @ _unit(other).T


def _unit(vectors: Array) -> Array:
    vectors = np.asarray(vectors, np.float64)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length > 0, length, 1)
