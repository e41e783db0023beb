"""A vocabulary shortlist: which ids may come for a request, so that a step need not compute the logits of all others.

The file holds, learned from data, the ids that are common in all targets, and for each source id those that go with it
(`tformer_export/shortlist/learn.py`). A request's candidates are the common ids, those of its source ids, and what its
own options name. A row has logits at its candidates and -inf elsewhere, so that what it yields is its own, whoever is
beside it; and where it has one, its logit is that of the full projection.

How it is computed is another matter. If the candidates of all rows together are few enough, their columns of the output
projection are gathered once, and each step multiplies with these; else all columns are computed. The result is the
same: with integers bit for bit, in float32 but for the order of sums.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.base.errors import MemoryBudgetError, ModelFileError
from tformer_runtime.engine.memory_budget import Share

KEY = "tformer.shortlist"  # of the file's metadata
PAYS, FEW = 1 / 8, 256  # of all columns, or columns: so many are gathered
SPARE = 2  # times as many columns as the rows need, and they are gathered anew

WAIT = 2  # calls after rows have come or gone: each gathering costs about a call, and others may follow

Table = tuple[Ints, npt.NDArray[np.int32]]


@dataclass(frozen=True, eq=False)
class Shortlist:
    """vocabulary: how many ids there are. common: ids that any request may have. tables: request input → (starts, ids),
    where the candidates of its id i are ids[starts[i] : starts[i + 1]]."""

    vocabulary: int
    common: Ints
    tables: Mapping[str, Table]

    def candidates(self, sources: Mapping[str, Array], named: Sequence[int] = ()) -> Ints:
        """Of one request, in order. sources: its inputs, without the batch axis. named: ids that it wants besides.

        Cost: one pass over the vocabulary's bits, and over the candidates of each source id.
        """
        chosen = np.zeros(self.vocabulary, np.bool_)
        chosen[self.common] = True
        for name, (starts, ids) in self.tables.items():
            own = np.unique(sources[name]).tolist()
            for i in own:
                if 0 <= i < len(starts) - 1:
                    chosen[ids[starts[i] : starts[i + 1]]] = True
        chosen[[i for i in named if 0 <= i < self.vocabulary]] = True
        return np.flatnonzero(chosen)

    def to_text(self) -> str:
        """As numpy's archive of arrays, without the time at which it was made, in letters."""
        arrays: dict[str, Array] = {"vocabulary": np.array(self.vocabulary), "common": self.common}
        for name, (starts, ids) in self.tables.items():
            arrays |= {f"starts/{name}": starts, f"ids/{name}": ids}
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                content = io.BytesIO()
                np.save(content, array)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), zipfile.ZIP_DEFLATED)
        return base64.b64encode(file.getvalue()).decode()

    @classmethod
    def from_text(cls, text: str) -> Shortlist:
        """ModelFileError if it is damaged."""
        try:
            with np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False) as arrays:
                names = [name.removeprefix("ids/") for name in arrays.files if name.startswith("ids/")]
                tables = {name: (arrays[f"starts/{name}"], arrays[f"ids/{name}"]) for name in names}
                return cls(int(arrays["vocabulary"]), arrays["common"], tables)
        except (ValueError, KeyError, OSError, EOFError, zlib.error, binascii.Error, zipfile.BadZipFile) as error:
            raise ModelFileError("the file's shortlist is damaged: export the model again") from error


