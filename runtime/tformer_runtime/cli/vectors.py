"""Vectors on the command line: as one array, and as the cosines between them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_runtime.base.arrays import Array
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.cli.job import Asked, Batches, Job
from tformer_runtime.format.manifest import ATTENTION
from tformer_runtime.tasks.base import Task
from tformer_runtime.tasks.features import Features, cosines

if TYPE_CHECKING:
    from tformer_runtime.model import Model
    from tformer_runtime.preprocess.inputs import Input

HEAD = 128  # bytes before the numbers; numpy's format wants a multiple of 64


def vectors_job(task: Features, settings: Mapping[str, Any], asked: Asked) -> Job:
    settings = dict(settings)
    nearness = settings.pop("similarity", False)
    if asked.output is not None and asked.output.suffix == ".npy":
        if asked.as_json or nearness:
            raise OptionError(
                f"{asked.output} is one array of vectors: leave out --json and --similarity, or name another file"
            )
        return Arrays(task, settings, asked, task.must_pool("one array of all"))
    if nearness and settings.get(ATTENTION):
        raise OptionError("attention is drawn of inputs that are read as they are: leave out --similarity")
    if nearness:
        task.must_pool("--similarity")
        return Cosines(task, settings, asked)
    return Job(task, settings, asked)


class Arrays(Job):
    """All vectors as one float32 array (n, width) in numpy's format, written row by row: how many there are is put into
    its head at the end."""

    def __init__(self, task: Task, settings: Mapping[str, Any], asked: Asked, width: int) -> None:
        super().__init__(task, settings, asked)
        self.head = lambda rows: npy_head((rows, width))

    def written(self, result: Array, index: int) -> bytes:
        return np.ascontiguousarray(result, "<f4").tobytes()


def npy_head(shape: tuple[int, ...]) -> bytes:
    """What a .npy file of float32 of this shape begins with, in HEAD bytes.

    https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
    """
    held = io.BytesIO()
    np.lib.format.write_array_header_1_0(held, {"descr": "<f4", "fortran_order": False, "shape": shape})
    head = held.getvalue()
    size = HEAD - 10  # of the description, after the magic string, the version and this number
    return head[:8] + size.to_bytes(2, "little") + head[10:].rstrip(b"\n ").ljust(size - 1) + b"\n"


class Cosines(Job):
    """How near inputs are: the two of each pair, or all inputs to all, whose vectors are held until the end."""

    def __init__(self, task: Task, settings: Mapping[str, Any], asked: Asked) -> None:
        super().__init__(task, settings, asked)
        self.asked = {**self.asked, "--similarity": True}

    def results(self, model: Model, values: Iterable[Input], how: Batches) -> Iterator[Any]:
        inputs = iter(values)
        begin = next(inputs, None)
        if begin is None:
            return
        pairs = isinstance(begin, tuple)
        if not pairs and how.first:
            raise InputError("a table is made of all inputs at once: start over with --force")
        every = (_alike(value, pairs, at) for at, value in enumerate(chain([begin], inputs), how.first + 1))
        if not pairs:
            vectors = list(super().results(model, every, how))
            table = np.stack(vectors)
            for vector in vectors:
                yield cosines(vector[None], table)[0]
            return
        texts = (text for pair in every for text in pair)
        found = super().results(model, texts, replace(how, first=0))
        number = how.first
        while True:
            number += 1
            try:
                one, other = next(found, None), next(found, None)
            except InputError as error:
                raise InputError(f"input {number}: {str(error).partition(': ')[2]}") from error
            if one is None or other is None:
                return
            yield cosines(one[None], other[None])[0, 0]

    def written(self, result: Any, index: int) -> str:
        if self.as_json:
            values = [float(f"{value:.6g}") for value in np.atleast_1d(result)]
            fields = {"cosines": values} if np.ndim(result) else {"cosine": values[0]}
            return json.dumps({"index": index, **fields}) + "\n"
        return "\t".join(f"{value:.4f}" for value in np.atleast_1d(result)) + "\n"


def _alike(value: Input, pairs: bool, number: int) -> Any:
    """InputError for a single input among pairs, or a pair among single ones."""
    if isinstance(value, tuple) != pairs:
        one, others = ("one input", "pairs") if pairs else ("a pair", "single inputs")
        raise InputError(f"input {number}: it is {one} and those before are {others}: compare the one or the other")
    return value
