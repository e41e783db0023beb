"""The loss and the gain of quantisation: the quantised file compared with the unquantised one on the same sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tformer_export.calibration.samples import Sample
from tformer_export.common.degradation_budget import DegradationBudget
from tformer_export.common.paired_timing import times_as_fast
from tformer_export.quantize.output_quality import OutputDegradation, ReferenceOutputs
from tformer_export.quantize.speed import measured_as_run, speed_text
from tformer_export.quantize.token_quality import ReferenceDistribution
from tformer_export.verify.forecasts import forecast_difference
from tformer_export.verify.parity import ParityGate
from tformer_export.verify.report import TOLERANCE
from tformer_export.verify.teacher_forcing import decode_greedily, run_case
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine

COMPARED_ROWS, COMPARED_TOKENS = 6, 24
TIMED_STEPS = 9  # steps of each file in a turn


@dataclass
class Degradation:
    """The loss and the gain of quantisation, for a generative model.

    token_agreement: share of positions with the same best token.
    perplexity, perplexity_before: exp of the mean negative log-likelihood of the tokens of the data.
    speed: how many times as fast a step of one row is, with `kernels`.
    row_difference: the largest difference of a row alone from the same row in a batch, over the range of the logits.
    positions: the number of predicted tokens.
    kernels: those with which the quantised file runs on this machine, in words.
    """

    token_agreement: float
    perplexity: float
    perplexity_before: float
    speed: float
    row_difference: float
    positions: int = 0
    kernels: str = ""

    def beyond(self, budget: DegradationBudget) -> str | None:
        """Return how a budget is exceeded, as the middle of a sentence; None if it is not."""
        return budget.exceeded(1 - self.token_agreement, self.perplexity / self.perplexity_before)

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("quantised", f"{self.token_agreement:.1%} of {self.positions} tokens agree with the unquantised file"),
            ("perplexity", f"{self.perplexity_before:.4f} → {self.perplexity:.4f}"),
            ("speed", speed_text(self.speed, self.kernels)),
            *([("a row alone", f"{self.row_difference:.1e} of the range from the same in a batch")] * self._varies),
        ]

    @property
    def _varies(self) -> bool:
        return self.row_difference > TOLERANCE


def measure(
    gate: ParityGate, before: Engine, after: Engine, samples: Sequence[Sample] = (), exact: bool = True
) -> Degradation:
    """Compare a quantised file with the unquantised one, teacher-forced over samples.

    samples: if there are none, sequences that the unquantised file decodes greedily from random requests.
    exact: whether a row's result is the same alone and in any batch. Otherwise the kernel for few rows rounds
        activations in other steps, which are at most twice as large. The allowed difference is three times the error of
        quantisation: docs/design/quantization.md#measures-of-quality.

    Raises ParityError if a row's result depends on its neighbours by more.
    """
    lengths = [3 + 2 * i for i in range(COMPARED_ROWS)]
    requests, starts = gate.draw_starts(lengths, before.manifest.max_length)
    steps = min(COMPARED_TOKENS, before.manifest.max_length - len(starts[0]))
    decoded = decode_greedily(before, requests, starts, steps, gate.hidden)
    sequences = [np.concatenate(pair) for pair in zip(starts, decoded, strict=True)]
    prompts = tuple(len(s) for s in starts)
    drawn = [Sample(request, tokens, n) for request, tokens, n in zip(requests, sequences, prompts, strict=True)]
    quality = ReferenceDistribution(before, samples or drawn).quality(after)
    speed, kernels = measured_as_run(before, after, partial(_speed, gate))
    return Degradation(
        token_agreement=quality.token_agreement,
        perplexity=quality.perplexity,
        perplexity_before=quality.perplexity_before,
        speed=speed,
        row_difference=_row_difference(before, after, requests, sequences, prompts, exact),
        positions=quality.positions,
        kernels=kernels,
    )


def measure_series(
    gate: ParityGate, before: Engine, after: Engine, reference: ReferenceOutputs, exact: bool = True
) -> OutputDegradation:
    """Compare quantised files that are stepped over numbers.

    They are compared teacher-forced over the samples of `reference`, and by whole forecasts.
    """
    lengths = tuple(3 + 2 * i for i in range(COMPARED_ROWS))
    requests = gate.draw_requests(lengths)
    sequences = [gate.draw_sequence(min(COMPARED_TOKENS, before.manifest.max_length)) for _ in lengths]
    prompts = (1,) * COMPARED_ROWS
    speed, kernels = measured_as_run(before, after, partial(_speed, gate))
    return OutputDegradation(
        quality=reference.quality(after),
        speed=speed,
        row_difference=_row_difference(before, after, requests, sequences, prompts, exact),
        forecast=forecast_difference(gate, before, after),
        kernels=kernels,
    )


def _row_difference(
    before: Engine,
    after: Engine,
    requests: list[dict[str, np.ndarray]],
    sequences: list[np.ndarray],
    prompts: tuple[int, ...],
    exact: bool,
) -> float:
    """Return the largest difference of a row's logits alone from the same row's in a batch, over their range."""
    together, *_ = run_case(after, requests, sequences, prompts)
    unquantized = together if exact else run_case(before, requests, sequences, prompts)[0]
    worst = 0.0
    for row in (0, len(sequences) - 1):
        (alone,), *_ = run_case(after, [requests[row]], [sequences[row]], (prompts[row],))
        span = float(alone.max() - alone.min()) or 1.0
        worst = max(worst, float(np.abs(alone - together[row]).max()) / span)
        moved, allowed = _rms(alone - together[row]) / span, 3 * _rms(together[row] - unquantized[row]) / span
        if exact and worst > TOLERANCE:
            raise ParityError(
                f"a row's result changes with its neighbours by {worst:.3g} of the logits' range after quantisation "
                f"({TOLERANCE:g} is allowed); no file was written"
            )
        if not exact and moved > max(allowed, TOLERANCE):
            raise ParityError(
                f"a row's result alone is {moved:.3g} of the logits' range (rms) from that in a batch after "
                f"quantisation, and the rounding of activations explains {allowed:.3g}; no file was written"
            )
    return worst


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _speed(gate: ParityGate, before: Engine, after: Engine) -> float:
    """Return how many times as fast as before a step of one row is."""
    (request,), (start,) = gate.draw_starts([8], before.manifest.max_length)

    def seconds(engine: Engine) -> float:
        """Return the median time of a step without the first, which reads the start."""
        state = engine.start({name: [value] for name, value in request.items()} or None, 1)
        tokens, times = start[None], []
        for _ in range(max(1, min(TIMED_STEPS, engine.manifest.max_length - len(start)))):
            begin = time.perf_counter()
            logits = engine.step(state, tokens)
            tokens = tokens[:, -1:] if gate.series is not None else logits.argmax(-1)[:, None]
            times.append(time.perf_counter() - begin)
        return float(np.median(times[1:] or times))

    return times_as_fast(partial(seconds, before), partial(seconds, after))
