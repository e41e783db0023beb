"""The shortlist of a model, from lines of its data: learned, sized and measured.

If the candidates hold every id that the model would choose among all ids, the greedy result is the same, token by
token, because its top id is the top candidate as well. So the file itself decodes the lines with all ids, and the
shortlist is learned from these results and from the targets of the lines. Its size follows from them without further
decoding. Its effect is measured by decoding with it.

A shortlist covers fewer of the lines that it was not learned from, because they have other words. This share is
estimated by learning from seven eighths of the lines. Associations by IBM's model 1 in 5 rounds cover the most with the
fewest candidates (docs/design/kernels.md#which-ids-a-shortlist-has).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from tformer_export.calibration.samples import MAX_SAMPLE_TOKENS, MIN_LINES, Sample, read_lines
from tformer_export.options import no_source_ids
from tformer_export.shortlist.learn import NO_PLACE, Line, associate, each_needed
from tformer_runtime.base.errors import OptionError, ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.shortlist import Shortlist, max_columns
from tformer_runtime.model import Model

MIN_EQUAL_SHARE = 0.995  # of lines that decode as with all ids
MAX_DECODED_LINES, MAX_LINKS = 2000, 8_000_000  # that are decoded; pairs of tokens that are learned from
MIN_COMMON_IDS = 64  # common ids
CHEAP_SHARE, CHEAP_CANDIDATES = 1 / 16, 256  # of the vocabulary, and ids: this many candidates cost little
HELD_OUT_INTERVAL = 8  # each line with a number that is a multiple of it estimates the coverage of unseen lines
ESTIMATE_LINES = 256  # lines by which the number of candidates is estimated
SPEED_REPEATS = 9


@dataclass(frozen=True)
class ShortlistMeasurement:
    """The effect of a shortlist on its data.

    lines: the number of decoded lines.
    equal: the share of these lines with the same greedy result as with all ids.
    unseen: an estimate of that share for lines that it was not learned from.
    candidates: the mean number of candidates of a request.
    vocabulary: the number of all ids.
    common: the number of candidates of every request.
    each: the greatest number of candidates for a source id.
    speed: the speed of a step of one row over the speed with all ids.
    cut: how many of the lines that it was learned from were longer than the model's limit and were cut.
    """

    lines: int
    equal: float
    unseen: float
    candidates: float
    vocabulary: int
    common: int
    each: int
    speed: float
    cut: int = 0

    def rows(self) -> list[tuple[str, str]]:
        size = (
            f"{self.candidates:.0f} of {self.vocabulary} ids a request: {self.common} common, {self.each} a source id"
        )
        equal = f"{self.equal:.2%} of {self.lines} lines decode as with all ids; of unseen ones about {self.unseen:.1%}"
        slower = "" if self.speed >= 1 else ": slower"
        cut = [("", f"{self.cut} lines were cut to the model's limit")] if self.cut else []
        return [
            ("shortlist", size),
            *cut,
            ("", equal),
            ("", f"{self.speed:.1f} × the speed of all ids, one row{slower}"),
        ]


def make_shortlist(engine: Engine, path: Path) -> tuple[Shortlist, ShortlistMeasurement]:
    """Learn a shortlist from the lines of a file, for an engine whose file has no shortlist yet, and measure it.

    Raises OptionError for a file that cannot be used and for a model that reads no ids, ParityError
    if no shortlist gives MIN_EQUAL_SHARE of the lines the same result.
    Time: decoding of MAX_DECODED_LINES lines, twice, and seconds to learn.
    """
    tables = _tables(engine)
    samples = list(islice(_within(read_lines(path, engine, "--shortlist")), MAX_DECODED_LINES * 64))
    if len(samples) < MIN_LINES:
        raise OptionError(
            f"--shortlist {path} holds {len(samples)} lines that can be used: give {MIN_LINES} or more, some thousands "
            "for a shortlist that serves other lines too"
        )
    numbers = range(0, len(samples), -(-len(samples) // MAX_DECODED_LINES))
    decoded = [samples[number] for number in numbers]
    results = _decode(Model(engine), decoded, False)
    vocabulary = int(engine.decode.logits.shape[-1])
    lines = [Line(_source(sample, tables), (_target(sample, vocabulary),)) for sample in samples]
    chosen = {
        number: replace(lines[number], targets=(result,)) for number, result in zip(numbers, results, strict=True)
    }
    maker = _Maker(engine, tables, lines, chosen, vocabulary)
    for common, each in maker.sizes(decoded):
        shortlist = maker.shortlist(common, each)
        short_engine = Engine(engine.session, shortlist=shortlist)
        short = _decode(Model(short_engine), decoded, True)
        equal = float(np.mean([np.array_equal(a, b) for a, b in zip(results, short, strict=True)]))
        if equal >= MIN_EQUAL_SHARE:
            break
    else:
        raise ParityError(
            f"no shortlist of at most {max_columns(vocabulary)} ids gives {MIN_EQUAL_SHARE:.1%} of the lines of {path} "
            f"the result that they have with all {vocabulary} ids ({maker.best:.1%} were reached); no file was "
            "written: "
            "give more lines of one kind, or export without --shortlist"
        )
    counts = [len(shortlist.candidates(sample.request)) for sample in decoded]
    return shortlist, ShortlistMeasurement(
        len(decoded), equal, maker.unseen(common, each), float(np.mean(counts)), vocabulary,
        len(shortlist.common), each, _speed(short_engine, decoded[0]), sum(sample.is_cut for sample in samples),
    )  # fmt: skip


class _Maker:
    """Maker of shortlists of any size from lines. chosen: number of a line → the line with the model's own result."""

    def __init__(
        self,
        engine: Engine,
        tables: dict[str, tuple[int, int]],
        lines: Sequence[Line],
        chosen: Mapping[int, Line],
        vocabulary: int,
    ) -> None:
        self.tables, self.vocabulary = tables, vocabulary
        special = engine.manifest.special_tokens
        pad = () if special.pad_token_id is None else (special.pad_token_id,)
        self.always = [i for i in (*special.bos_token_ids, *special.eos_token_ids, *pad) if i < vocabulary]
        self.associations = associate([*lines, *chosen.values()], vocabulary)
        self.chosen = list(chosen.values())
        self.needs = self.associations.needs(self.chosen)
        others = [line for number, line in enumerate(lines) if number % HELD_OUT_INTERVAL]
        others += [line for number, line in chosen.items() if number % HELD_OUT_INTERVAL]
        self.held_out = [line for number, line in chosen.items() if not number % HELD_OUT_INTERVAL]
        self.needs_unseen = associate(others, vocabulary).needs(self.held_out)
        self.best = 0.0

    def sizes(self, samples: Sequence[Sample]) -> Iterator[tuple[int, int]]:
        """Yield numbers of common ids and of ids for each source id, the best first, to be tried by decoding."""
        limit = max_columns(self.vocabulary)
        cheap = min(limit, max(CHEAP_SHARE * self.vocabulary, CHEAP_CANDIDATES))
        tried: list[tuple[float, float, float, int, int]] = []
        common = min(MIN_COMMON_IDS, self.vocabulary)
        while common <= limit:
            seen = each_needed(self.needs, len(self.chosen), common)
            unseen = each_needed(self.needs_unseen, len(self.held_out), common)
            for each in {_enough(seen), max(_enough(seen), _enough(unseen)), *(max(_enough(seen), n) for n in _STEPS)}:
                if each < NO_PLACE:
                    count = self._count(samples, common, each)
                    tried.append((count, _share(seen, each), _share(unseen, each), common, each))
            common *= 2
        self.best = max((share for count, share, *_ in tried if count <= limit), default=0.0)
        within = sorted(entry for entry in tried if entry[1] >= MIN_EQUAL_SHARE and entry[0] <= limit)
        first = [entry for entry in within if entry[2] >= MIN_EQUAL_SHARE and entry[0] <= cheap][:1]
        first = first or sorted((e for e in within if e[0] <= cheap), key=lambda e: -e[2])[:1]
        first_count = first[0][0] if first else 0.0
        for _, _, _, common, each in [*first, *(entry for entry in within if entry[0] > first_count)][:_MAX_TRIES]:
            yield common, each

    def unseen(self, common: int, each: int) -> float:
        return _share(each_needed(self.needs_unseen, len(self.held_out), common), each)

    def shortlist(self, common: int, each: int) -> Shortlist:
        """Make a shortlist with `common` common ids and the special ids, and `each` ids for each source id."""
        learned = self.associations
        ids = np.unique(np.concatenate([learned.frequent[:common], np.array(self.always, np.int64)]))
        sources = sum(count for _, count in self.tables.values())
        starts, targets = learned.tables(common, each, sources)
        tables = {}
        for name, (first, count) in self.tables.items():  # source ids are counted from 1
            bounds = starts[first + 1 : first + count + 2]
            tables[name] = (bounds - bounds[0], targets[bounds[0] : bounds[-1]])
        return Shortlist(self.vocabulary, ids, tables)

    def _count(self, samples: Sequence[Sample], common: int, each: int) -> float:
        shortlist = self.shortlist(common, each)
        some = samples[:: -(-len(samples) // ESTIMATE_LINES)]
        return float(np.mean([len(shortlist.candidates(sample.request)) for sample in some]))


_STEPS = (8, 16, 32, 64, 128)  # numbers of ids for a source id that are tried for the sake of unseen lines
_MAX_TRIES = 4


def _enough(needed: np.ndarray) -> int:
    """Return the ids for each source id with which MIN_EQUAL_SHARE of the lines have all that they need."""
    return int(np.sort(needed)[int(np.ceil(MIN_EQUAL_SHARE * len(needed))) - 1])


def _share(needed: np.ndarray, each: int) -> float:
    return float(np.mean(needed <= each))


def _tables(engine: Engine) -> dict[str, tuple[int, int]]:
    """Return request inputs of ids: name → the offset of its ids among all inputs' ids, and their number."""
    inputs = engine.manifest.encode.inputs if engine.manifest.encode else ()
    tables, first = {}, 0
    for spec in inputs:
        if spec.role == "ids" and spec.vocabulary:
            tables[spec.name] = (first, spec.vocabulary)
            first += spec.vocabulary
    if not tables:
        raise no_source_ids()
    return tables


def _source(sample: Sample, tables: dict[str, tuple[int, int]]) -> np.ndarray:
    """Return the ids of all inputs with their offsets, counted from 1."""
    return np.concatenate([np.ravel(sample.request[name]) + first + 1 for name, (first, _) in tables.items()])


def _target(sample: Sample, vocabulary: int) -> np.ndarray:
    """Return the predicted ids that the model can write."""
    ids = sample.tokens[sample.given_tokens :]
    return ids[ids < vocabulary]


def _within(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Yield samples up to MAX_LINKS pairs of tokens."""
    links = 0
    for sample in samples:
        links += (1 + sum(value.size for value in sample.request.values())) * sample.positions
        if links > MAX_LINKS:
            return
        yield sample


def _decode(model: Model, samples: Sequence[Sample], shortlist: bool) -> list[np.ndarray]:
    """Return the greedy results, without the tokens that decoding starts from."""
    results = model.generate_batch(
        [dict(sample.request) for sample in samples],
        num_beams=1,
        num_return_sequences=1,
        temperature=0.0,
        max_new_tokens=MAX_SAMPLE_TOKENS,
        shortlist=shortlist,
    )
    return [np.array(result.token_ids, np.int64) for result in results]


def _speed(engine: Engine, sample: Sample) -> float:
    """Return the speed of a step of one row over that with all ids, by the medians of alternating steps."""
    assert engine.shortlist is not None
    requests = {name: [value] for name, value in sample.request.items()}
    row_candidates = engine.shortlist.candidates(sample.request)
    first = sample.tokens[: sample.given_tokens][None]
    states = [engine.start(requests, 1, candidates=candidates) for candidates in (None, [row_candidates])]
    times: tuple[list[float], list[float]] = ([], [])
    tokens = [engine.step(state, first).argmax(-1)[:, None] for state in states]
    for _ in range(min(SPEED_REPEATS, engine.manifest.max_length - first.shape[1])):
        for spent, state, token in zip(times, states, tokens, strict=True):
            begin = time.perf_counter()
            engine.step(state, token)
            spent.append(time.perf_counter() - begin)
    if not times[0]:
        return 1.0
    return float(np.median(times[0]) / np.median(times[1]))
