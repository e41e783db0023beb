"""The parity gate: the written file, run by `tformer_runtime`, against the source model, or no file.

Each case feeds rows of different lengths as a right-padded prompt and then token by token, at sizes that were not
traced, and compares every row's logits with the source model's on that row alone. Then greedy decoding: wherever the
source's two best tokens are further apart than the error, the file must choose the same one.

Allowed: max |Δlogit| ≤ 1e-3 of the logits' range. Float32 kernels that sum in another order differ by about
depth · 2⁻²⁴ of the values summed, 1e-6 to 1e-5 of the range; a missing position or a wrong mask by 1e-2 and more.

A file in half precision is compared twice: before its numbers are rounded, as above, which proves what it computes; and
after, which tells how well. Then more is allowed, see `Gate.sensitivity`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tformer_export.analysis.input_facts import About
from tformer_export.sources import Source
from tformer_export.staging.landmarks import Landmarks
from tformer_export.verify.draws import Draws
from tformer_export.verify.forecasts import check_forecasts
from tformer_export.verify.report import TOLERANCE, ParityReport
from tformer_export.verify.teacher_forcing import by_name, decode_greedily, run_case
from tformer_export.verify.torch_reference import rounded_weights
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.engine.state import State
from tformer_runtime.format.dtypes import numbers
from tformer_runtime.preprocess.series import Series

LOOSEST = 0.5  # of the logits' range: beyond, a comparison of half precision would tell nothing
ROUNDINGS = 6.0  # times what rounding the weights does, that half precision may do: see `Gate.sensitivity`
STEPS = 5
GREEDY_STEPS = 12
LONG_SOURCE = 96
RAGGED_ROWS = "ragged rows"
RAGGED = (6, 11, 2, 8)  # lengths of rows that are run together
LONGEST = 1024  # positions of the longest prompt that is compared; beyond, tables are proven but not run


@dataclass(frozen=True)
class Case:
    """prompts: the length of each row's prompt; after it, `steps` single tokens. sources: of each request input."""

    name: str
    prompts: tuple[int, ...]
    steps: int
    sources: tuple[int, ...]


def cases(max_length: int) -> list[Case]:
    """One row, ragged rows, and a long prompt, within what the model can hold."""
    longest = min(LONGEST, max_length)
    steps = max(1, min(STEPS, longest - 1))
    room = longest - steps

    def clip(*lengths: int) -> tuple[int, ...]:
        return tuple(min(n, room) for n in lengths)

    return [
        Case("one row", clip(1), steps, (4,)),
        Case(RAGGED_ROWS, clip(2, 7, 1, 4), steps, RAGGED),
        Case("long prompt", (room,), steps, (LONG_SOURCE,)),
    ]


