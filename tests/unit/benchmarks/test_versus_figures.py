"""Figures of the benchmark of several engines: counts of the floor, rounds, ratios and tables equal counts by hand."""

from __future__ import annotations

import re

import pytest
from versus import chart, engines, readme_chart, table
from versus.client import PeerError
from versus.floor import encode, floors, prompt, room, step
from versus.measure import add, agreement, cosine, groups, ratios, rounds
from versus.shapes import ROWS, Case, Shape, inputs_of

GATED = Shape(
    "a decoder",
    "continue",
    vocabulary=10,
    width=4,
    heads=2,
    layers=2,
    feedforward=8,
    max_length=9,
    shared=1,
    gated=True,
)
BOTH = Shape("both", "translate", vocabulary=10, width=4, heads=2, layers=3, feedforward=6, max_length=9, target=7)


def test_work_of_a_decode_step_matches_hand_count():
    work = step(GATED, Case(batch=3, prompt=5, new=2), position=5)
    # A layer: queries and output 4 × 4 each, keys and values 4 × 2 each, three matrices of 4 × 8. Then 4 × 10.
    assert work.weights == 2 * (16 + 16 + 8 + 8 + 3 * 32) + 40
    assert work.rows == 3
    # 3 rows × 6 positions × 2 layers × (2 numbers of a key + 2 of a value) × 4 bytes
    assert work.cached == 3 * 6 * 2 * 4 * 4
    # 3 rows × 2 layers × 6 positions × 4 numbers of all query heads, for q·k and for a·v
    assert work.attended == 3 * 2 * 6 * 4 * 2
    assert [work.bytes(precision) for precision in ("fp32", "int8", "int4")] == [
        328 * 4 + 576, 328 + 576, 164 + 576,
    ]  # fmt: skip


def test_step_of_an_encoder_decoder_reads_the_source_once_for_all_beams():
    work = step(BOTH, Case(batch=2, prompt=5, new=4, beams=3), position=0)
    # A layer: four of 4 × 4 and two of 4 × 6; query and output of the attention to the source. Then 4 × 7.
    assert work.weights == 3 * (4 * 16 + 2 * 24 + 2 * 16) + 28
    assert work.rows == 6
    assert work.cached == 6 * 1 * 3 * 8 * 4 + 2 * 5 * 3 * 8 * 4
    assert encode(BOTH, Case(batch=2, prompt=5)).weights == 3 * (4 * 16 + 2 * 24 + 2 * 16)


def test_work_of_a_prompt_counts_earlier_positions_only():
    work = prompt(GATED, Case(batch=1, prompt=3))
    assert work.rows == 3
    assert work.attended == 2 * 4 * (1 + 2 + 3) * 2


def test_memory_of_a_case_matches_hand_count():
    # 2 layers × 2 numbers of a key and 2 of a value × 7 positions × 3 rows, and 2 heads × 5 × 5 scores × 3 rows: twice
    assert room(GATED, Case(batch=3, prompt=5, new=2)) == 4 * 2 * (2 * 4 * 7 * 3 + 2 * 25 * 3)
    assert room(GATED, Case(batch=3, prompt=5)) == 4 * 2 * 2 * 25 * 3  # a case without new tokens has no cache


def test_floor_is_the_slower_of_reading_and_multiplying():
    case = Case(batch=1, prompt=2, new=3)
    slow_to_read = floors(GATED, case, "int8", {"bandwidth": 1.0, "fp32": 1e9, "int8": 1e9})
    assert slow_to_read["step"] == (step(GATED, case, 2).bytes("int8") + step(GATED, case, 3).bytes("int8")) / 2
    slow_to_multiply = floors(GATED, case, "int8", {"bandwidth": 1e9, "fp32": 1e9, "int8": 2.0})
    assert slow_to_multiply["step"] == pytest.approx(328 / 2)
    assert slow_to_multiply["request"] == pytest.approx(slow_to_multiply["first"] + 2 * slow_to_multiply["step"])


