"""The fastest kernel forms of a file on this machine (`--tune`).

For one choice after the other, each form is built as a whole file, and all decode the same short requests in turns
(`common/paired_timing.py`), so that background load affects all of them equally. A form replaces the default if it is
faster by more than 3 % in addition to the spread of its ratios. At the end the chosen forms are compared with the
defaults as a whole, and the defaults stay if the chosen forms are not faster.

The files that are timed differ from the exported one: their caches are floats, their logits are of all ids, and their
weights are rounded to nearest, in 8 bits where the export mixes bits.

Cost: about ten files, each as large as the result, on disk one at a time and up to five at a time in memory. Each runs
at most eight rounds of a request of 32 tokens and eight steps, at one to four batch sizes. The cost grows with the
weights. A model with rotary positions is translated a second time (seconds).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from tformer_export.common.kernel_choices import (
    CHOICES,
    DEFAULT_FORMS,
    ROTARY,
    KernelChoice,
    KernelForms,
    few_rows_limits,
    with_forms,
)
from tformer_export.common.onnx_writer import save, temporary_model
from tformer_export.common.option_values import LATENCY, STATIC, THROUGHPUT
from tformer_export.common.paired_timing import Request, Trial, time_in_turns
from tformer_export.compile import AnalysedModel, CompiledModel
from tformer_export.options import ExportOptions
from tformer_export.quantize import StaticScale, quantize_weights
from tformer_export.quantize.matrices import find_matrices
from tformer_export.verify.parity import ParityGate
from tformer_runtime.engine.engine import Engine

BATCH_ROWS = {LATENCY: (1,), THROUGHPUT: (32,)}
PROMPT_TOKENS = 32  # of a request
DECODE_STEPS, WEIGHTED_DECODE_STEPS = 8, 32  # of a request: steps that are run, and steps whose time is counted
PAUSE_SECONDS = 0.2  # before each turn, in which the threads of the previous one stop spinning


@dataclass(frozen=True)
class Decision:
    """The result for one choice. choice: its name. kept: the chosen form. trials: of all forms, the default first."""

    choice: str
    kept: str
    trials: tuple[Trial, ...]


@dataclass
class Tuning:
    """The result of tuning.

    rows: the batch sizes that were measured.
    decisions: the results for all choices that the model has.
    ratio: the time of a request over that in the default forms; 1 if the default forms stay.
    spread: see `Trial`.
    """

    rows: tuple[int, ...]
    decisions: list[Decision] = field(default_factory=list)
    ratio: float = 1.0
    spread: float = 0.0

    @property
    def forms(self) -> dict[str, str]:
        """Name of a choice → chosen form."""
        return {decision.choice: decision.kept for decision in self.decisions}

    def table(self) -> list[tuple[str, str]]:
        """Return the rows of the report, as label and text."""
        batches = ", ".join(map(str, self.rows))
        changed = f"a request takes {self.ratio:.2f} ± {self.spread:.2f} × the time in the default forms"
        defaults = all(decision.kept == decision.trials[0].form for decision in self.decisions)
        table = [("tuned", f"for batches of {batches}: {'the default forms stay' if defaults else changed}")]
        for decision in self.decisions:
            descriptions = [f"{'*' * (t.form == decision.kept)}{t.form} {_describe_trial(t)}" for t in decision.trials]
            table.append((f"  {decision.choice}", "; ".join(descriptions)))
        return table


def _describe_trial(trial: Trial) -> str:
    times = ", ".join(f"{s * 1e3:.0f}" if s > 0.1 else f"{s * 1e3:.2g}" for s in trial.seconds.values())
    return f"{times} ms" if trial.ratio == 1 else f"{times} ms ({trial.ratio:.2f} ± {trial.spread:.2f} ×)"


def tune_model(analysed: AnalysedModel, compiled: CompiledModel, options: ExportOptions, folder: Path) -> Tuning:
    """Find the fastest forms of a model on this machine.

    compiled: the model in the default forms.
    folder: for the candidate files.
    """
    source, gate = analysed.source, ParityGate(analysed.source, compiled.inputs, series=analysed.series)

    def build(forms: KernelForms) -> Request:
        candidate = analysed.compile(forms)
        manifest = structs.replace(
            with_forms(candidate.manifest, forms, options.optimize_for), quantization=options.quantization.weights
        )
        if options.quantization.weights != "none":
            bits = 4 if options.quantization.weights == "int4" else 8
            bits_of = {
                name: m.uniform(bits)
                for m in find_matrices(candidate.model, options.optimize_for)
                for name in m.readers
            }
            any_scale = StaticScale.between(-1, 1)  # its value does not change the speed
            scales = dict.fromkeys(bits_of, any_scale) if options.quantization.activation_scales == STATIC else {}
            quantize_weights(
                candidate.model,
                bits_of,
                options.optimize_for,
                source.step_input,
                few_rows=few_rows_limits(forms),
                on_cpu=True,
                static_scales=scales,
            )
        with temporary_model(folder / "candidate.onnx") as path:  # a session maps it into memory
            return make_timed_request(
                gate, Engine(save(candidate.model, manifest, path), device="cpu", native_kernels=False)
            )

    manifest = structs.replace(
        with_forms(compiled.manifest, DEFAULT_FORMS, options.optimize_for), quantization=options.quantization.weights
    )
    compiled = replace(compiled, manifest=manifest)
    # The scales of an int8 cache hold at all positions only if the attention operator itself rotates the keys.
    fixed = {ROTARY} if options.quantization.kv_cache != "float" else set()
    choices = [choice for choice in CHOICES if choice not in fixed and choice.applies(compiled)]
    return tune(build, choices, BATCH_ROWS[options.optimize_for])


def tune(
    build: Callable[[KernelForms], Request],
    choices: Iterable[KernelChoice] = CHOICES,
    rows: Sequence[int] = BATCH_ROWS[THROUGHPUT],
    pause: Callable[[], None] = lambda: time.sleep(PAUSE_SECONDS),
) -> Tuning:
    """Measure the choices one after the other, each with the chosen forms of the previous ones.

    build: builds a file in given forms and returns its timed request.
    choices: the choices that the file has.
    rows: the batch sizes.
    pause: called before each turn.
    """
    tuning = Tuning(tuple(rows))
    default = best_request = build({})
    for choice in choices:
        others = [build({**tuning.forms, choice.name: form}) for form in choice.forms[1:]]
        trials = time_in_turns(
            dict(zip(choice.forms, [best_request, *others], strict=True)), choice.rows or rows, pause
        )
        best = min((t for t in trials if t.wins), key=lambda t: t.ratio, default=trials[0])
        best_request = [best_request, *others][choice.forms.index(best.form)]
        tuning.decisions.append(Decision(choice.name, best.form, tuple(trials)))
    if best_request is not default:
        _, whole = time_in_turns({"defaults": default, "kept": best_request}, rows, pause)
        tuning.ratio, tuning.spread = whole.ratio, whole.spread
        if not whole.wins:
            tuning.ratio, tuning.spread = 1.0, 0.0
            tuning.decisions = [replace(d, kept=d.trials[0].form) for d in tuning.decisions]
    return tuning


def make_timed_request(gate: ParityGate, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> Request:
    """Make a timed request of random ids: batch size → seconds. It is the same for every engine of one source.

    The prompt of PROMPT_TOKENS counts once. The time of a step counts WEIGHTED_DECODE_STEPS times. A single-pass
    model is run on the prompt.
    """
    drawing = ParityGate(gate.source, gate.inputs, seed=1, series=gate.series)
    max_length = engine.manifest.max_length
    if engine.manifest.takes_prompt:
        length = max(1, min(PROMPT_TOKENS, max_length - DECODE_STEPS))
        inputs, start = drawing.draw_long_sequence(PROMPT_TOKENS, length)
    else:
        inputs = drawing.draw_request(PROMPT_TOKENS)
        start = np.zeros(0) if engine.manifest.decode is None else drawing.start(max_length)
    if engine.manifest.decode is None:
        return lambda rows: _seconds(clock, lambda: engine.encode({n: [v] * rows for n, v in inputs.items()}, rows))
    steps = min(DECODE_STEPS, max_length - len(start))

    def request(rows: int) -> float:
        tokens = np.repeat(start[None], rows, axis=0)
        begun = clock()
        state = engine.start({n: [v] * rows for n, v in inputs.items()} or None, rows)
        engine.step(state, tokens)
        read = clock()
        for _ in range(steps):
            engine.step(state, tokens[:, -1:])
        return read - begun + (clock() - read) / max(1, steps) * WEIGHTED_DECODE_STEPS

    return request


def _seconds(clock: Callable[[], float], run: Callable[[], object]) -> float:
    begun = clock()
    run()
    return clock() - begun
