"""The results as Markdown.

a table for each model, figures other than speed, and the cases where another engine is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from versus.client import BARE, OURS, PEERS, VARIANTS
from versus.floor import floors
from versus.measure import STOLEN, Record
from versus.shapes import ROWS, TEXTS, Case, Row
from versus.targets import COLUMNS, FLOOR, target_results

ORDER = [peer.name for peer in PEERS]
OTHERS = [peer.name for peer in PEERS if peer not in (OURS, *VARIANTS)]
LEGEND = (
    "The median round, and by how much the fastest of them was faster; in parentheses how many times as long as "
    "tformer it took in the same round, the median, and the share of the floor's speed. Fixed scales were learnt from "
    "random ids, as all inputs here are: what they cost in quality on real ones, the export of a real model tells."
)
TITLES = {
    ("translate", "request"): "milliseconds a step, of whole requests",
    ("translate", "processor"): "milliseconds of processor time a step, of whole requests",
    ("continue", "step"): "milliseconds a decode step",
    ("continue", "first"): "milliseconds to the first token",
    ("continue", "request"): "milliseconds a step, of whole requests with beams",
    ("continue", "processor"): "milliseconds of processor time a generated step, of whole requests",
    ("embed", "request"): "sentences a second",
    ("embed", "processor"): "milliseconds of processor time a sentence",
}


def markdown(records: Sequence[Record], rates: Mapping[str, float]) -> str:
    """Return the tables. rates: the result of `engines.rates`."""
    parts = []
    for row in ROWS:
        mine = [record for record in records if record["row"] == row.name]
        if mine:
            parts += [f"### {row.name}", *_speed(row, mine, rates), *_other_measures(row, mine), *_reasons(mine)]
    return (
        "\n\n".join(
            [*parts, *_targets(records, rates), *_behind(records), LEGEND, *_disturbed(records), *_mixed(records)]
        )
        + "\n"
    )


def _speed(row: Row, records: Sequence[Record], rates: Mapping[str, float]) -> Iterator[str]:
    for (kind, measure), title in TITLES.items():
        if kind != row.shape.kind:
            continue
        chosen = [record for record in records if _counts(record, row.shape.kind, measure)]
        columns = _columns(chosen)
        lines = []
        for precision in row.precisions:
            cases = {Case(**record["case"]) for record in chosen if record["precision"] == precision}
            for case in sorted(cases, key=lambda case: (case.prompt, case.beams, case.batch)):
                floor = floors(row.shape, case, precision, rates).get(measure)
                by_peer = {r["peer"]: r for r in chosen if r["precision"] == precision and Case(**r["case"]) == case}
                cells = [_cell(by_peer[name], case, measure, floor) if name in by_peer else "–" for name in columns]
                bound = [] if floor is None else [_number(_figure(floor, case, measure))]
                lines.append([precision, case.name, *cells, *bound])
        if lines:
            head = ["", "", *columns, *(() if measure == "processor" else ("floor",))]
            yield f"{title}:\n\n" + markdown_table(head, lines)


def _counts(record: Record, kind: str, measure: str) -> bool:
    """Return whether a record belongs to a table. Whole requests of a decoder count with beams only."""
    case = record.get("case")
    if not isinstance(case, dict) or measure not in record.get("seconds", ()):
        return False
    return measure != "request" or kind != "continue" or case["beams"] > 1


def _figure(seconds: float, case: Case, measure: str) -> float:
    """Return the figure of a cell.

    milliseconds of one step of a whole request; where nothing is generated, sentences per second, and milliseconds of
    processor time for a sentence.
    """
    if not case.new:
        return 1e3 * seconds / case.batch if measure == "processor" else case.batch / seconds
    return 1e3 * seconds / (case.new if measure in ("request", "processor") else 1)


def _cell(record: Record, case: Case, measure: str, floor: float | None) -> str:
    values = record["seconds"][measure]
    middle, ratio = statistics.median(values), record["ratio"].get(measure)
    ratio_text = "" if record["peer"] == OURS.name or ratio is None else f"{ratio:.2f} ×"
    notes = ", ".join(filter(None, [ratio_text, "" if floor is None else f"{floor / middle:.0%}"]))
    below = 1 - min(values) / middle
    return f"{_number(_figure(middle, case, measure))} −{below:.0%}" + (f" ({notes})" if notes else "")


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _columns(records: Iterable[Record]) -> list[str]:
    names = {record["peer"] for record in records}
    return [name for name in [*ORDER, BARE.name] if name in names]


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return one table. head: the titles of the columns."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


OTHER_MEASURES = {
    "agreement": ("steps that choose the source's token", "{:.1%}", 1),
    "perplexity": ("perplexity, × the source's", "{:.4f}", 1),
    "cosine": ("cosine to the source's vectors", "{:.5f}", 1),
    "bytes": ("files, MB", "{:.0f}", 1e-6),
    "peak": ("peak memory of the process, MB", "{:.0f}", 1e-6),
}


PROCESSES = {
    "start": ("seconds from the process's start to its first result", "the same, seconds of processor time"),
    "file": (
        f"seconds from the process's start to the results of a file of {TEXTS:,} texts",
        "the same, seconds of processor time",
    ),
}


def _other_measures(row: Row, records: Sequence[Record]) -> Iterator[str]:
    """Return the table of quality, memory, starts, and the cost of many cached tokens."""
    of_models = [record for record in records if "case" not in record and "bytes" in record]
    whole = [record for record in records if isinstance(record.get("case"), str) and "seconds" in record]
    columns = _columns([*of_models, *whole])
    lines = []
    for precision in row.precisions:
        by_peer = {record["peer"]: record for record in of_models if record["precision"] == precision}
        for name, (title, form, factor) in OTHER_MEASURES.items():
            if any(name in record for record in by_peer.values()):
                cells = (form.format(by_peer[c][name] * factor) if name in by_peer.get(c, ()) else "–" for c in columns)
                lines.append([precision, title, *cells])
        lines += _process_lines([record for record in whole if record["precision"] == precision], precision, columns)
        longer = _longer(records, precision)
        if longer:
            title, step_ratios = longer
            cells = (f"{step_ratios[c]:.2f} ×" if c in step_ratios else "–" for c in columns)
            lines.append([precision, title, *cells])
    if lines:
        yield "Quality, size, memory and start:\n\n" + markdown_table(["", "", *columns], lines)


def _process_lines(records: Sequence[Record], precision: str, columns: Sequence[str]) -> Iterator[list[str]]:
    """Return the lines of whole processes: wall-clock and processor time of each case."""
    for case, titles in PROCESSES.items():
        for measure, title in zip((case, "processor"), titles, strict=True):
            seconds = {
                record["peer"]: statistics.median(record["seconds"][measure])
                for record in records
                if record["case"] == case and measure in record["seconds"]
            }
            if seconds:
                cells = (f"{seconds[c]:.2f}" if c in seconds else "–" for c in columns)
                yield [precision, title, *cells]


def _longer(records: Sequence[Record], precision: str) -> tuple[str, dict[str, float]] | None:
    """Return the time of a step of one row with the most cached tokens over that with the fewest."""
    steps: dict[str, dict[int, float]] = {}
    for record in records:
        seconds, case = record.get("seconds", {}), record.get("case")
        if record["precision"] == precision and "step" in seconds and case["batch"] == 1:
            steps.setdefault(record["peer"], {})[case["prompt"]] = statistics.median(seconds["step"])
    prompts = sorted({prompt for values in steps.values() for prompt in values})
    if len(prompts) < 2:
        return None
    few, many = prompts[0], prompts[-1]
    ratios = {name: values[many] / values[few] for name, values in steps.items() if {few, many} <= set(values)}
    return f"a step after {many:,} tokens, over one after {few}", ratios


def _reasons(records: Sequence[Record]) -> Iterator[str]:
    """Return the reasons of empty columns and cells."""
    cases: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if "error" in record:
            case = record.get("case")
            named = Case(**case).name if isinstance(case, dict) else case
            where = ", ".join(filter(None, [record["precision"], named]))
            cases.setdefault((record["peer"], record["error"]), []).append(where)
    if cases:
        yield "\n".join(f"- {peer} ({'; '.join(where)}): {why}" for (peer, why), where in cases.items())


def behind(records: Sequence[Record]) -> list[tuple[float, str]]:
    """Return (ratio, sentence) for each figure in which another engine took less time than tformer, the worst first."""
    kinds = {row.name: row.shape.kind for row in ROWS}
    slower = []
    for record in records:
        for measure, ratio in record.get("ratio", {}).items():
            case: Any = record["case"]
            kind = kinds.get(record["row"], "")
            is_compared = (
                case in PROCESSES
                if isinstance(case, str)
                else ((kind, measure) in TITLES and _counts(record, kind, measure))
            )
            if record["peer"] in OTHERS and is_compared and ratio < 1:
                named = case if isinstance(case, str) else Case(**case).name
                where = named if measure == case else f"{named}, {measure}"
                sentence = (
                    f"{record['row']}, {record['precision']}, {where}: {record['peer']} took {ratio:.2f} × as long"
                )
                slower.append((ratio, sentence))
    return sorted(slower)


def _targets(records: Sequence[Record], rates: Mapping[str, float]) -> Iterator[str]:
    """Return the table of targets and measured figures."""
    lines = []
    for one in target_results(records, rates):
        form = "{:.0%}" if one.peer == FLOOR else "{:.2f} ×"
        cells = [form.format(one.times[name]) if name in one.times else "–" for name in COLUMNS]
        named = [one.row, one.precision, f"{one.case.name}, {one.measure}"]
        lines.append([*named, one.peer, form.format(one.target_ratio), *cells])
    if lines:
        yield "### Targets\n\n" + markdown_table(["", "", "", "compared with", "target", *COLUMNS], lines)


def _disturbed(records: Sequence[Record]) -> Iterator[str]:
    """Return the sentence on stolen processor time."""
    shares = [share for record in records for share in record.get("stolen", ())]
    if shares:
        many = sum(share > STOLEN for share in shares) / len(shares)
        share = f"more than {STOLEN:.0%} of the processors' time, {max(shares):.0%} at most"
        yield f"In {many:.0%} of the turns others took {share}."


def _mixed(records: Sequence[Record]) -> Iterator[str]:
    """Return the sentence on figures of different versions of tformer."""
    mine = {peer.name for peer in (OURS, *VARIANTS)}
    codes = {record["code"] for record in records if record["peer"] in mine and "code" in record}
    if len(codes) > 1:
        yield f"tformer was measured in {len(codes)} states of its code: measure again for a table of one."


def _behind(records: Sequence[Record]) -> Iterator[str]:
    lines = [f"- {sentence}" for _, sentence in behind(records)]
    if lines:
        yield "### Cases where another engine is faster\n\n" + "\n".join(lines)
