"""Targets of tformer on two cores with AVX-512 VNNI, and the measured figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from versus.client import FIXED, OURS, VARIANTS
from versus.floor import floors
from versus.measure import Record
from versus.shapes import ROWS, Case, Row

FLOOR = "the floor"
COLUMNS = tuple(peer.name for peer in (OURS, *VARIANTS) if peer != FIXED)  # with a scale for each row, as in the peers


@dataclass(frozen=True)
class Target:
    """A target.

    times: batch → the ratio to reach, to a peer or to the floor. kinds: of models. prompt: None for any.
    """

    kinds: tuple[str, ...]
    precisions: tuple[str, ...]
    peers: tuple[str, ...]
    measure: str
    times: Mapping[int, float]
    beams: int = 1
    prompt: int | None = None

    def meant(self, row: Row, precision: str, case: Case) -> bool:
        named = row.shape.kind in self.kinds and precision in self.precisions and case.batch in self.times
        return named and case.beams == self.beams and self.prompt in (None, case.prompt)


TARGETS = (
    Target(("translate",), ("int8",), ("CTranslate2",), "request", {1: 4.0, 8: 3.0, 32: 1.8}),
    Target(("translate",), ("int8",), ("CTranslate2",), "request", {1: 4.0, 8: 2.0}, beams=4),
    Target(("translate",), ("fp32",), ("CTranslate2",), "request", {1: 1.8, 8: 1.8, 32: 2.5}),
    Target(("continue",), ("fp32", "int4"), ("onnxruntime-genai",), "step", {1: 1.3, 8: 2.0, 32: 2.0}),
    Target(("continue",), ("fp32", "int4"), ("onnxruntime-genai",), "first", {1: 1.5, 8: 1.5}, prompt=256),
    Target(("embed",), ("int8",), ("CTranslate2", "optimum-onnx"), "request", {1: 1.3, 8: 1.3, 32: 1.3}),
    Target(("translate",), ("fp32", "int8", "int4"), (FLOOR,), "request", {1: 0.8}),
    Target(("continue",), ("fp32", "int8", "int4"), (FLOOR,), "step", {1: 0.8}),
)


@dataclass(frozen=True)
class TargetResult:
    """A measured target. target_ratio: to be reached. times: our column → the measured ratio to `peer`."""

    row: str
    precision: str
    case: Case
    measure: str
    peer: str
    target_ratio: float
    times: Mapping[str, float]


def target_results(records: Sequence[Record], rates: Mapping[str, float]) -> Iterator[TargetResult]:
    """Return the measured targets. g2p, a model of the repository, has none."""
    timed = [record for record in records if isinstance(record.get("case"), dict) and "seconds" in record]
    for row in (row for row in ROWS if not row.shape.trained):
        for precision in row.precisions:
            mine = [record for record in timed if (record["row"], record["precision"]) == (row.name, precision)]
            for case in row.cases:
                by_peer = {record["peer"]: record for record in mine if Case(**record["case"]) == case}
                for target in (target for target in TARGETS if target.meant(row, precision, case)):
                    for peer in target.peers:
                        if peer == FLOOR:
                            times = _of_floor(by_peer, target.measure, floors(row.shape, case, precision, rates))
                        else:
                            times = _of_peer(by_peer, target.measure, peer)
                        if times:
                            target_ratio = target.times[case.batch]
                            yield TargetResult(row.name, precision, case, target.measure, peer, target_ratio, times)


def _of_peer(by_peer: Mapping[str, Record], measure: str, peer: str) -> dict[str, float]:
    """Return the ratios of each column in the rounds of the default column."""
    theirs = by_peer.get(peer, {}).get("ratio", {}).get(measure)
    return {name: theirs / by_peer[name]["ratio"][measure] for name in COLUMNS if name in by_peer} if theirs else {}


def _of_floor(by_peer: Mapping[str, Record], measure: str, floor: Mapping[str, float]) -> dict[str, float]:
    return {n: floor[measure] / statistics.median(by_peer[n]["seconds"][measure]) for n in COLUMNS if n in by_peer}