class FakeWorker:
    """A worker that reports fixed seconds. It appends its name and the batch size of each request to `turns`."""

    def __init__(self, *seconds, name="", turns=(), fails_at=None):
        self.seconds, self.name, self.turns, self.fails_at, self.calls = list(seconds), name, turns, fails_at, 0

    def ask(self, do, case, inputs, min_seconds):
        assert do == "run"
        self.calls += 1
        if self.calls == self.fails_at:
            raise PeerError("it failed")
        if self.name:
            self.turns.append((self.name, case["batch"]))
        seconds = self.seconds[self.calls - 1]
        return {"seconds": seconds, "first": None, "processor": 2 * seconds}


def no_stolen_ticks():
    """Return processor ticks of other processes and of all processes."""
    return 0, 0


def test_first_round_is_discarded_and_ratios_compare_the_same_round():
    case = Case(1, 2, 3)
    workers = {
        "tformer": FakeWorker(99, 1, 2, 4),
        "other": FakeWorker(99, 3, 4, 20),
        "weak": FakeWorker(1, 1, 1, fails_at=2),
    }
    measured = rounds(workers, {case: inputs_of(GATED, case)}, repeats=3, budget=60, quiet=0, ticks=no_stolen_ticks)
    assert [value["request"] for value in measured.seconds[case]["tformer"]] == [1, 2, 4]
    # The median of 3, 2 and 5
    assert ratios(measured.seconds[case]["other"], measured.seconds[case]["tformer"]) == {"request": 3, "processor": 3}
    assert measured.failed[case] == {"weak": "it failed"}
    assert "weak" not in measured.seconds[case]


def test_round_has_all_cases_and_the_order_of_engines_alternates():
    turns = []
    workers = {name: FakeWorker(*[1.0] * 9, name=name, turns=turns) for name in ("a", "b")}
    rounds(workers, {Case(1, 2, 3): [[4]], Case(8, 2, 3): [[4]]}, repeats=2, budget=60, quiet=0, ticks=no_stolen_ticks)
    forward, backward = [("a", 1), ("b", 1), ("a", 8), ("b", 8)], [("b", 1), ("a", 1), ("b", 8), ("a", 8)]
    assert turns == [*backward, *forward, *backward]


def test_no_round_begins_after_the_time_budget():
    case, worker = Case(1, 2, 3), FakeWorker(*[1.0] * 9)
    measured = rounds({"tformer": worker}, {case: [[4, 5]]}, repeats=8, budget=0, quiet=0, ticks=no_stolen_ticks)
    assert len(measured.seconds[case]["tformer"]) == 3


def test_no_case_begins_after_the_end_of_the_run():
    done, late = Case(1, 2, 3), Case(8, 2, 3)
    ends = iter([False, False, False, True])  # the warm-up of both cases, one round of the first
    worker = FakeWorker(*[1.0] * 9)
    measured = rounds(
        {"tformer": worker}, {done: [[4]], late: [[4]]}, 1, budget=60, quiet=0, ticks=no_stolen_ticks,
        is_over=lambda: next(ends),
    )  # fmt: skip
    assert [value["request"] for value in measured.seconds[done]["tformer"]] == [1]
    assert measured.seconds[late] == {}
    assert measured.failed[late] == {"tformer": "no time was left"}


def test_disturbed_turn_is_repeated():
    case = Case(1, 2, 3)
    stolen_ticks = [0, 5, 0, 9, 8, 7, 9]  # of the 100 ticks of each turn, including the warm-up
    clock = iter([tick for i, stolen in enumerate(stolen_ticks) for tick in ((0, 100 * i), (stolen, 100 * i + 100))])
    measured = rounds(
        {"tformer": FakeWorker(99, 1, 2, 11, 12, 13, 14)},
        {case: [[4]]},
        2,
        budget=60,
        quiet=0,
        ticks=lambda: next(clock),
    )
    # The first turn is disturbed and its repetition is not. Of the four turns of the next round the third is the least
    # disturbed.
    assert [value["request"] for value in measured.seconds[case]["tformer"]] == [2, 13]
    assert measured.stolen[case]["tformer"] == [0, 0.07]


