"""Data that quantisation is fitted to and measured on: lines of a file, or what the model itself makes of random ids.

A line of `--calibration FILE` is a text that a model without an encoder goes on from; or a source and its target with a
tab between them; or a source alone, whose target is then what the unquantised file decodes greedily. For a model
without a tokenizer, or with several inputs, each line is JSON: a list of ids, or an object of the inputs' names, such
as {"src": [5, 9], "tgt": [7]}, with the target under the step input's name. A model that is run once has no target: a
line is a text, or two with a tab between them, or the name of an image's or a sound's file, from where the export runs,
or JSON of its inputs, numbers where they are no ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tformer_export.verify.parity import LONG_SOURCE, Gate
from tformer_export.verify.parity import LONGEST as LONGEST_PROMPT
from tformer_export.verify.teacher_forcing import decode_greedily
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.padding import request_arrays
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.model import Model
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.preprocess.inputs import Inputs

HELD_OUT = 4  # one line in so many is measured on and not fitted to
FEWEST = 8  # lines
MOST = 65536  # positions that are fitted to
MOST_LOGITS = 1 << 26  # numbers that are kept of those that are measured, 256 MB
PATCH = 512  # numbers of an image, or of what else has more than ids, that are counted as one position
AT_ONCE = 16  # samples of one length
ROWS, LENGTH = 64, 24  # of random requests, where there is no file
LONGEST = 128  # tokens that are decoded where a line has no target


@dataclass(frozen=True)
class Sample:
    """request: each request input, without its batch axis. tokens: of the step input, as many as the model holds at
    most; those before `scored` are given, the others are predicted. A model that is run once has none."""

    request: Mapping[str, np.ndarray]
    tokens: np.ndarray
    scored: int

    @property
    def positions(self) -> int:
        """How many tokens are predicted; of a model that is run once, the length of its longest input, or how many
        patches it has."""
        if len(self.tokens):
            return len(self.tokens) - self.scored
        return max((max(len(value), value.size // PATCH) for value in self.request.values()), default=0)


def once(request: Mapping[str, np.ndarray]) -> Sample:
    """What a model that is run once reads."""
    return Sample(request, np.zeros(0, np.int64), 0)


@dataclass(frozen=True)
class Samples:
    """fitted: what scales and integers are fitted to; measured: what they are measured on, none of the same."""

    fitted: Sequence[Sample]
    measured: Sequence[Sample]

    @property
    def seen(self) -> Sequence[Sample]:
        """What may be fitted to; all, where there are no lines but what the model itself makes."""
        return self.fitted or self.measured


def draw_samples(gate: Gate, engine: Engine) -> Samples:
    """What the unquantised file decodes greedily from random requests, to measure on; these alone where it is run once.

    Not to fit to: that is better on average and worse at its worst (a sentence encoder in 4 bits: mean cosine with the
    unquantised vectors 0.959 instead of 0.950, the least 0.77 instead of 0.83).
    """
    every = 3 + np.arange(ROWS) % 16
    if gate.series is not None and gate.source.step is not None:
        length = min(LENGTH, engine.manifest.max_length)
        return Samples(
            (), [Sample(request, gate.draw_sequence(length), 1) for request in gate.draw_requests(every.tolist())]
        )
    if engine.manifest.decode is None:
        return Samples((), [once(gate.draw_request(int(n))) for n in every])
    longest = engine.manifest.max_length
    drawn: list[Sample] = []
    for lengths in np.array_split(every, 4):
        starts = [gate.start(longest) for _ in lengths]
        requests = [gate.draw_request(int(n)) for n in lengths]
        steps = min(LENGTH, longest - len(starts[0]))
        decoded = decode_greedily(engine, requests, starts, steps, gate.hidden)
        drawn += [
            Sample(request, np.concatenate([start, tokens]), len(start))
            for request, start, tokens in zip(requests, starts, decoded, strict=True)
        ]
    return Samples((), drawn)


def draw_long(gate: Gate, engine: Engine) -> Sample:
    """A sequence of random ids, as long as the gate's longest."""
    tokens = gate.draw_sequence(min(LONGEST_PROMPT, engine.manifest.max_length))
    return Sample(gate.draw_request(LONG_SOURCE), tokens if tokens.ndim > 1 else tokens.astype(np.int64), 1)


def read_samples(path: Path, engine: Engine) -> Samples:
    """The samples of a file, read as far as they are needed. engine: of the unquantised file, for missing targets.

    InputError names the line that cannot be used; OptionError, the file that cannot, or holds too few lines.
    """
    fitted: list[Sample] = []
    measured: list[Sample] = []
    room = [MOST, MOST_LOGITS]
    for number, sample in enumerate(read_lines(path, engine), 1):
        use = number % HELD_OUT == 0
        if room[use] > 0:
            room[use] -= _numbers(engine.manifest, sample) if use else sample.positions
            (fitted, measured)[use].append(sample)
        elif max(room) <= 0:
            break
    is_once = engine.manifest.decode is None
    if len(fitted) + len(measured) < FEWEST:
        raise OptionError(
            f"{path} holds {len(fitted) + len(measured)} lines{' with a target to predict' * (not is_once)}: give "
            f"{FEWEST} or more, some hundreds for a sound measure"
        )
    return Samples(fitted, measured)


