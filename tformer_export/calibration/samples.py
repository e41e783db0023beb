"""Calibration data, to fit quantisation to and to measure it on: lines of a file, or results for random ids.

A line of `--calibration FILE` is one of

- a text, for a model without an encoder, which continues it. For a model that reads images in its prompt it may be
  JSON with the images: {"input_ids": "<image> a text", "pixel_values": ["image.png"]};
- a source, a tab and its target;
- a source alone, whose target is the greedy result of the unquantised file;
- JSON, for a model without a tokenizer or with several inputs: a list of ids, or an object of the inputs' names, such
  as {"src": [5, 9], "tgt": [7]}, with the target under the name of the step input.

A target needs no special tokens. The tokens that decoding starts from go before it and an end token after it, unless
its ids have them already. If the model begins each of its own results with a special token that the targets lack, such
as that of a language, the targets get it too (`_begin_tokens`).

A line that is longer than the model's limit is cut.

A single-pass model has no target. Its line is a text, or two texts with a tab between them, or the path of an
image or a recording, relative to the working folder, or JSON of its inputs, which may be ids or numbers.
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
from tokenizers import Tokenizer

from tformer_export.verify.parity import LONG_SOURCE, ParityGate
from tformer_export.verify.parity import MAX_CHECKED_LENGTH as LONGEST_PROMPT
from tformer_export.verify.teacher_forcing import decode_greedily
from tformer_runtime.base.errors import InputError, OptionError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.padding import padded_request_arrays
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.model import Model
from tformer_runtime.preprocess.audio import audio_of
from tformer_runtime.preprocess.images import image_inputs
from tformer_runtime.preprocess.inputs import Inputs

MEASURED_INTERVAL = 4  # each line with a number that is a multiple of it is for measuring; the others are for fitting
MIN_LINES = 8  # of a file
MAX_FITTED_POSITIONS = 65536  # of all samples for fitting
MAX_KEPT_NUMBERS = 1 << 26  # of all samples for measuring, 256 MB in float32
NUMBERS_PER_POSITION = 512  # of an image or another input that does not hold ids
MAX_BATCH_SAMPLES = 16  # of one length
RANDOM_REQUESTS, RANDOM_TOKENS = 64, 24  # without a file: requests, and tokens of each
MAX_SAMPLE_TOKENS = 128  # decoded for a line without a target
MAX_BEGIN_TOKENS = 4  # special tokens that a model puts before every result


@dataclass(frozen=True)
class Sample:
    """One sample of calibration data.

    request: name of a request input → its value without a batch axis.
    tokens: tokens of the step input, at most the maximum length; empty for a single-pass model.
    given_tokens: the number of tokens at the beginning that are given; the others are predicted.
    is_cut: whether its line was longer than the model's limit.
    """

    request: Mapping[str, np.ndarray]
    tokens: np.ndarray
    given_tokens: int
    is_cut: bool = False

    @property
    def positions(self) -> int:
        """The number of predicted tokens; for a single-pass model, the length of its longest input, or its number
        of patches."""
        if len(self.tokens):
            return len(self.tokens) - self.given_tokens
        return max((max(len(value), value.size // NUMBERS_PER_POSITION) for value in self.request.values()), default=0)


def single_pass_sample(request: Mapping[str, np.ndarray]) -> Sample:
    """Make a sample for a single-pass model."""
    return Sample(request, np.zeros(0, np.int64), 0)


@dataclass(frozen=True)
class Samples:
    """Calibration data. fitted: samples for fitting scales and integers. measured: other samples for measuring."""

    fitted: Sequence[Sample]
    measured: Sequence[Sample]

    @property
    def fit_data(self) -> Sequence[Sample]:
        """The samples for fitting; those for measuring if there is no file."""
        return self.fitted or self.measured


@dataclass(frozen=True)
class CalibrationLines:
    """The lines of a calibration file that were used.

    count: their number.
    cut: how many of them were longer than the model's limit and were cut.
    begin_tokens: the special tokens that were put before each target.
    """

    count: int
    cut: int
    begin_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, samples: Samples, manifest: Manifest) -> CalibrationLines:
        """Describe the lines of samples that were read for a model."""
        lines, start = [*samples.fitted, *samples.measured], len(manifest.special_tokens.bos_token_ids)
        begin: list[int] = []
        for sample in [] if manifest.takes_prompt else lines:
            begin = max(begin, sample.tokens[start : sample.given_tokens].tolist(), key=len)
        return cls(len(lines), sum(sample.is_cut for sample in lines), tuple(begin))

    def __str__(self) -> str:
        cut = f", {self.cut} of them cut to the model's limit" if self.cut else ""
        tokens = ", ".join(map(str, self.begin_tokens))
        return f"{self.count} lines{cut}" + (f", targets begin with {tokens}, as the model's results" if tokens else "")


def draw_samples(gate: ParityGate, engine: Engine) -> Samples:
    """Draw random requests and decode them greedily with the unquantised file. A single-pass model has no tokens.

    These samples are for measuring. Fitting to them improves the mean quality and worsens the worst row
    (docs/design/quantization.md).
    """
    lengths_drawn = 3 + np.arange(RANDOM_REQUESTS) % 16
    if gate.series is not None and gate.source.step_input is not None:
        length = min(RANDOM_TOKENS, engine.manifest.max_length)
        requests = gate.draw_requests(lengths_drawn.tolist())
        return Samples((), [Sample(request, gate.draw_sequence(length), 1) for request in requests])
    if engine.manifest.decode is None:
        return Samples((), [single_pass_sample(gate.draw_request(int(n))) for n in lengths_drawn])
    max_length = engine.manifest.max_length
    drawn: list[Sample] = []
    for lengths in np.array_split(lengths_drawn, 4):
        requests, starts = gate.draw_starts(lengths.tolist(), max_length)
        steps = min(RANDOM_TOKENS, max_length - len(starts[0]))
        decoded = decode_greedily(engine, requests, starts, steps, gate.hidden)
        drawn += [
            Sample(request, np.concatenate([start, tokens]), len(start))
            for request, start, tokens in zip(requests, starts, decoded, strict=True)
        ]
    return Samples((), drawn)


def draw_long_sample(gate: ParityGate, engine: Engine) -> Sample:
    """Draw a sequence of random ids, of the greatest length that the parity gate checks."""
    request, tokens = gate.draw_long_sequence(LONG_SOURCE, min(LONGEST_PROMPT, engine.manifest.max_length))
    return Sample(request, tokens if tokens.ndim > 1 else tokens.astype(np.int64), 1)


def read_samples(path: Path, engine: Engine) -> Samples:
    """Read the samples of a file, as far as they are needed.

    engine: of the unquantised file, for missing targets.

    Raises InputError that names the line that cannot be used, OptionError for a file that cannot be read or has too few
    lines.
    """
    fitted, measured = _split(read_lines(path, engine), engine.manifest)
    is_single_pass = engine.manifest.decode is None
    if len(fitted) + len(measured) < MIN_LINES:
        raise OptionError(
            f"{path} holds {len(fitted) + len(measured)} lines{' with a target to predict' * (not is_single_pass)}: "
            f"give {MIN_LINES} or more, some hundreds for a sound measure"
        )
    return Samples(fitted, measured)


def check_text_file(path: Path, option: str) -> None:
    """Raise OptionError for a file that cannot be read as text or that has too few lines. It reads the first lines."""
    lines = list(islice((line for _, line in _text_lines(path, option)), MIN_LINES))
    if len(lines) < MIN_LINES:
        raise OptionError(
            f"{option} {path} holds {len(lines)} lines: give {MIN_LINES} or more, some hundreds for a sound measure"
        )


def check_lines(path: Path, manifest: Manifest, option: str, max_lines: int | None = None) -> None:
    """Read the lines of a file as far as they will be used, before anything is computed with them.

    manifest: of the model that will read them.

    Raises the errors of `read_lines`.
    """
    _split(islice(_Reader(manifest, option).samples(path), max_lines), manifest)


def _split(samples: Iterator[Sample], manifest: Manifest) -> tuple[list[Sample], list[Sample]]:
    """Return the samples for fitting and those for measuring, as far as there is room for them."""
    fitted: list[Sample] = []
    measured: list[Sample] = []
    capacity = [MAX_FITTED_POSITIONS, MAX_KEPT_NUMBERS]
    for number, sample in enumerate(samples, 1):
        use = number % MEASURED_INTERVAL == 0
        if capacity[use] > 0:
            capacity[use] -= _numbers(manifest, sample) if use else sample.positions
            (fitted, measured)[use].append(sample)
        elif max(capacity) <= 0:
            break
    return fitted, measured


def read_lines(path: Path, engine: Engine, option: str = "--calibration") -> Iterator[Sample]:
    """Yield the samples of a file, one for each line that has a position to predict.

    option: the name of the option, for messages.

    Raises InputError that names the line that cannot be used, OptionError for a file that cannot be read.
    """
    samples = _Reader(engine.manifest, option).samples(path)
    return _complete_targets(samples, engine) if engine.manifest.decode is not None else samples


def _numbers(manifest: Manifest, sample: Sample) -> int:
    """Return the count of numbers that measuring a sample keeps: the outputs of all positions, or outputs and inputs
    of a model that gives one output for a row."""
    if manifest.decode is not None:
        return int(manifest.decode.logits.shape[-1]) * sample.positions
    assert manifest.encode is not None
    shape = manifest.encode.outputs[0].shape[1:]
    numbers = math.prod(size for size in shape if isinstance(size, int))
    if any(isinstance(size, str) for size in shape):
        return numbers * sample.positions
    return numbers + sum(value.size for value in sample.request.values())


def group_by_length(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Yield batches of samples whose inputs have equal sizes, so that no row is padded."""
    groups: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        sizes = (size for value in sample.request.values() for size in value.shape)
        groups.setdefault((len(sample.tokens), *sizes), []).append(sample)
    for group in groups.values():
        yield from (group[at : at + MAX_BATCH_SAMPLES] for at in range(0, len(group), MAX_BATCH_SAMPLES))