def test_agreement_counts_steps_with_equal_prefixes():
    source = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert agreement(source, source) == 1
    assert agreement([[1, 2, 9, 9], [5, 6, 7, 8]], source) == 6 / 7  # steps after a difference are not comparable
    assert cosine([[1.0, 0.0], [3.0, 4.0]], [[1.0, 0.0], [4.0, -3.0]]) == 0.5


def test_engines_are_grouped_by_their_memory():
    sizes = {"tformer": 3.0, "a": 4.0, "b": 2.0, "c": 9.0}
    assert groups(sizes, "tformer", room=20) == [["tformer", "a", "b", "c"]]
    assert groups(sizes, "tformer", room=10) == [["tformer", "a", "b"], ["tformer", "c"]]
    assert groups({"a": 1.0}, "tformer", room=10) == [["a"]]


# Rates of a machine that reads the bytes of a request in 16 ms: 22,020,096 weights of one byte for the encoder;
# 38,404,096 weights and 4,718,592 bytes of the context for each of 32 steps; n × 196,608 bytes of the cache for step n.
REQUEST_BYTES = 22_020_096 + 32 * (38_404_096 + 4_718_592) + 196_608 * sum(range(1, 33))
RATES = {"bandwidth": REQUEST_BYTES / 0.016, "fp32": 1e18, "int8": 1e18}
# The same for one row in 15 ms.
ONE_ROW_BYTES = 22_020_096 + 32 * (38_404_096 + 4_718_592 // 8) + 196_608 // 8 * sum(range(1, 33))
ONE_ROW_RATES = {**RATES, "bandwidth": ONE_ROW_BYTES / 0.015}


def records():
    row = ROWS[0]
    key = {"row": row.name, "precision": "int8"}
    case = {**key, "case": Case(8, 24, 32).to_dict()}
    return [
        {**case, "peer": "tformer", "seconds": {"request": [0.032, 0.04, 0.064]}, "ratio": {"request": 1.0}},
        {
            **case,
            "peer": "CTranslate2",
            "seconds": {"request": [0.02, 0.032, 0.048]},
            "ratio": {"request": 0.625},
        },
        {**key, "peer": "tformer", "bytes": 62e6, "agreement": 0.98, "peak": 2.4e8},
        {**key, "peer": "onnxruntime-genai", "error": "decoder-only models alone"},
        {**key, "case": "start", "peer": "tformer", "seconds": {"start": [0.3]}, "ratio": {"start": 1.0}},
        {**key, "case": "start", "peer": "bare onnxruntime", "seconds": {"start": [0.25]}, "ratio": {"start": 0.83}},
        {
            **key,
            "case": "file",
            "peer": "tformer",
            "seconds": {"file": [7.0, 9.0, 8.0], "processor": [12.0, 14.0, 13.0]},
            "ratio": {"file": 1.0, "processor": 1.0},
        },
        {**key, "case": "file", "peer": "OpenVINO", "error": "it wrote 3 results for 1000 texts"},
    ]


def test_table_has_times_ratios_shares_of_the_floor_and_errors():
    text = table.markdown(records(), RATES)
    assert "| int8 | batch 8, 24 tokens | 1.25 −20% (40%) | 1.00 −38% (0.62 ×, 50%) | 0.50 |" in text
    assert "| int8 | steps that choose the source's token | 98.0% | – |" in text
    assert "| int8 | seconds from the process's start to the results of a file of 1,000 texts | 8.00 | – |" in text
    assert "| int8 | the same, seconds of processor time | 13.00 | – |" in text
    assert "- OpenVINO (int8, file): it wrote 3 results for 1000 texts" in text
    assert "- onnxruntime-genai (int8): decoder-only models alone" in text
    assert "| int8 | seconds from the process's start to its first result | 0.30 | 0.25 |" in text


def test_table_has_processor_time_next_to_wall_clock_time():
    with_processor = {**records()[0], "seconds": {"request": [0.032], "processor": [0.064]}}
    text = table.markdown([with_processor], RATES)
    assert "milliseconds of processor time a step, of whole requests:\n\n|  |  | tformer |\n" in text
    assert "| int8 | batch 8, 24 tokens | 2.00 −0% |\n" in text


def test_faster_engines_are_listed_without_the_bare_session():
    ((ratio, text),) = table.behind(records())
    assert ratio == 0.625
    assert text.startswith("encoder-decoder 60M, int8, batch 8, 24 tokens, request: CTranslate2 took 0.62 ×")


def test_table_compares_results_with_targets_and_the_floor():
    latency = {**records()[0], "peer": "tformer, for latency", "ratio": {"request": 0.5}}
    text = table.markdown([*records(), latency], RATES)
    assert (
        "| encoder-decoder 60M | int8 | batch 8, 24 tokens, request | CTranslate2 | 3.00 × | 0.62 × | 1.25 × |" in text
    )
    case = {"case": Case(1, 24, 32).to_dict(), "seconds": {"request": [0.02]}}
    assert "| the floor | 80% | 75% | – |" in table.markdown([{**records()[0], **case}], ONE_ROW_RATES)


def test_records_of_one_engine_in_two_groups_are_merged():
    key = {"row": "a", "precision": "int8", "peer": "ours", "case": {}}
    one = {**key, "seconds": {"step": [1.0]}, "stolen": [0.0]}
    two = {**key, "seconds": {"step": [2.0, 3.0]}, "stolen": [0.1, 0.2]}
    other, failed = {**one, "peer": "other"}, {**key, "error": "no memory"}
    both = {**key, "seconds": {"step": [1.0, 2.0, 3.0]}, "stolen": [0.0, 0.1, 0.2]}
    for added, expected in (((one, two), both), ((failed, two), failed), ((one, failed), failed)):
        records = [other]
        for record in added:
            add(records, record)
        assert records == [other, expected]
    assert one["seconds"] == {"step": [1.0]}


def test_table_reports_time_taken_by_other_processes():
    shares = [{**record, "stolen": [0.0, 0.5, 0.01, 0.0]} for record in records()[:1]]
    assert "In 25% of the turns others took more than 2% of the processors' time, 50% at most." in table.markdown(
        shares, RATES
    )


def test_table_reports_figures_of_several_versions_of_the_code():
    mixed = [{**record, "code": code} for record, code in zip(records()[:3:2], ("one", "two"), strict=True)]
    assert "tformer was measured in 2 states of its code" in table.markdown(mixed, RATES)
    assert "states of its code" not in table.markdown([{**record, "code": "one"} for record in records()], RATES)


def test_model_files_are_rebuilt_after_a_change_of_the_code(tmp_path):
    calls = []

    def make(folder):
        calls.append(folder)
        (folder / "model.onnx").write_bytes(bytes(10))

    for code, times in (("one", 1), ("one", 1), ("two", 2)):
        assert engines.build_once(tmp_path / "file", make, code) == 10
        assert len(calls) == times


def test_chart_is_a_png_file(tmp_path):
    pytest.importorskip("matplotlib")
    chart.draw(records(), tmp_path / "chart.png", "a machine")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_chart_of_the_readme_has_the_figures_of_the_results(tmp_path):
    figures = readme_chart.published(readme_chart.RESULTS.read_text(encoding="utf-8"))
    assert list(figures) == list(readme_chart.ENGINES)
    readme_chart.draw(figures, tmp_path / "step.svg")
    drawn, kept = (
        re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))
        for path in (tmp_path / "step.svg", readme_chart.CHART)
    )
    assert drawn == kept  # else run tests/benchmarks/versus/readme_chart.py
    assert {f" {value:.2f} ms" for value in figures.values()} <= set(kept)
