"""The shortlist of a model, from lines of its data: learned, made as large as they ask for, and measured.

What a model would choose of all ids is what has to be among the candidates: then the greedy result is the same, token
by token, for its best id is the best of the candidates too. So the file itself decodes the lines, with all ids, and the
shortlist is learned from these results and from the targets that are given. How large it has to be follows from them
without decoding again; what it gives is measured by decoding with it.

Of lines that it was not learned from less is covered, for words come there that none of these have. So much is
estimated by learning once more from seven eighths of the lines. Measured on 14,000 messages of Debian's programs and
their German translations (16,000 byte-pair ids; share of the target tokens of 2,000 others that are candidates, of 250
common ids and 20 or 100 for a source id, and how many candidates there are on average):

====================================  =================  =================
p(t | s) of IBM's model 1, 5 rounds   88.0 %, 304        91.5 %, 528
the same, 1 round                     83.1 %, 279        90.5 %, 493
the same, 10 rounds                   88.0 %, 305        91.5 %, 533
Dice, 2 c(s, t) / (c(s) + c(t))       87.0 %, 342        91.2 %, 623
c(s, t) / c(s)                        80.4 %, 269        89.3 %, 428
pointwise mutual information          80.3 %, 406        90.1 %, 921
====================================  =================  =================
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from tformer_export.calibration.samples import FEWEST, LONGEST, Sample, read_lines
from tformer_export.shortlist.learn import NEVER, Line, associate, each_needed
from tformer_runtime.base.errors import OptionError, ParityError, UnsupportedModelError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.shortlist import Shortlist, most_columns
from tformer_runtime.model import Model

SHARE = 0.995  # of lines that decode as with all ids
MOST_LINES, MOST_LINKS = 2000, 8_000_000  # that are decoded; pairs of tokens that are learned from
SMALLEST = 64  # common ids
CHEAP, FEW = 1 / 16, 256  # of the vocabulary, or ids: so many candidates cost little, and other lines may need them
HELD_OUT = 8  # one line in so many estimates those
SAMPLE = 256  # lines by which the number of candidates is estimated
REPEATS = 9


@dataclass(frozen=True)
class Measured:
    """What a shortlist does on its data. lines: that were decoded. equal: share of them with the same greedy result as
    with all ids. unseen: that share, estimated, of lines it was not learned from. candidates: on average of a request.
    common, each: of every request, and at most for a source id. speed: how many times faster a step of one row is."""

    lines: int
    equal: float
    unseen: float
    candidates: float
    vocabulary: int
    common: int
    each: int
    speed: float

    def rows(self) -> list[tuple[str, str]]:
        size = (
            f"{self.candidates:.0f} of {self.vocabulary} ids a request: {self.common} common, {self.each} a source id"
        )
        equal = f"{self.equal:.2%} of {self.lines} lines decode as with all ids; of unseen ones about {self.unseen:.1%}"
        slower = "" if self.speed >= 1 else ": slower"
        return [
            ("shortlist", size),
            ("", equal),
            ("", f"{self.speed:.1f} × the speed of all ids, one row{slower}"),
        ]


def make_shortlist(engine: Engine, path: Path) -> tuple[Shortlist, Measured]:
    """Learn from the lines of a file, for an engine whose file has no shortlist yet.

    OptionError for a file that cannot be used; UnsupportedModelError for a model that reads no ids; ParityError if
    SHARE of the lines cannot be reached. Time: the decoding of MOST_LINES lines, twice, and seconds to learn.
    """
    tables = _tables(engine)
    samples = list(islice(_within(read_lines(path, engine, "--shortlist")), MOST_LINES * 64))
    if len(samples) < FEWEST:
        raise OptionError(
            f"--shortlist {path} holds {len(samples)} lines that can be used: give {FEWEST} or more, some thousands "
            "for a shortlist that serves other lines too"
        )
    model = Model(engine)
    numbers = range(0, len(samples), -(-len(samples) // MOST_LINES))
    decoded = [samples[number] for number in numbers]
    results = _decode(model, decoded, False)
    vocabulary = int(engine.decode.logits.shape[-1])
    lines = [Line(_source(sample, tables), (_target(sample, vocabulary),)) for sample in samples]
    chosen = {
        number: replace(lines[number], targets=(result,)) for number, result in zip(numbers, results, strict=True)
    }
    made = _Maker(engine, tables, lines, chosen, vocabulary)
    for common, each in made.sizes(decoded):
        engine.shortlist = made.shortlist(common, each)
        short = _decode(model, decoded, True)
        equal = float(np.mean([np.array_equal(a, b) for a, b in zip(results, short, strict=True)]))
        if equal >= SHARE:
            break
    else:
        raise ParityError(
            f"no shortlist of at most {most_columns(vocabulary)} ids gives {SHARE:.1%} of the lines of {path} the "
            f"result that they have with all {vocabulary} ids ({made.best:.1%} were reached); no file was written: "
            "give more lines of one kind, or export without --shortlist"
        )
    counts = [len(engine.shortlist.candidates(sample.request)) for sample in decoded]
    return engine.shortlist, Measured(
        len(decoded), equal, made.unseen(common, each), float(np.mean(counts)), vocabulary,
        len(engine.shortlist.common), each, _speed(engine, decoded[0]),
    )  # fmt: skip


class _Maker:
    """Shortlists of any size from some lines. chosen: number of a line → what the model makes of it."""

    def __init__(
        self,
        engine: Engine,
        tables: dict[str, tuple[int, int]],
        lines: Sequence[Line],
        chosen: Mapping[int, Line],
        vocabulary: int,
    ) -> None:
        self.tables, self.vocabulary = tables, vocabulary
        special = engine.manifest.special
        pad = () if special.pad is None else (special.pad,)
        self.always = [i for i in (*special.start, *special.end, *pad) if i < vocabulary]
        self.associations = associate([*lines, *chosen.values()], vocabulary)
        self.chosen = list(chosen.values())
        self.needs = self.associations.needs(self.chosen)
        others = [line for number, line in enumerate(lines) if number % HELD_OUT]
        others += [line for number, line in chosen.items() if number % HELD_OUT]
        self.held = [line for number, line in chosen.items() if not number % HELD_OUT]
        self.needs_unseen = associate(others, vocabulary).needs(self.held)
        self.best = 0.0

    def sizes(self, samples: Sequence[Sample]) -> Iterator[tuple[int, int]]:
        """How many common ids and ids for each source id, to be tried in turn; the first is as good as any, unless
        decoding says otherwise."""
        limit = most_columns(self.vocabulary)
        cheap = min(limit, max(CHEAP * self.vocabulary, FEW))
        tried: list[tuple[float, float, float, int, int]] = []
        common = min(SMALLEST, self.vocabulary)
        while common <= limit:
            seen = each_needed(self.needs, len(self.chosen), common)
            unseen = each_needed(self.needs_unseen, len(self.held), common)
            for each in {_enough(seen), max(_enough(seen), _enough(unseen)), *(max(_enough(seen), n) for n in _STEPS)}:
                if each < NEVER:
                    count = self._count(samples, common, each)
                    tried.append((count, _share(seen, each), _share(unseen, each), common, each))
            common *= 2
        self.best = max((share for count, share, *_ in tried if count <= limit), default=0.0)
        within = sorted(entry for entry in tried if entry[1] >= SHARE and entry[0] <= limit)
        first = [entry for entry in within if entry[2] >= SHARE and entry[0] <= cheap][:1]
        first = first or sorted((e for e in within if e[0] <= cheap), key=lambda e: -e[2])[:1]
        least = first[0][0] if first else 0.0
        for _, _, _, common, each in [*first, *(entry for entry in within if entry[0] > least)][:_TRIES]:
            yield common, each

    def unseen(self, common: int, each: int) -> float:
        return _share(each_needed(self.needs_unseen, len(self.held), common), each)

    def shortlist(self, common: int, each: int) -> Shortlist:
        """With so many common ids, the special ones besides, and so many for each source id."""
        learned = self.associations
        ids = np.unique(np.concatenate([learned.frequent[:common], np.array(self.always, np.int64)]))
        sources = sum(count for _, count in self.tables.values())
        starts, targets = learned.tables(common, each, sources)
        tables = {}
        for name, (first, count) in self.tables.items():  # source ids are counted from 1
            own = starts[first + 1 : first + count + 2]
            tables[name] = (own - own[0], targets[own[0] : own[-1]])
        return Shortlist(self.vocabulary, ids, tables)

    def _count(self, samples: Sequence[Sample], common: int, each: int) -> float:
        made = self.shortlist(common, each)
        some = samples[:: -(-len(samples) // SAMPLE)]
        return float(np.mean([len(made.candidates(sample.request)) for sample in some]))


_STEPS = (8, 16, 32, 64, 128)  # ids for a source id, where lines that were not seen ask for more than the others
_TRIES = 4


def _enough(needed: np.ndarray) -> int:
    """How many ids for each source id give SHARE of the lines all that they need."""
    return int(np.sort(needed)[int(np.ceil(SHARE * len(needed))) - 1])


def _share(needed: np.ndarray, each: int) -> float:
    return float(np.mean(needed <= each))


def _tables(engine: Engine) -> dict[str, tuple[int, int]]:
    """Request inputs of ids: name → where its ids begin among all, and how many there are."""
    inputs = engine.manifest.encode.inputs if engine.manifest.encode else ()
    found, first = {}, 0
    for spec in inputs:
        if spec.role == "ids" and spec.vocabulary:
            found[spec.name] = (first, spec.vocabulary)
            first += spec.vocabulary
    if not found:
        raise UnsupportedModelError(
            "a shortlist goes from the ids of a source to those of its target, and the encoder of this model reads no "
            "ids: export it without --shortlist"
        )
    return found


def _source(sample: Sample, tables: dict[str, tuple[int, int]]) -> np.ndarray:
    """The ids of all inputs, counted on and from 1."""
    return np.concatenate([np.ravel(sample.request[name]) + first + 1 for name, (first, _) in tables.items()])


def _target(sample: Sample, vocabulary: int) -> np.ndarray:
    """The ids that it predicts, but for those that are read and never written."""
    ids = sample.tokens[sample.scored :]
    return ids[ids < vocabulary]


def _within(samples: Iterator[Sample]) -> Iterator[Sample]:
    """As many as there is room for."""
    links = 0
    for sample in samples:
        links += (1 + sum(value.size for value in sample.request.values())) * sample.positions
        if links > MOST_LINKS:
            return
        yield sample


def _decode(model: Model, samples: Sequence[Sample], shortlist: bool) -> list[np.ndarray]:
    """Greedy results, without what decoding starts from."""
    results = model.generate_batch(
        [dict(sample.request) for sample in samples],
        num_beams=1,
        num_return_sequences=1,
        temperature=0.0,
        max_new_tokens=LONGEST,
        shortlist=shortlist,
    )
    return [np.array(result.token_ids, np.int64) for result in results]


def _speed(engine: Engine, sample: Sample) -> float:
    """How many times faster a step of one row is, by the medians of steps that alternate."""
    assert engine.shortlist is not None
    requests = {name: [value] for name, value in sample.request.items()}
    own = engine.shortlist.candidates(sample.request)
    first = sample.tokens[: sample.scored][None]
    states = [engine.start(requests, 1, candidates=candidates) for candidates in (None, [own])]
    times: tuple[list[float], list[float]] = ([], [])
    tokens = [engine.step(state, first).argmax(-1)[:, None] for state in states]
    for _ in range(min(REPEATS, engine.manifest.max_length - first.shape[1])):
        for spent, state, token in zip(times, states, tokens, strict=True):
            begin = time.perf_counter()
            engine.step(state, token)
            spent.append(time.perf_counter() - begin)
    if not times[0]:
        return 1.0
    return float(np.median(times[0]) / np.median(times[1]))
