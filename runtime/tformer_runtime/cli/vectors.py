"""The jobs of vectors: a line per vector, one array of all vectors, and cosine similarities."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError, with_input_number
from tformer_runtime.cli.job import BatchSettings, Job, RunOptions
from tformer_runtime.format.manifest import ATTENTIONS
from tformer_runtime.tasks.base import BaseTask
from tformer_runtime.tasks.features import Features, cosines

if TYPE_CHECKING:
    from tformer_runtime.model import Model
    from tformer_runtime.preprocess.inputs import Input

NPY_HEADER_BYTES = 128  # numpy's format requires a multiple of 64


def vectors_job(task: Features, settings: Mapping[str, Any], options: RunOptions) -> Job:
    """Return the job for the output format. Raise OptionError for options that do not go together."""
    settings = dict(settings)
    similarity = settings.pop("similarity", False)
    if options.output_file is not None and options.output_file.suffix == ".npy":
        if options.as_json or similarity:
            raise OptionError(
                f"{options.output_file} is written as one array of vectors: leave out --json and --similarity, or "
                "choose another file name"
            )
        return VectorArrayJob(task, settings, options, task.must_pool("one array of all"))
    if similarity and settings.get(ATTENTIONS):
        raise OptionError("--attentions and --similarity exclude each other: leave out one of them")
    if similarity:
        task.must_pool("--similarity")
        return CosineJob(task, settings, options)
    return Job(task, settings, options)


class VectorArrayJob(Job):
    """Write all vectors as one float32 array (n, width) in numpy's format, row by row. The header gets n at the end."""

    def __init__(self, task: BaseTask, settings: Mapping[str, Any], options: RunOptions, width: int) -> None:
        super().__init__(task, settings, options)
        self.header = lambda rows: npy_header((rows, width))

    def format_result(self, result: Array, index: int) -> bytes:
        return np.ascontiguousarray(result, "<f4").tobytes()


def npy_header(shape: tuple[int, ...]) -> bytes:
    """Return the header of a .npy file of float32, padded to NPY_HEADER_BYTES.

    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": shape})
    header = buffer.getvalue()
    size = NPY_HEADER_BYTES - 10  # of the description, after the magic string, the version and its length
    return header[:8] + size.to_bytes(2, "little") + header[10:].rstrip(b"\n ").ljust(size - 1) + b"\n"


class CosineJob(Job):
    """Write the cosine of each pair, or of each input with all inputs. The latter keeps all vectors until the end."""

    def __init__(self, task: BaseTask, settings: Mapping[str, Any], options: RunOptions) -> None:
        super().__init__(task, settings, options)
        self.result_options = {**self.result_options, "--similarity": True}

    def results(self, model: Model, inputs: Iterable[Input], batches: BatchSettings) -> Iterator[Any]:
        rest = iter(inputs)
        first = next(rest, None)
        if first is None:
            return
        pairs = isinstance(first, tuple)
        if not pairs and batches.index_offset:
            raise InputError("a table of all inputs cannot be resumed: start over with --force")
        checked = (
            _check_kind(value, pairs, number)
            for number, value in enumerate(chain([first], rest), batches.index_offset + 1)
        )
        if pairs:
            yield from self._pair_cosines(model, checked, batches)
            return
        vectors = list(super().results(model, checked, batches))
        table = np.stack(vectors)
        for vector in vectors:
            yield cosines(vector[None], table)[0]

    def _pair_cosines(self, model: Model, pairs: Iterable[Any], batches: BatchSettings) -> Iterator[Any]:
        vectors = super().results(model, (text for pair in pairs for text in pair), batches)
        number = batches.index_offset
        while True:
            number += 1
            try:
                first, second = next(vectors, None), next(vectors, None)
            except InputError as error:
                raise with_input_number(error, number) from error  # its number is that of the text
            if first is None or second is None:
                return
            yield cosines(first[None], second[None])[0, 0]

    def format_result(self, result: Any, index: int) -> str:
        if self.as_json:
            values = [float(f"{value:.6g}") for value in np.atleast_1d(result)]
            fields = {"cosines": values} if np.ndim(result) else {"cosine": values[0]}
            return json.dumps({"index": index, **fields}) + "\n"
        return "\t".join(f"{value:.4f}" for value in np.atleast_1d(result)) + "\n"


def _check_kind(value: Input, pairs: bool, number: int) -> Any:
    """Return the input. Raise InputError for a single input among pairs, and for a pair among single inputs."""
    if isinstance(value, tuple) != pairs:
        kind, others = ("a single input", "pairs") if pairs else ("a pair", "single inputs")
        raise InputError(f"it is {kind}, but the inputs before it are {others}: give inputs of one kind", number)
    return value
