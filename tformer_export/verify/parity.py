"""The parity gate: the written file, run by `tformer_runtime`, is compared with the source model.

Each case feeds rows of different lengths as a right-padded prompt and then token by token, at sizes that were not
traced, and compares every row's logits with the source model's on that row alone. Then both decode greedily: wherever
the source's two best tokens differ by more than the error, the file must choose the same token.

Allowed: max |Δlogit| ≤ 1e-3 of its unit (`tformer_export.verify.differences`): of the spread of the logits that can be
    chosen at its position. Float32 kernels that sum in another order differ by about depth · 2⁻²⁴ of the summed values,
    1e-6 to 1e-5 of the spread; a missing position or a wrong mask by 1e-2 and more.

A file in half precision is compared twice: before its numbers are rounded, as above, which proves its computation, and
after, which measures its accuracy. Then more is allowed, see `ParityGate.sensitivity`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tformer_export.analysis.input_facts import InputFacts
from tformer_export.sources import Source
from tformer_export.staging.difference_locator import DifferenceLocator
from tformer_export.verify.differences import logit_differences, number_differences
from tformer_export.verify.forecasts import check_forecasts
from tformer_export.verify.input_draws import InputDraws
from tformer_export.verify.long_row import affordable_row, longest_length
from tformer_export.verify.report import TOLERANCE, ParityReport
from tformer_export.verify.teacher_forcing import by_name, decode_greedily, run_case
from tformer_export.verify.torch_reference import rounded_weights
from tformer_runtime.base.errors import InputError, ModelFileError, ParityError, UnsupportedModelError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.state import State
from tformer_runtime.format.dtypes import to_numeric
from tformer_runtime.format.manifest import ADAPTER_INPUT
from tformer_runtime.preprocess.inputs import Inputs
from tformer_runtime.preprocess.series import SeriesPreprocessor

MAX_TOLERANCE = 0.5  # of the logits' range; a comparison in half precision with more would prove nothing
ROUNDINGS = 6.0  # allowed error of half precision, relative to rounding the weights: see `ParityGate.sensitivity`
CASE_STEPS = 5
GREEDY_STEPS = 12
LONG_SOURCE = 96
RAGGED_ROWS = "ragged rows"
ADAPTERS = "a row for each adapter"
LONG_ROW = "a long row"
RAGGED_LENGTHS = (6, 11, 2, 8)  # lengths of rows that run together
ITEMS = (2, 0, 1, 3)  # items with placeholders, such as images, of the rows of a case
MAX_CHECKED_LENGTH = 1024  # tokens of the longest compared prompt; tables beyond are proven but not run


@dataclass(frozen=True)
class Case:
    """A case of the gate.

    prompts: the length of each row's prompt.
    steps: the number of single tokens after it.
    sources: the length of each row's request inputs.
    left_out: inputs that the request leaves out, and that the source is called without.
    """

    name: str
    prompts: tuple[int, ...]
    steps: int
    sources: tuple[int, ...]
    left_out: tuple[str, ...] = ()


def cases(max_length: int) -> list[Case]:
    """Return the cases: one row, ragged rows, and a long prompt, within the maximum length."""
    checked_length = min(MAX_CHECKED_LENGTH, max_length)
    steps = max(1, min(CASE_STEPS, checked_length - 1))
    max_prompt = checked_length - steps

    def clip(*lengths: int) -> tuple[int, ...]:
        return tuple(min(n, max_prompt) for n in lengths)

    return [
        Case("one row", clip(1), steps, (4,)),
        Case(RAGGED_ROWS, clip(2, 7, 1, 4), steps, RAGGED_LENGTHS),
        Case("long prompt", (max_prompt,), steps, (LONG_SOURCE,)),
    ]


def _name_without(left_out: Sequence[str]) -> str:
    return f"without {' and '.join(left_out)}"


class ParityGate(InputDraws):
    """Runs the cases. tolerance: the allowed max |Δlogit|, over the logits' range."""

    def __init__(
        self,
        source: Source,
        inputs: Mapping[str, InputFacts],
        locator: DifferenceLocator | None = None,
        seed: int = 0,
        gives_last: bool = False,
        tolerance: float = TOLERANCE,
        series: SeriesPreprocessor | None = None,
    ) -> None:
        super().__init__(source, inputs, seed, gives_last, tolerance, series)
        self.locator = locator

    def with_tolerance(self, tolerance: float) -> ParityGate:
        """Return the same gate with another tolerance. It shares the random draws."""
        other = copy.copy(self)
        other.tolerance = tolerance
        return other

    def check(self, engine: Engine) -> ParityReport:
        """Compare a file with the source, and return the report.

        Raises ParityError with the first case, row and position that differ too much.
        """
        report = ParityReport()
        if self.source.step_input is None:
            self._check_single_pass(engine, report)
            self._check_long_row(engine, report)
            if self.series is not None:
                check_forecasts(self, engine, report)
            return report
        for case in [*cases(engine.manifest.max_length), *self._further_cases(engine.manifest.max_length)]:
            case, requests, sequences = self.draw_case(case, engine.manifest.max_length)
            logits, state, extras = run_case(engine, requests, sequences, case.prompts)
            error = 0.0
            for row, (request, tokens) in enumerate(zip(requests, sequences, strict=True)):
                positions, expected = self.reference.logits_at(request, tokens, left_out=case.left_out)
                locate = functools.partial(self._locate, engine, state, row, request, tokens)
                compared = logits[row] if len(positions) == len(tokens) else logits[row][positions]
                row_error = self._compare(
                    case.name, row, case.prompts[row], compared, expected, report, locate, positions
                )
                error = max(error, row_error)
                self._compare_extras(case.name, row, extras[row], request, tokens, report)
            report.errors[case.name] = error
        if self.series is not None:
            check_forecasts(self, engine, report)
        else:
            self._check_greedy(engine, report)
        return report

    def _further_cases(self, max_length: int) -> list[Case]:
        """Return a case in which each row has another adapter, or none, and one without the optional inputs."""
        rows = len(self.source.adapters) + 1
        steps = min(2, max_length - 1)
        prompt = min(3, max_length - steps)
        further = [Case(ADAPTERS, (prompt,) * rows, steps, (5,) * rows)] if rows > 1 else []
        if left_out := tuple(self.source.optional_inputs):
            further.append(Case(_name_without(left_out), (prompt,), steps, (5,), left_out))
        return further

    def draw_case(self, case: Case, max_length: int) -> tuple[Case, list[dict[str, np.ndarray]], list[np.ndarray]]:
        """Return the requests and the sequences of a case. Items with placeholders lengthen its prompts."""
        if not self.source.placeholders:
            sequences = [self.draw_sequence(n + case.steps) for n in case.prompts]
            return case, self.draw_requests(case.sources), sequences
        each = self._positions_of_items
        counts = [ITEMS[row % len(ITEMS)] for row in range(len(case.prompts))]
        counts = [min(count, max(0, max_length - case.steps - 1) // each) for count in counts]
        texts = [
            max(1, min(n, max_length - case.steps - count * each))
            for n, count in zip(case.prompts, counts, strict=True)
        ]
        requests, sequences = [], []
        for length, text, count in zip(case.sources, texts, counts, strict=True):
            request, prompt = self.draw_prompt(length, text, count)
            requests.append(request)
            sequences.append(np.concatenate([prompt, self.draw_sequence(case.steps)]))
        prompts = tuple(text + count * each for text, count in zip(texts, counts, strict=True))
        return replace(case, prompts=prompts), requests, sequences

    def sensitivity(self, round_weight: Callable[[torch.Tensor], torch.Tensor], max_length: int) -> float:
        """Return the change of the source's logits, over their range, when only its parameters are rounded.

        It is the unavoidable cost of half precision for this model. ROUNDINGS times as much is allowed, because inputs
        and outputs of products are rounded too: docs/design/staging.md#what-half-precision-may-cost.

        round_weight: adds rounding errors to a parameter. Memory: a second copy of the weights.
        """
        samples: list[tuple[dict[str, np.ndarray], np.ndarray | None]] = []
        for case in cases(max_length) if self.source.step_input is not None else ():
            _, requests, sequences = self.draw_case(case, max_length)
            samples += list(zip(requests, sequences, strict=False))
        if self.source.step_input is None:
            samples = [(self.draw_request(length), None) for length in (4, 11)]
        with rounded_weights(self.source.module, round_weight):
            rounded_logits = [self.reference.logits(*inputs) for inputs in samples]
        exact_logits = [self.reference.logits(*inputs) for inputs in samples]
        return max(
            float(self._differences(rounded, exact, exact_logits).max())
            for rounded, exact in zip(rounded_logits, exact_logits, strict=True)
        )

    def _differences(self, actual: np.ndarray, expected: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the differences over their units. rows: results of a single-pass model for other inputs."""
        if self.source.step_input is not None and self.inputs[self.source.step_input].ids is not None:
            return logit_differences(actual, expected)
        return number_differences(actual, expected, rows)

    def _check_single_pass(self, engine: Engine, report: ParityReport) -> None:
        """Compare a model without a step input on rows of one length, and on ragged rows if it hides padding."""
        assert engine.manifest.encode is not None
        several = self._run_rows(engine, "4 rows of 11", (11,) * 4, report)
        self._run_rows(engine, "1 rows of 4", (4,), report, several)
        if self.source.adapters:
            self._run_rows(engine, ADAPTERS, (5,) * (len(self.source.adapters) + 1), report)
        if left_out := self.source.optional_inputs:
            self._check_without(engine, left_out, report, several)
        if not engine.manifest.encode.ragged:
            return
        ragged_report = ParityReport()
        try:
            self._run_rows(engine, RAGGED_ROWS, RAGGED_LENGTHS, ragged_report)
        except ParityError:
            # The user declared that masks hide padding, and may have described one the wrong way round. Lengths have
            # no other way round: forward reads padding in spite of them, and rows of one length have none.
            if self.source.masks and not self.source.has_lengths_alone:
                raise
            report.ragged = False
            return
        report.errors |= ragged_report.errors
        report.extras = {name: max(error, ragged_report.extras.get(name, 0.0)) for name, error in report.extras.items()}
        report.relative_error = max(report.relative_error, ragged_report.relative_error)

    def _check_without(
        self, engine: Engine, left_out: Sequence[str], report: ParityReport, others: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Compare a row without the inputs that a caller may leave out with the source's own call without them."""
        request = {name: value for name, value in self.draw_request(5).items() if name not in left_out}
        given = request
        if self.source.token_types:  # the runtime fills them in where it reads ids
            read = {name: value for name, value in request.items() if name != ADAPTER_INPUT}
            given = {**request, **Inputs(engine.manifest).single_pass_arrays(read)}
        self._run_requests(engine, _name_without(left_out), (5,), [given], report, others, left_out)

    def _check_long_row(self, engine: Engine, report: ParityReport) -> None:
        """Compare a single-pass model on a row of its greatest length, or of the greatest that costs little.

        Half precision is compared on short rows alone: the computation is that of the file before it was rounded.
        """
        if self.locator is None or self.tolerance != TOLERANCE:
            return
        names = {name: value for name, value in self.source.example.items() if name not in self.source.masks}
        length = longest_length(self.inputs, names)
        row = affordable_row(self.locator.captured, length, max(RAGGED_LENGTHS), self.draw_request)
        if row is None:
            return
        try:
            # Roundings of sums over positions grow as the square root of their number.
            allowed = self.tolerance * max(1.0, length / max(RAGGED_LENGTHS)) ** 0.5
            self.with_tolerance(allowed)._run_requests(engine, LONG_ROW, (length,), [row], report)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}; or set the greatest length of the file (max_length)") from error
        except (InputError, ModelFileError) as error:
            sizes = ", ".join(f"{name} {value.shape}" for name, value in row.items())
            raise ParityError(
                f"the exported model cannot run a row of these sizes, as its source does: {sizes} ({error}); no file "
                "was written: set the greatest length of the file (max_length)"
            ) from error

    def _run_rows(
        self,
        engine: Engine,
        case: str,
        lengths: Sequence[int],
        report: ParityReport,
        others: Sequence[Sequence[np.ndarray]] = (),
    ) -> list[list[np.ndarray]]:
        """Compare the outputs of a single-pass model, for drawn rows of these lengths together.

        others: the expected outputs of further rows. Return those of these rows.
        """
        requests = [self.draw_request(length) for length in lengths]
        return self._run_requests(engine, case, lengths, requests, report, others)

    def _run_requests(
        self,
        engine: Engine,
        case: str,
        lengths: Sequence[int],
        requests: list[dict[str, np.ndarray]],
        report: ParityReport,
        others: Sequence[Sequence[np.ndarray]] = (),
        left_out: Sequence[str] = (),
    ) -> list[list[np.ndarray]]:
        """Compare the outputs of a single-pass model for these requests together, as `_run_rows`.

        left_out: inputs that the source is called without.
        """
        expected_outputs = [self.reference.outputs(request, None, left_out) for request in requests]
        names = [extra.name for extra in engine.manifest.extras]
        outputs = engine.encode(by_name(requests) or {}, len(requests), names)
        values = {name: value.numpy() for name, value in outputs.items()}
        errors = []
        for row, (length, outputs_of_row) in enumerate(zip(lengths, expected_outputs, strict=True)):
            for number, (spec, expected) in enumerate(zip(engine.manifest.encoded, outputs_of_row, strict=True)):
                output = values[spec.name][row][tuple(slice(0, size) for size in expected.shape)]
                rows = [outputs[number] for outputs in (*expected_outputs, *others)]
                errors.append(self._compare(case, row, length, output, expected, report, rows=rows))
        report.errors[case] = max(errors)
        for row, request in enumerate(requests):
            self._compare_extras(case, row, {name: values[name][row] for name in names}, request, None, report)
        return expected_outputs

    def _compare_extras(
        self,
        case: str,
        row: int,
        outputs: Mapping[str, np.ndarray],
        request: Mapping[str, np.ndarray],
        tokens: np.ndarray | None,
        report: ParityReport,
    ) -> None:
        """Compare extra outputs. The file's may be padded at the end of their axes."""
        if not outputs or self.locator is None:
            return
        for name, expected in self.reference.extras(self.locator, request, tokens).items():
            output = outputs[name][tuple(slice(0, size) for size in expected.shape)]
            if output.shape != expected.shape:
                raise ParityError(
                    f"{name} has the shape {output.shape} in the case '{case}', row {row}, and {expected.shape} in its "
                    "source; no file was written"
                )
            span = float(np.ptp(expected)) or 1.0
            worst = float(np.abs(output - expected).max())
            report.extras[name] = max(report.extras.get(name, 0.0), worst)
            if not worst <= self.tolerance * span:
                raise ParityError(
                    f"{name} differs from its source in the case '{case}': row {row}, by {worst:.3g} where it spans "
                    f"{span:.3g} ({self.tolerance:g} of that is allowed); no file was written"
                )

    def _compare(
        self,
        case: str,
        row: int,
        prompt: int,
        logits: np.ndarray,
        expected: np.ndarray,
        report: ParityReport,
        locate: Callable[[], str] = lambda: "",
        positions: Sequence[int] | np.ndarray = (0,),
        rows: Sequence[np.ndarray] = (),
    ) -> float:
        """Compare results, add the error to the report, and return the greatest difference of a number that counts.

        logits: at these positions; of a single-pass model its whole output.
        prompt: the length of the row's prompt. locate: called for the message of a failure. rows: expected outputs of a
            single-pass model for other inputs. Raises ParityError if the error exceeds the tolerance.
        """
        if logits.shape != expected.shape:
            raise ParityError(
                f"the exported model differs from its source in the case '{case}': row {row} has the shape "
                f"{logits.shape} where the source's has {expected.shape}; no file was written"
            )
        relative = self._differences(logits, expected, rows)
        with np.errstate(invalid="ignore"):
            differences = np.where(relative > 0, np.abs(logits - expected), 0.0)
        by_position = relative.reshape(len(positions), -1).max(1)
        report.relative_error = max(report.relative_error, float(by_position.max()))
        if not (by_position <= self.tolerance).all():
            first = int((~(by_position <= self.tolerance)).argmax())
            position, worst = int(positions[first]), float(by_position[first])
            difference = float(differences.reshape(len(positions), -1)[first].max())
            stage = "of the prompt" if position < prompt else f"(step {position - prompt + 1} after the prompt)"
            share = f"{worst:.2g} of what the results there span" if np.isfinite(worst) else "a number that is none"
            raise ParityError(
                f"the exported model differs from its source in the case '{case}': row {row}, position {position} "
                f"{stage}, by {difference:.3g}, {share} ({self.tolerance:g} of that is allowed)"
                f"{self._explain(case)}{locate()}; no file was written"
            )
        return float(differences.max())

    def _explain(self, case: str) -> str:
        """Return a reason why only this case would differ, for the message."""
        if case == _name_without(self.source.optional_inputs):
            return (
                f"; forward computes something else {case} than with the values that the file fills in: give an "
                "example of its inputs, and describe its masks (masks=)"
            )
        return self._explain_padding() if case == RAGGED_ROWS else ""

    def _explain_padding(self) -> str:
        """Return a reason why only ragged rows would differ."""
        masks = self.source.masks
        requests = [name for name in self.inputs if name != self.source.step_input and name not in masks]
        unmasked = [name for name in requests if not self.inputs[name].masked]
        if unmasked:
            return (
                f"; it hides no padding in {', '.join(unmasked)}, so that rows change each other: let forward take a "
                f"mask or lengths, described by masks={{…: padding({unmasked[0]!r})}}"
            )
        return (
            "; either a mask is described the wrong way round (try its other keep), or forward does not hide padding "
            "with it everywhere"
            if masks
            else ""
        )

    def _locate(
        self, engine: Engine, state: State, row: int, request: Mapping[str, np.ndarray], tokens: np.ndarray
    ) -> str:
        """Return the layer at which a row begins to differ, for the message."""
        if self.locator is None:
            return ""
        inputs = self.reference.inputs(request, tokens)
        encode, decode = engine.manifest.encode, engine.decode
        specs = encode.outputs if encode else ()
        contexts = [to_numeric(value[row], spec.dtype) for value, spec in zip(state.context, specs, strict=True)]
        pasts = state.cache.past(state.cache.side)
        caches = [to_numeric(value.numpy()[row], c.dtype) for value, c in zip(pasts, decode.caches, strict=True)]
        return f"; {self.locator.first_difference(inputs, contexts, caches)}"

    def _check_greedy(self, engine: Engine, report: ParityReport) -> None:
        """Compare greedy tokens wherever the source's two best tokens differ by more than the error."""
        requests, starts = self.draw_starts((3, 9, 5), engine.manifest.max_length)
        steps = min(GREEDY_STEPS, engine.manifest.max_length - max(map(len, starts)))
        decoded = decode_greedily(engine, requests, starts, steps, self.hidden)
        for row, (request, start, tokens) in enumerate(zip(requests, starts, decoded, strict=True)):
            _, expected = self.reference.logits_at(request, np.concatenate([start, tokens[:-1]]), len(start) - 1)
            expected[:, self.hidden] = -np.inf
            best = np.sort(expected, -1)
            is_clear = best[:, -1] - best[:, -2] > 2 * max(report.max_abs_error, 1e-7)
            is_wrong = is_clear & (expected.argmax(-1) != tokens)
            report.tokens += len(tokens)
            report.tokens_equal += int((expected.argmax(-1) == tokens).sum())
            if is_wrong.any():
                raise ParityError(
                    f"the exported model's greedy tokens differ from its source's: row {row}, step "
                    f"{int(is_wrong.argmax()) + 1}; no file was written"
                )