class Gate(Draws):
    """Runs the cases. tolerance: the greatest |Δlogit|, as a share of the logits' range."""

    def __init__(
        self,
        source: Source,
        inputs: Mapping[str, About],
        landmarks: Landmarks | None = None,
        seed: int = 0,
        gives_last: bool = False,
        tolerance: float = TOLERANCE,
        series: Series | None = None,
    ) -> None:
        super().__init__(source, inputs, seed, gives_last, tolerance, series)
        self.landmarks = landmarks

    def check(self, engine: Engine) -> ParityReport:
        """The report, or ParityError with the first case, row and position that differ too much."""
        report = ParityReport()
        if self.source.step is None:
            self._run_once(engine, report)
            if self.series is not None:
                check_forecasts(self, engine, report)
            return report
        for case in cases(engine.manifest.max_length):
            requests = self.draw_requests(case.sources)
            sequences = [self.draw_sequence(n + case.steps) for n in case.prompts]
            found, state, extras = run_case(engine, requests, sequences, case.prompts)
            error = 0.0
            for row, (request, tokens) in enumerate(zip(requests, sequences, strict=True)):
                positions, expected = self.reference.logits_at(request, tokens)
                where = functools.partial(self._where, engine, state, row, request, tokens)
                at = found[row] if len(positions) == len(tokens) else found[row][positions]
                found_error = self._compare(case.name, row, case.prompts[row], at, expected, report, where, positions)
                error = max(error, found_error)
                self._compare_extras(case.name, row, extras[row], request, tokens, report)
            report.errors[case.name] = error
        if self.series is not None:
            check_forecasts(self, engine, report)
        else:
            self._greedy(engine, report)
        return report

    def sensitivity(self, rounded: Callable[[torch.Tensor], torch.Tensor], max_length: int) -> float:
        """How far the source's own logits move, as a share of their range, when its parameters are rounded, and nothing
        else: what half precision must cost this model. rounded: puts numbers off by as much as rounding does.

        A product rounds its weights, its input and its output, and so do the few operators around it, each
        independently, so that their errors add up as the root of their number (Higham and Mary 2019, "A New Approach to
        Probabilistic Rounding Error Analysis"): nine roundings like that of the weights do three times as much, and the
        greatest of some thousand logits is not twice as far off in one draw as in another. So ROUNDINGS times this is
        allowed. Memory: the weights once more.
        """
        drawn: list[tuple[dict[str, np.ndarray], np.ndarray | None]] = []
        for case in cases(max_length) if self.source.step is not None else ():
            requests = self.draw_requests(case.sources)
            drawn += [(r, self.draw_sequence(n + case.steps)) for r, n in zip(requests, case.prompts, strict=False)]
        if self.source.step is None:
            drawn = [(self.draw_request(length), None) for length in (4, 11)]
        with rounded_weights(self.source.module, rounded):
            found = [self.reference.logits(*inputs) for inputs in drawn]
        worst = 0.0
        for inputs, logits in zip(drawn, found, strict=True):
            expected = self.reference.logits(*inputs)
            span = float(np.ptp(expected[np.isfinite(expected)])) or 1.0
            worst = max(
                worst, *(_difference(*row) / span for row in zip(*map(np.atleast_1d, (logits, expected)), strict=True))
            )
        return worst

    def _run_once(self, engine: Engine, report: ParityReport) -> None:
        """A model without a step input: its outputs, for rows of one length, and ragged where it hides padding."""
        assert engine.manifest.encode is not None
        self._run_rows(engine, "1 rows of 4", (4,), report)
        self._run_rows(engine, "4 rows of 11", (11,) * 4, report)
        if not engine.manifest.encode.ragged:
            return
        beside = ParityReport()
        try:
            self._run_rows(engine, RAGGED_ROWS, RAGGED, beside)
        except ParityError:
            if self.source.masks:  # somebody said that they hide padding
                raise
            report.ragged = False
            return
        report.errors |= beside.errors
        report.extras = {name: max(error, beside.extras.get(name, 0.0)) for name, error in report.extras.items()}
        report.relative_error = max(report.relative_error, beside.relative_error)

    def _run_rows(self, engine: Engine, case: str, lengths: Sequence[int], report: ParityReport) -> None:
        requests = [self.draw_request(length) for length in lengths]
        names = [extra.name for extra in engine.manifest.extras]
        given = engine.encode(by_name(requests) or {}, len(requests), names)
        values = {name: value.numpy() for name, value in given.items()}
        errors = []
        for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            for spec, expected in zip(engine.manifest.encoded, self.reference.outputs(request, None), strict=True):
                own = values[spec.name][row][tuple(slice(0, size) for size in expected.shape)]
                errors.append(self._compare(case, row, length, own[None], expected[None], report))
        report.errors[case] = max(errors)
        for row, request in enumerate(requests):
            self._compare_extras(case, row, {name: values[name][row] for name in names}, request, None, report)

    def _compare_extras(
        self,
        case: str,
        row: int,
        found: Mapping[str, np.ndarray],
        request: Mapping[str, np.ndarray],
        tokens: np.ndarray | None,
        report: ParityReport,
    ) -> None:
        """What is given beside the logits; found may be padded at the end of its axes."""
        if not found or self.landmarks is None:
            return
        for name, expected in self.reference.extras(self.landmarks, request, tokens).items():
            own = found[name][tuple(slice(0, size) for size in expected.shape)]
            span = float(np.ptp(expected)) or 1.0
            worst = float(np.abs(own - expected).max()) if own.shape == expected.shape else np.inf
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
        found: np.ndarray,
        expected: np.ndarray,
        report: ParityReport,
        where: Callable[[], str] = lambda: "",
        positions: Sequence[int] | np.ndarray = (0,),
    ) -> float:
        finite = np.isfinite(expected)
        scale = float(expected.max(where=finite, initial=-np.inf) - expected.min(where=finite, initial=np.inf)) or 1.0
        differences = np.array([_difference(*position) for position in zip(found, expected, strict=True)])
        worst = float(differences.max())
        report.relative_error = max(report.relative_error, worst / scale)
        if not worst <= self.tolerance * scale:
            position = int(positions[int((differences > self.tolerance * scale).argmax())])
            stage = "of the prompt" if position < prompt else f"(step {position - prompt + 1} after the prompt)"
            raise ParityError(
                f"the exported model differs from its source in the case '{case}': row {row}, position {position} "
                f"{stage}, by {worst:.3g} where the logits span {scale:.3g} ({self.tolerance:g} of that is allowed)"
                f"{self._padding_seen() if case == RAGGED_ROWS else ''}{where()}; no file was written"
            )
        return worst

    def _padding_seen(self) -> str:
        """Why ragged rows alone would differ, for the message."""
        masks = self.source.masks
        requests = [name for name in self.inputs if name != self.source.step and name not in masks]
        unmasked = [name for name in requests if not self.inputs[name].masked]
        if unmasked:
            return (
                f"; it hides no padding in {', '.join(unmasked)}, so that rows change each other: let forward take a "
                f"mask or lengths, described by masks={{…: padding({unmasked[0]!r})}}"
            )
        return "; perhaps a mask is described the wrong way round: try its other keep" if masks else ""

    def _where(
        self, engine: Engine, state: State, row: int, request: Mapping[str, np.ndarray], tokens: np.ndarray
    ) -> str:
        """The layer at which a row begins to differ, for the message."""
        if self.landmarks is None:
            return ""
        inputs = self.reference.inputs(request, tokens)
        encode, decode = engine.manifest.encode, engine.decode
        held = encode.outputs if encode else ()
        contexts = [numbers(value[row], spec.dtype) for value, spec in zip(state.context, held, strict=True)]
        pasts = state.cache.past(state.cache.turn)
        caches = [numbers(value.numpy()[row], c.dtype) for value, c in zip(pasts, decode.caches, strict=True)]
        return f"; {self.landmarks.first_difference(inputs, contexts, caches)}"

    def _greedy(self, engine: Engine, report: ParityReport) -> None:
        starts = [self.start(engine.manifest.max_length) for _ in range(3)]
        requests = [self.draw_request(n) for n in (3, 9, 5)]
        steps = min(GREEDY_STEPS, engine.manifest.max_length - max(map(len, starts)))
        decoded = decode_greedily(engine, requests, starts, steps, self.hidden)
        for row, (request, start, tokens) in enumerate(zip(requests, starts, decoded, strict=True)):
            _, expected = self.reference.logits_at(request, np.concatenate([start, tokens[:-1]]), len(start) - 1)
            expected[:, self.hidden] = -np.inf
            best = np.sort(expected, -1)
            clear = best[:, -1] - best[:, -2] > 2 * max(report.max_abs_error, 1e-7)
            wrong = clear & (expected.argmax(-1) != tokens)
            report.tokens += len(tokens)
            report.tokens_equal += int((expected.argmax(-1) == tokens).sum())
            if wrong.any():
                raise ParityError(
                    f"the exported model's greedy tokens differ from its source's: row {row}, step "
                    f"{int(wrong.argmax()) + 1}; no file was written"
                )


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest of one position's logits; infinite where one is finite and the other is not."""
    finite = np.isfinite(expected)
    if (finite != np.isfinite(found)).any():
        return np.inf
    return float(np.subtract(found, expected, where=finite, out=np.zeros_like(expected)).__abs__().max())
