"""A vocabulary shortlist: the candidate ids of a request, so that a step computes only their logits.

The file has tables, learned from data: the ids that are common in all targets, and for each source id the target ids
that occur with it (`tformer_export/shortlist/learn.py`). The candidates of a request are the common ids, the ids of its
source ids, and the ids that its options name. A row has logits for its candidates and -inf for all other ids. So its
result does not depend on the other rows of the batch. The logit of a candidate is that of the full projection.

If the candidates of all rows together are few enough, their columns of the output projection are gathered once, and
each step multiplies with these columns. Otherwise each step computes all columns. The results are equal: with integers
bit for bit, in float32 up to the order of sums.
"""

from __future__ import annotations

import binascii
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from tformer_runtime.base.arrays import F32, Array, Ints
from tformer_runtime.base.errors import MemoryBudgetError, ModelFileError, error_summary
from tformer_runtime.engine.memory_budget import MemoryShare

SHORTLIST_KEY = "tformer.shortlist"  # of the file's metadata
MAX_UNPACKED_BYTES = 1 << 29  # of all tables; a small compressed archive could fill the memory
MAX_CANDIDATE_SHARE = 1 / 8  # of all columns; if the candidates are more, gathering them saves no time
MIN_CANDIDATE_COLUMNS = 256  # this number of columns is gathered even if its share is greater
MAX_COLUMN_RATIO = 2  # columns are gathered again if they are more than this multiple of the rows' candidates
GATHER_DELAY_CALLS = 2  # calls between a change of rows and gathering, which costs about a call: rows may change again

_DAMAGE = (  # errors of binascii, numpy and zlib for a text that they cannot read, without a common base
    *(ValueError, TypeError, KeyError, OSError, EOFError, OverflowError, NotImplementedError, RuntimeError),
    *(zlib.error, binascii.Error),
)

Table = tuple[Ints, npt.NDArray[np.int32]]  # starts, ids: source id i has the candidates ids[starts[i] : starts[i + 1]]


class Shortlist(Struct, frozen=True, eq=False):
    """The tables of a shortlist.

    vocabulary: the number of ids.
    common: ids that are candidates of every request.
    tables: name of a request input → candidates of each of its ids.
    """

    vocabulary: int
    common: Ints
    tables: Mapping[str, Table]

    def candidates(self, sources: Mapping[str, Array], named: Sequence[int] = ()) -> Ints:
        """Return the candidates of one request, in order.

        sources: its inputs, without the batch axis.
        named: further ids that its options name.
        Cost: one pass over an array of booleans for the vocabulary, and over the candidates of each source id.
        """
        chosen = np.zeros(self.vocabulary, np.bool_)
        chosen[self.common] = True
        for name, (starts, ids) in self.tables.items():
            for i in np.unique(sources[name]).tolist():
                if 0 <= i < len(starts) - 1:
                    chosen[ids[starts[i] : starts[i + 1]]] = True
        chosen[[i for i in named if 0 <= i < self.vocabulary]] = True
        return np.flatnonzero(chosen)

    def to_text(self) -> str:
        """Return a numpy archive of the arrays as base64 text, without a time stamp."""
        import zipfile  # takes 5 ms to import

        arrays: dict[str, Array] = {"vocabulary": np.array(self.vocabulary), "common": self.common}
        for name, (starts, ids) in self.tables.items():
            arrays |= {f"starts/{name}": starts, f"ids/{name}": ids}
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                content = io.BytesIO()
                np.save(content, array)
                archive.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), zipfile.ZIP_DEFLATED)
        return binascii.b2a_base64(file.getvalue(), newline=False).decode()

    @classmethod
    def from_text(cls, text: str) -> Shortlist:
        """Read the result of `to_text`. Raise ModelFileError if it is damaged."""
        import zipfile

        try:
            file = io.BytesIO(binascii.a2b_base64(text, strict_mode=True))
            with zipfile.ZipFile(file) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > MAX_UNPACKED_BYTES:
                    raise ValueError("its tables are too large")
            with np.load(file, allow_pickle=False) as arrays:
                names = [name.removeprefix("ids/") for name in arrays.files if name.startswith("ids/")]
                tables = {name: (arrays[f"starts/{name}"], arrays[f"ids/{name}"]) for name in names}
                shortlist = cls(int(arrays["vocabulary"]), arrays["common"], tables)
            shortlist._check()
        except (*_DAMAGE, zipfile.BadZipFile) as error:
            raise ModelFileError(
                f"the file's shortlist is damaged ({error_summary(error)}): export the model again"
            ) from error
        return shortlist

    def _check(self) -> None:
        """Raise ValueError for arrays of another form: a stranger may have written them."""
        ids: list[Array] = [self.common, *(ids for _, ids in self.tables.values())]
        starts: list[Array] = [starts for starts, _ in self.tables.values()]
        if any(array.ndim != 1 or array.dtype.kind != "i" for array in (*ids, *starts)):
            raise ValueError("its tables are not lists of ids")
        if any(len(array) and not 0 <= array.min() <= array.max() < self.vocabulary for array in ids):
            raise ValueError("its tables hold ids outside the vocabulary")
        for begin, (_, listed) in zip(starts, self.tables.values(), strict=True):
            if not len(begin) or begin[0] < 0 or begin[-1] > len(listed) or (np.diff(begin) < 0).any():
                raise ValueError("its tables do not follow each other")