def read_lines(path: Path, engine: Engine, option: str = "--calibration") -> Iterator[Sample]:
    """The samples of a file, one a line that has something to predict. option: what the file was given as.

    InputError names the line that cannot be used; OptionError, the file that cannot.
    """
    samples = _Reader(engine.manifest, option).samples(path)
    return _completed(samples, engine) if engine.manifest.decode is not None else samples


def _numbers(manifest: Manifest, sample: Sample) -> int:
    """How many are kept where a sample is measured: what a file gives for it, by positions or at once, and what it
    reads at once, which may be more."""
    if manifest.decode is not None:
        return int(manifest.decode.logits.shape[-1]) * sample.positions
    assert manifest.encode is not None
    shape = manifest.encode.outputs[0].shape[1:]
    given = math.prod(size for size in shape if isinstance(size, int))
    if any(isinstance(size, str) for size in shape):
        return given * sample.positions
    return given + sum(value.size for value in sample.request.values())


def of_one_length(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples whose inputs are all of one size, a few at a time: none is padded, so that every row counts."""
    alike: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        sizes = (size for value in sample.request.values() for size in value.shape)
        alike.setdefault((len(sample.tokens), *sizes), []).append(sample)
    for group in alike.values():
        yield from (group[at : at + AT_ONCE] for at in range(0, len(group), AT_ONCE))


class _Reader:
    """Lines → samples; one without a target, where the model has to make it, has no tokens beyond the first."""

    def __init__(self, manifest: Manifest, option: str) -> None:
        self.option = option
        self.inputs, self.manifest = Inputs(manifest), manifest
        self.step = manifest.decode.step.name if manifest.decode else None
        derived = ("mask", "types")
        sources = [spec for spec in manifest.encode.inputs if spec.role not in derived] if manifest.encode else []
        steps = [self.step] if self.step is not None else []
        names = [spec.name for spec in sources] or steps
        texts = all(name in manifest.tokenizer_of for name in (*names, *steps))
        self.plain = texts and len(names) == 1 and all(spec.role == "ids" for spec in sources)
        self.source = names[0]
        pictures = names == list(image_inputs(manifest.preparation))
        self.named = self.step is None and (pictures or audio_of(manifest) is not None)  # a line names a file

    def samples(self, path: Path) -> Iterator[Sample]:
        try:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        yield self._sample(line.rstrip("\r\n"))
                    except InputError as error:
                        raise InputError(f"line {number} of {path}: {error}") from error
        except OSError as error:
            raise OptionError(f"{self.option} {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise OptionError(f"{self.option} {path} is not UTF-8 text") from error

    def _sample(self, line: str) -> Sample:
        source, target = self._parsed(line)
        request, tokens, start = self.inputs.parts(source)
        if self.manifest.encode is not None:
            request_arrays(self.manifest.encode.inputs, {name: [value] for name, value in request.items()}, 1)
        if self.step is None:
            return once(request)
        scored = max(start, 1)
        if self.manifest.encode is not None:
            scored = len(tokens)
            if target is not None:
                ids = self.inputs.ids(self.step, target, special=False)
                tokens = np.concatenate([tokens, ids, self.manifest.special.end[:1]]).astype(np.int64)
        most = self.manifest.max_length
        if len(tokens) > most and self.manifest.encode is not None:
            raise InputError(f"the target is {len(tokens)} tokens long and the model holds {most}")
        return Sample(request, tokens[:most], scored)

    def _parsed(self, line: str) -> tuple[Any, Any]:
        """Source and target, None if there is none."""
        if self.named:
            return line, None
        if self.plain and self.step is None:
            first, *second = line.split("\t")
            return (first, second[0]) if len(second) == 1 else line, None
        if self.plain and self.manifest.encode is None:
            return line, None
        if self.plain:
            source, *target = line.split("\t")
            if len(target) > 1:
                raise InputError("it holds more than one tab: a source, a tab and its target")
            return source, target[0] if target else None
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"it is not JSON ({error}), such as [5, 9] or {{{json.dumps(self.source)}: [5, 9]}}"
            ) from error
        if isinstance(value, dict) and self.manifest.encode is not None and self.step is not None:
            target = value.pop(self.step, None)
            return value, target
        return value, None


def _completed(samples: Iterator[Sample], engine: Engine) -> Iterator[Sample]:
    """Samples that have something to predict: targets that are missing are decoded, many at once."""
    model = Model(engine)
    while some := list(islice(samples, ROWS)):
        missing = [sample for sample in some if _lacks_target(sample, engine)]
        results = model.generate_batch(
            [dict(sample.request) for sample in missing], num_beams=1, temperature=0.0, max_new_tokens=LONGEST
        )
        targets = iter(np.array(result.token_ids, np.int64) for result in results)
        for sample in some:
            if _lacks_target(sample, engine):
                sample = replace(sample, tokens=np.concatenate([sample.tokens, next(targets)]))
            if sample.positions > 0:
                yield sample


def _lacks_target(sample: Sample, engine: Engine) -> bool:
    return engine.manifest.encode is not None and len(sample.tokens) <= sample.scored
