"""The compiled model in fewer bits, within its budget: calibrate → plan → rewrite → measure, or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tformer_export.calibration.samples import draw_long, draw_samples, read_samples
from tformer_export.calibration.series_windows import read_windows
from tformer_export.common.clock import Clock
from tformer_export.common.degradation_budget import Budget
from tformer_export.common.kernel_choices import Forms, few_rows
from tformer_export.common.onnx_writer import save
from tformer_export.common.quantization import FIXED
from tformer_export.compile import Compiled
from tformer_export.options import Asked
from tformer_export.quantize import (
    Degradation,
    Mixture,
    OutputDegradation,
    OutputYardstick,
    Plan,
    Planner,
    Product,
    hold_in_int8,
    measure,
    measure_outputs,
    measure_series,
    quantize,
)
from tformer_export.quantize.bit_plan import MIXED_BUDGET, MIXED_ONCE
from tformer_export.quantize.token_quality import Yardstick
from tformer_export.shortlist import set_apart, with_columns
from tformer_export.verify.parity import Gate
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest


@dataclass(frozen=True)
class FewerBits:
    """manifest: of the model, quantised or not. What that cost, and the rest, as `ExportReport` has it."""

    manifest: Manifest
    degradation: Degradation | OutputDegradation | None = None
    mixture: Mixture | None = None
    products: dict[str, Product] = field(default_factory=dict)


def in_fewer_bits(
    compiled: Compiled,
    manifest: Manifest,
    gate: Gate,
    before: Engine,
    asked: Asked,
    folder: Path,
    clock: Clock,
    forms: Forms,
) -> FewerBits:
    """Quantise the compiled model, in place; a mixture with more bits for as long as it is beyond the budget.

    manifest, before: of the model as it is. folder: where files to be measured are written. forms: the model's.
    ParityError if what quantisation changes is beyond the budget, or the file is slower than it may be.
    """
    with clock.stage("calibrate"):
        planner, manifest = _calibrated(compiled, manifest, gate, before, asked, folder)
    with clock.stage("search"):
        yardstick = planner.yardstick if gate.source.step is None or gate.series is not None else None
        budget = _budget(asked, yardstick)
        plans = _plans(planner, asked, budget)
    mixed = asked.quantize == "mixed"
    measured_on = planner.samples.measured if mixed or asked.calibration is not None else ()
    for plan in plans:
        with clock.stage("quantise"):
            manifest, products = _rewritten(compiled, manifest, planner, plan, asked, gate.source.step, forms)
            written = save(compiled.model, manifest, folder / "quantised.onnx")
        with clock.stage("measure"):
            after = Engine(written, device="cpu")
            degradation: Degradation | OutputDegradation
            if isinstance(yardstick, OutputYardstick) and gate.source.step is not None:
                degradation = measure_series(gate, before, after, yardstick, exact=asked.exact)
            elif isinstance(yardstick, OutputYardstick):
                degradation = measure_outputs(gate, before, after, yardstick)
            else:
                degradation = measure(gate, before, after, measured_on, exact=asked.exact)
        beyond = degradation.beyond(budget)
        if beyond is None:
            break
    else:
        with clock.stage("search"):
            weights = asked.quantize != "none"
            advice = planner.what_would_fit(budget) if weights else "leave the caches in float, or allow more"
        raise ParityError(f"quantisation {beyond}; no file was written: {advice}")
    if asked.min_speed is not None and degradation.speed < asked.min_speed:
        raise ParityError(
            f"the quantised file is {degradation.speed:.2f} times as fast as the unquantised one, for one row, and "
            f"{asked.min_speed:g} is asked for; no file was written: small models gain size by quantisation, not speed"
        )
    return FewerBits(manifest, degradation, plan.mixture, products)


def _calibrated(
    compiled: Compiled, manifest: Manifest, gate: Gate, before: Engine, asked: Asked, folder: Path
) -> tuple[Planner, Manifest]:
    """Caches in what they are to be held in, integers for weights where there are data to fit them to; and the manifest
    as which the runtime opens what is measured."""
    read = read_samples if gate.series is None else read_windows
    samples = read(asked.calibration, before) if asked.calibration is not None else None
    if asked.cache == "int8":
        seen = (samples or draw_samples(gate, before)).seen
        manifest = hold_in_int8(compiled.model, manifest, before, [*seen, draw_long(gate, before)])
    planner = Planner(compiled.model, manifest, before, lambda: samples or draw_samples(gate, before), folder)
    if asked.quantize == "none":
        return planner, manifest
    if asked.activations == FIXED:
        seen = planner.samples.seen
        random = samples is None and gate.source.step is not None
        planner.fix([*seen, draw_long(gate, before)] if random else seen)
    if samples is not None:
        planner.fit({"int8": (8,), "int4": (4,), "mixed": (4, 8)}[asked.quantize])
    return planner, replace(manifest, quantization=asked.quantize, optimized_for=asked.optimize_for)


def _budget(asked: Asked, yardstick: Yardstick | OutputYardstick | None) -> Budget:
    """yardstick: of a model that is run once or stepped over numbers, which tells what its outputs mean."""
    budget = asked.budget
    if asked.quantize == "mixed" and budget.tokens is None and budget.perplexity is None:
        budget = MIXED_BUDGET if yardstick is None else MIXED_ONCE
    return budget if yardstick is None else budget.over(yardstick.meaning)


def _plans(planner: Planner, asked: Asked, budget: Budget) -> Sequence[Plan]:
    """To be tried one after the other."""
    if asked.quantize == "mixed":
        return planner.mixed(budget)
    if asked.quantize == "none" or (asked.quantize == "int8" and asked.calibration is None):
        return [Plan()]
    return [planner.uniform(int(asked.quantize[3:]))]


def _rewritten(
    compiled: Compiled, manifest: Manifest, planner: Planner, plan: Plan, asked: Asked, step: str | None, forms: Forms
) -> tuple[Manifest, dict[str, Product]]:
    """The compiled model becomes a copy of the planner's in the plan's bits, with its output projection apart if a
    shortlist is to come. Returns its manifest, and what is quantised by name."""
    columns = asked.shortlist is not None and asked.quantize != "none"  # else it has been done
    products: dict[str, Product] = {}
    compiled.model = planner.model.clone()
    if columns:
        set_apart(compiled.model)
    if asked.quantize != "none":
        made = quantize(
            compiled.model,
            plan.bits,
            asked.optimize_for,
            step,
            plan.ready,
            few_rows=few_rows(forms),
            on_cpu=asked.target == "cpu",
            fixed=planner.fixed,
        )
        compiled.found |= {"fixed": made.fixed, "by_row": made.by_row}
        compiled.found["quantised"], products = made.count, made.products
        decode = manifest.decode and replace(manifest.decode, few_tokens=made.few_tokens)
        manifest = replace(manifest, decode=decode)
    if columns:
        manifest = with_columns(compiled.model, manifest)
    return manifest, products