def _text_lines(path: Path, option: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not blank. Raises OptionError for a file without text."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except OSError as error:
        raise OptionError(f"{option} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{option} {path} is not UTF-8 text") from error


class _Reader:
    """Parser of lines. A sample whose target the model has to decode has only the tokens that decoding starts from."""

    def __init__(self, manifest: Manifest, option: str) -> None:
        self.option = option
        self.inputs, self.manifest = Inputs(manifest), manifest
        self.step = manifest.decode.step.name if manifest.decode else None
        derived = ("mask", "types")
        sources = [spec for spec in manifest.encode.inputs if spec.role not in derived] if manifest.encode else []
        steps = [self.step] if self.step is not None else []
        names = [spec.name for spec in sources] or steps
        if manifest.takes_prompt:
            sources, names = [], steps
        texts = all(name in manifest.tokenizer_of for name in (*names, *steps))
        self.plain = texts and len(names) == 1 and all(spec.role == "ids" for spec in sources)
        self.source = names[0]
        images = names == list(image_inputs(manifest.preprocessing))
        self.named = self.step is None and (images or audio_of(manifest) is not None)  # a line is the path of a file

    def samples(self, path: Path) -> Iterator[Sample]:
        for number, line in _text_lines(path, self.option):
            try:
                yield self._sample(line)
            except InputError as error:
                raise InputError(f"line {number} of {path}: {error}") from error

    def _sample(self, line: str) -> Sample:
        source, target = self._parsed(line)
        request, tokens, start, is_cut = self._read(source)
        if self.manifest.encode is not None and not self.manifest.takes_prompt:
            encode, rows = self.manifest.encode, {name: [value] for name, value in request.items()}
            padded_request_arrays(encode.inputs, rows, 1, encode=encode)
        if self.step is None:
            return replace(single_pass_sample(request), is_cut=is_cut)
        scored = max(start, 1)
        for placeholder in self.manifest.placeholders.values():  # the text after the last image is predicted
            scored = max(scored, 1 + int(np.flatnonzero(tokens == placeholder.token_id).max(initial=-1)))
        if not self.manifest.takes_prompt:
            scored = len(tokens)
            if target is not None:
                tokens = np.concatenate([tokens, self._target(target, tokens)])
        max_length = self.manifest.max_length
        if scored >= max_length:
            raise InputError(f"its images take {scored} tokens and the model holds {max_length}")
        return Sample(request, tokens[:max_length], scored, is_cut or len(tokens) > max_length)

    def _read(self, source: Any) -> tuple[Mapping[str, np.ndarray], np.ndarray, int, bool]:
        """Return the inputs of a source, cut if it is too long, as `generation_inputs` does, and whether it was cut."""
        try:
            return *self.inputs.generation_inputs(source), False
        except InputError:  # raised again if the length is not the reason
            return *self.inputs.generation_inputs(source, truncate=True), True

    def _target(self, target: Any, start: np.ndarray) -> np.ndarray:
        """Return the ids of a target, without the tokens that decoding starts from and with an end token."""
        assert self.step is not None
        ids = self.inputs.ids(self.step, target, add_special_tokens=False, truncate=True)
        if len(start) < len(ids) and np.array_equal(ids[: len(start)], start):
            ids = ids[len(start) :]
        ends = self.manifest.special_tokens.eos_token_ids
        return ids if ids[-1] in ends else np.concatenate([ids, np.array(ends[:1], np.int64)])

    def _parsed(self, line: str) -> tuple[Any, Any]:
        """Parse a line into source and target; the target is None if the line has none."""
        if self.named:
            return line, None
        if self.plain and self.step is None:
            first, *second = line.split("\t")
            return (first, second[0]) if len(second) == 1 else line, None
        if self.plain and self.manifest.takes_prompt:
            return (_prompt_with_items(line) if self.manifest.placeholders else line), None
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
        if isinstance(value, dict) and self.step is not None and not self.manifest.takes_prompt:
            target = value.pop(self.step, None)
            return value, target
        return value, None


def _complete_targets(samples: Iterator[Sample], engine: Engine) -> Iterator[Sample]:
    """Yield samples that have a position to predict. Missing targets are decoded in batches."""
    model, begin = Model(engine), None
    while some := list(islice(samples, RANDOM_REQUESTS)):
        missing = [sample for sample in some if _lacks_target(sample, engine)]
        results = model.generate_batch(
            [dict(sample.request) for sample in missing], num_beams=1, temperature=0.0, max_new_tokens=MAX_SAMPLE_TOKENS
        )
        targets = iter(np.array(result.token_ids, np.int64) for result in results)
        given = [sample for sample in some if not (engine.manifest.takes_prompt or _lacks_target(sample, engine))]
        if begin is None and len(given) >= MIN_LINES:
            begin = _begin_tokens(given[:MAX_BATCH_SAMPLES], engine)
        for sample in some:
            if _lacks_target(sample, engine):
                sample = replace(sample, tokens=np.concatenate([sample.tokens, next(targets)]))
            elif begin:
                sample = _with_begin_tokens(sample, begin, engine.manifest.max_length)
            if sample.positions > 0:
                yield sample


def _begin_tokens(given: Sequence[Sample], engine: Engine) -> list[int]:
    """Return the special tokens with which the model begins the result of every source, and no target begins."""
    requests = {name: [sample.request[name] for sample in given] for name in given[0].request}
    generation, special = engine.manifest.generation_defaults, _special_ids(engine.manifest)
    prompt, begin = given[0].tokens[: given[0].given_tokens], list[int]()
    while len(begin) < MAX_BEGIN_TOKENS:
        tokens = np.tile(np.concatenate([prompt, np.array(begin, np.int64)]), (len(given), 1))
        best = set(engine.step(engine.start(requests, len(given)), tokens).argmax(-1).tolist())
        if not begin and (forced := generation.get("forced_bos_token_id")) is not None:
            best = {forced}
        if len(best) > 1 or not best <= special:
            break
        if any(sample.tokens[len(prompt)] in best for sample in given):
            break
        begin += best
    return begin


def _special_ids(manifest: Manifest) -> set[int]:
    """Return the ids of special tokens that may begin a target: neither its end nor padding."""
    assert manifest.decode is not None
    ids = set(manifest.special_tokens.bos_token_ids)
    number = manifest.tokenizer_of.get(manifest.decode.step.name)
    if number is not None:
        added = Tokenizer.from_str(manifest.tokenizers[number]).get_added_tokens_decoder()
        ids |= {token_id for token_id, token in added.items() if token.special}
    if (forced := manifest.generation_defaults.get("forced_bos_token_id")) is not None:
        ids.add(forced)
    return ids - {*manifest.special_tokens.eos_token_ids, manifest.special_tokens.pad_token_id}


def _with_begin_tokens(sample: Sample, begin: Sequence[int], max_length: int) -> Sample:
    """Return a sample whose target begins with these tokens, which are given, unless it begins with them already."""
    given, tokens = sample.given_tokens, sample.tokens
    added = np.concatenate([tokens[:given], np.array(begin, np.int64), tokens[given:]])
    is_cut = sample.is_cut or len(added) > max_length
    return replace(sample, tokens=added[:max_length], given_tokens=given + len(begin), is_cut=is_cut)


def _lacks_target(sample: Sample, engine: Engine) -> bool:
    return not engine.manifest.takes_prompt and len(sample.tokens) <= sample.given_tokens


def _prompt_with_items(line: str) -> Any:
    """Return the object of a line of JSON, which has the images of its text; any other line as it is."""
    try:
        value = json.loads(line)
    except ValueError:
        return line
    return value if isinstance(value, dict) else line