class Candidates:
    """The candidates of a state's rows, and the columns of the projection that are gathered for them.

    rows: each row's candidates in order, the same array for rows of one request; None for a row that wants all ids.
    ids: the columns that are gathered, in order; none while all are computed. weight: their OrtValue. wanted: those
    that are to be gathered, if any, by a call that finds them `due`. Their bytes are taken from `budget`; where there
    are none left, all columns are computed.
    """

    nbytes = 0

    def __init__(self, rows: Sequence[Ints | None], vocabulary: int, bytes_each: int, budget: Share) -> None:
        """bytes_each: of a gathered column."""
        self.rows, self.vocabulary, self.bytes_each, self.budget = list(rows), vocabulary, bytes_each, budget
        self._waits = 0  # of the first, encode gathers
        self.ids: Ints = _NONE
        self.weight: Any = None
        self.wanted: Ints | None = None
        self._seen: frozenset[int] = frozenset()
        self._plan()

    def reorder(self, rows: Ints) -> bool:
        """Row i becomes what row rows[i] was. True if other columns are to be computed."""
        self.rows = [self.rows[i] for i in rows.tolist()]
        return self._plan()

    def join(self, other: Candidates) -> None:
        """Append the other's rows; the other is released."""
        self.rows += other.rows
        other.release()
        self._plan()

    def copy(self, rows: Ints, budget: Share) -> Candidates:
        return Candidates([self.rows[i] for i in rows.tolist()], self.vocabulary, self.bytes_each, budget)

    def due(self) -> bool:
        """Whether the next call is to gather the wanted columns. To be asked once a call."""
        self._waits -= 1
        return self.wanted is not None and self._waits <= 0

    def hold(self, weight: Any) -> None:
        """Take what was gathered of the wanted columns."""
        assert self.wanted is not None
        self.ids, self.weight, self.wanted = self.wanted, weight, None

    def release(self) -> None:
        """Give the memory back."""
        self._drop()
        self.budget.give(self.nbytes)
        self.nbytes = 0

    def __del__(self) -> None:
        if self.nbytes:  # not when an interrupt came before there was anything to give back
            self.release()

    def _drop(self) -> None:
        self.ids, self.weight, self.wanted = _NONE, None, None

    def _plan(self) -> bool:
        """Say what is to be gathered. Nothing to do while the rows are those of the same requests."""
        seen = frozenset(map(id, self.rows))
        if seen == self._seen:
            return False
        self._seen = seen
        need = together(self.rows, self.vocabulary)
        if need is None or not 0 < len(need) <= most_columns(self.vocabulary):
            self.release()
            return True
        if len(need) <= len(self.ids) <= SPARE * len(need) and np.isin(need, self.ids).all():
            return False
        self._drop()
        try:
            self.budget.take(len(need) * self.bytes_each - self.nbytes)
        except MemoryBudgetError:
            self.release()
            return True
        self.nbytes, self.wanted, self._waits = len(need) * self.bytes_each, need, WAIT
        return True


def most_columns(vocabulary: int) -> int:
    """More than that are not gathered, as all are computed as fast."""
    return int(max(PAYS * vocabulary, min(FEW, vocabulary / 4)))


_NONE: Ints = np.zeros(0, np.int64)


def together(rows: Sequence[Ints | None], vocabulary: int) -> Ints | None:
    """The candidates of all rows, in order; None if a row wants all ids."""
    distinct = {id(own): own for own in rows}
    if any(own is None for own in distinct.values()):
        return None
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    chosen = np.zeros(vocabulary, np.bool_)
    for own in distinct.values():
        chosen[own] = True
    return np.flatnonzero(chosen)


class Spread:
    """From the columns that were computed to rows of the whole vocabulary, -inf where a row has no candidate.

    Cost of a call: the candidates of each row; where the rows' requests have changed, a pass over the vocabulary too.
    """

    def __init__(self, rows: int, positions: int, vocabulary: int) -> None:
        self.logits: F32 = np.full((rows, positions, vocabulary), -np.inf, np.float32)
        self._of: list[Ints | None] | None = None
        self._to: Ints = _NONE
        self._from: Ints = _NONE
        self._whole: list[int] = []  # rows that have all ids

    def __call__(self, computed: F32, columns: Ints, candidates: Sequence[Ints | None]) -> F32:
        """computed: (rows, positions, columns), of these ids, or of all if there are none; always the same. candidates:
        of each row. The array that is returned is overwritten by the next call."""
        if self._of is None or not all(a is b for a, b in zip(self._of, candidates, strict=True)):
            self._arrange(computed.shape[-1], columns, candidates)
        self.logits.reshape(-1)[self._to] = computed.reshape(-1)[self._from]
        for row in self._whole:
            self.logits[row] = computed[row]
        return self.logits

    def _arrange(self, width: int, columns: Ints, candidates: Sequence[Ints | None]) -> None:
        if self._of is not None:
            self.logits.fill(-np.inf)
        self._of = list(candidates)
        _, positions, vocabulary = self.logits.shape
        self._whole = [row for row, ids in enumerate(self._of) if ids is None]
        own = [(row, ids) for row, ids in enumerate(self._of) if ids is not None]
        places = {id(ids): np.searchsorted(columns, ids) if len(columns) else ids for _, ids in own}
        lines = [(ids, row * positions + at) for row, ids in own for at in range(positions)]
        self._to = np.concatenate([_NONE, *(ids + line * vocabulary for ids, line in lines)])
        self._from = np.concatenate([_NONE, *(places[id(ids)] + line * width for ids, line in lines)])