class Candidates:
    """The candidates of a state's rows, and the columns of the projection that are gathered for them.

    The bytes of the columns are acquired from `budget`. If it has too few, steps compute all columns.

    rows: the candidates of each row in order, the same array for rows of one request; None for a row with all ids.
    ids: the ids of the gathered columns, in order; empty while steps compute all columns.
    weight: the OrtValue of the gathered columns.
    pending_ids: ids of columns to gather, by the call for which `should_gather` is true; None for no columns.
    """

    nbytes = 0

    def __init__(self, rows: Sequence[Ints | None], vocabulary: int, column_bytes: int, budget: MemoryShare) -> None:
        """column_bytes: bytes of one gathered column."""
        self.rows, self.vocabulary, self.column_bytes, self.budget = list(rows), vocabulary, column_bytes, budget
        self._calls_until_gather = 0  # encode gathers the first columns, without delay
        self.ids: Ints = _NO_IDS
        self.weight: Any = None
        self.pending_ids: Ints | None = None
        self._planned_rows: frozenset[int] = frozenset()
        self._plan_gather()

    def reorder(self, rows: Ints) -> bool:
        """Replace row i by row rows[i]. Return whether steps must compute other columns."""
        self.rows = [self.rows[i] for i in rows.tolist()]
        return self._plan_gather()

    def join(self, other: Candidates) -> None:
        """Append the rows of `other` and release it."""
        self.rows += other.rows
        other.release()
        self._plan_gather()

    def copy(self, rows: Ints, budget: MemoryShare) -> Candidates:
        """Return new candidates whose row i is row rows[i] of these."""
        return Candidates([self.rows[i] for i in rows.tolist()], self.vocabulary, self.column_bytes, budget)

    def should_gather(self) -> bool:
        """Return whether the next call must gather the pending columns. Must be called once for each call."""
        self._calls_until_gather -= 1
        return self.pending_ids is not None and self._calls_until_gather <= 0

    def set_gathered(self, weight: Any) -> None:
        """Store the OrtValue of the pending columns after they were gathered."""
        assert self.pending_ids is not None
        self.ids, self.weight, self.pending_ids = self.pending_ids, weight, None

    def release(self) -> None:
        """Free the columns and their bytes in the budget."""
        self._drop_columns()
        self.budget.release(self.nbytes)
        self.nbytes = 0

    def __del__(self) -> None:
        if self.nbytes:  # 0 if an interrupt ended the constructor
            self.release()

    def _drop_columns(self) -> None:
        self.ids, self.weight, self.pending_ids = _NO_IDS, None, None

    def _plan_gather(self) -> bool:
        """Set the pending columns, unless the rows belong to the same requests as at the last call.

        Return whether steps must compute other columns.
        """
        distinct_rows = frozenset(map(id, self.rows))
        if distinct_rows == self._planned_rows:
            return False
        self._planned_rows = distinct_rows
        ids = union_of_candidates(self.rows, self.vocabulary)
        if ids is None or not 0 < len(ids) <= max_columns(self.vocabulary):
            self.release()
            return True
        if len(ids) <= len(self.ids) <= MAX_COLUMN_RATIO * len(ids) and np.isin(ids, self.ids).all():
            return False
        self._drop_columns()
        nbytes = len(ids) * self.column_bytes
        try:
            self.budget.acquire(nbytes - self.nbytes)
        except MemoryBudgetError:
            self.release()
            return True
        self.nbytes, self.pending_ids, self._calls_until_gather = nbytes, ids, GATHER_DELAY_CALLS
        return True


def max_columns(vocabulary: int) -> int:
    """Return the upper limit of gathered columns. With more candidates, computing all columns is as fast."""
    return int(max(MAX_CANDIDATE_SHARE * vocabulary, min(MIN_CANDIDATE_COLUMNS, vocabulary / 4)))


_NO_IDS: Ints = np.zeros(0, np.int64)


def union_of_candidates(rows: Sequence[Ints | None], vocabulary: int) -> Ints | None:
    """Return the candidates of all rows together, in order; None if a row may have any id."""
    distinct = {id(ids): ids for ids in rows}
    if any(ids is None for ids in distinct.values()):
        return None
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    chosen = np.zeros(vocabulary, np.bool_)
    for ids in distinct.values():
        chosen[ids] = True
    return np.flatnonzero(chosen)


class LogitScatter:
    """Scatters the computed columns to logits of the whole vocabulary, with -inf for ids that are not candidates.

    A call costs one copy of the candidates of each row. After a change of the rows' requests it also costs a pass over
    the vocabulary.
    """

    def __init__(self, rows: int, positions: int, vocabulary: int) -> None:
        self.logits: F32 = np.full((rows, positions, vocabulary), -np.inf, np.float32)
        self._candidates: list[Ints | None] | None = None
        self._target_indices: Ints = _NO_IDS
        self._source_indices: Ints = _NO_IDS
        self._unrestricted_rows: list[int] = []  # rows that may have any id

    def __call__(self, computed: F32, columns: Ints, candidates: Sequence[Ints | None]) -> F32:
        """Return (rows, positions, vocabulary). The next call overwrites this array.

        computed: (rows, positions, columns).
        columns: the ids of the columns, the same in every call; empty if these are all ids.
        candidates: of each row.
        """
        if self._candidates is None or not all(a is b for a, b in zip(self._candidates, candidates, strict=True)):
            self._build_indices(computed.shape[-1], columns, candidates)
        self.logits.reshape(-1)[self._target_indices] = computed.reshape(-1)[self._source_indices]
        for row in self._unrestricted_rows:
            self.logits[row] = computed[row]
        return self.logits

    def _build_indices(self, width: int, columns: Ints, candidates: Sequence[Ints | None]) -> None:
        """Set the indices of the candidates in the logits and in the computed columns. width: number of columns."""
        if self._candidates is not None:
            self.logits.fill(-np.inf)
        self._candidates = list(candidates)
        _, positions, vocabulary = self.logits.shape
        self._unrestricted_rows = [row for row, ids in enumerate(self._candidates) if ids is None]
        restricted = [(row, ids) for row, ids in enumerate(self._candidates) if ids is not None]
        column_of = {id(ids): np.searchsorted(columns, ids) if len(columns) else ids for _, ids in restricted}
        lines = [(ids, row * positions + i) for row, ids in restricted for i in range(positions)]
        self._target_indices = np.concatenate([_NO_IDS, *(ids + line * vocabulary for ids, line in lines)])
        self._source_indices = np.concatenate([_NO_IDS, *(column_of[id(ids)] + line * width for ids, line in lines)])
