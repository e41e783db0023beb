"""Quantise a compiled model within its budget: calibrate → plan → rewrite → measure, or refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from tformer_export.calibration.samples import CalibrationLines, draw_long_sample, draw_samples, read_samples
from tformer_export.calibration.series_windows import read_windows
from tformer_export.common.clock import PhaseClock
from tformer_export.common.degradation_budget import DegradationBudget
from tformer_export.common.kernel_choices import KernelForms, few_rows_limits
from tformer_export.common.onnx_writer import save
from tformer_export.common.option_values import LATENCY, STATIC
from tformer_export.compile import CompiledModel
from tformer_export.options import ExportOptions
from tformer_export.quantize import (
    BitPlan,
    BitPlanner,
    Degradation,
    Mixture,
    OutputDegradation,
    Product,
    ReferenceOutputs,
    measure,
    measure_outputs,
    measure_series,
    quantize_caches,
    quantize_weights,
)
from tformer_export.quantize.bit_plan import MIXED_BUDGET, MIXED_SINGLE_PASS_BUDGET, no_matrices
from tformer_export.quantize.kv_cache_int8 import require_cached_attentions
from tformer_export.quantize.matrices import find_matrices
from tformer_export.quantize.output_quality import find_measured_outputs
from tformer_export.quantize.token_quality import ReferenceDistribution
from tformer_export.shortlist import separate_projection, with_columns
from tformer_export.verify.parity import ParityGate
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest


@dataclass(frozen=True)
class QuantizedResult:
    """A quantised model. The other fields are as in `ExportReport`."""

    compiled: CompiledModel
    degradation: Degradation | OutputDegradation | None = None
    mixture: Mixture | None = None
    products: dict[str, Product] = field(default_factory=dict)
    calibration: CalibrationLines | None = None


def check_quantizable(compiled: CompiledModel, options: ExportOptions) -> None:
    """Raise the errors of options that a compiled model cannot have, before it is verified and measured."""
    if options.quantization.kv_cache == "int8":
        require_cached_attentions(compiled.model, compiled.manifest)
    if options.quantization.weights == "mixed" and not find_matrices(compiled.model):
        raise no_matrices()
    find_measured_outputs(compiled.manifest)


def quantize_within_budget(
    compiled: CompiledModel,
    gate: ParityGate,
    before: Engine,
    options: ExportOptions,
    folder: Path,
    clock: PhaseClock,
    forms: KernelForms,
) -> QuantizedResult:
    """Quantise a copy of the compiled model. A mixture gets more bits until it is within the budget.

    before: an engine of the compiled model.
    folder: where files are written for measurements.
    forms: the kernel forms of the model.

    Raises ParityError if quantisation changes more than the budget allows.
    """
    with clock.phase("calibrate"):
        planner, manifest = _calibrate(compiled, gate, before, options, folder)
    with clock.phase("search"):
        reference = planner.reference if gate.source.step_input is None or gate.series is not None else None
        budget = _budget(options, reference)
        plans = _plans(planner, options, budget)
    mixed = options.quantization.weights == "mixed"
    measured_on = planner.samples.measured if mixed or options.quantization.calibration is not None else ()
    for plan in plans:
        with clock.phase("quantize"):
            rewritten, products = _rewrite(
                replace(compiled, manifest=manifest), planner, plan, options, gate.source.step_input, forms
            )
            path = save(rewritten.model, rewritten.manifest, folder / "quantized.onnx")
        with clock.phase("measure"):
            after = Engine(path, device="cpu", native_kernels=False)
            degradation: Degradation | OutputDegradation
            if isinstance(reference, ReferenceOutputs) and gate.source.step_input is not None:
                degradation = measure_series(gate, before, after, reference, exact=options.exact)
            elif isinstance(reference, ReferenceOutputs):
                degradation = measure_outputs(gate, before, after, reference)
            else:
                degradation = measure(gate, before, after, measured_on, exact=options.exact)
        excess = degradation.beyond(budget)
        if excess is None:
            break
    else:
        with clock.phase("search"):
            weights = options.quantization.weights != "none"
            advice = planner.suggest_mixture(budget) if weights else "leave the caches in float, or allow more"
        raise ParityError(f"quantisation {excess}; no file was written: {advice}")
    lines = None
    if options.quantization.calibration is not None and gate.series is None:
        lines = CalibrationLines.of(planner.samples, manifest)
    return QuantizedResult(rewritten, degradation, plan.mixture, products, lines)


def _calibrate(
    compiled: CompiledModel, gate: ParityGate, before: Engine, options: ExportOptions, folder: Path
) -> tuple[BitPlanner, Manifest]:
    """Quantise caches, fit integers and learn static scales, as far as the options request it.

    Return the planner, and the manifest with which the runtime opens the files to be measured.
    """
    read, manifest = read_samples if gate.series is None else read_windows, compiled.manifest
    calibration = options.quantization.calibration
    samples = read(Path(calibration), before) if calibration is not None else None
    if options.quantization.kv_cache == "int8":
        fit_samples = (samples or draw_samples(gate, before)).fit_data
        manifest = quantize_caches(compiled.model, manifest, before, [*fit_samples, draw_long_sample(gate, before)])
    planner = BitPlanner(
        compiled.model, manifest, before, lambda: samples or draw_samples(gate, before), folder, _blocks_of(options)
    )
    if options.quantization.weights == "none":
        return planner, manifest
    if options.quantization.activation_scales == STATIC:
        fit_samples = planner.samples.fit_data
        is_random = samples is None and gate.source.step_input is not None
        planner.learn_static_scales([*fit_samples, draw_long_sample(gate, before)] if is_random else fit_samples)
    if samples is not None:
        planner.fit_integers({"int8": (8,), "int4": (4,), "mixed": (4, 6, 8)}[options.quantization.weights])
    return planner, structs.replace(
        manifest, quantization=options.quantization.weights, optimized_for=options.optimize_for
    )


def _budget(options: ExportOptions, reference: ReferenceDistribution | ReferenceOutputs | None) -> DegradationBudget:
    """Return the budget of the options, with the unit of the model's outputs.

    reference: for a single-pass model, or one that is stepped over numbers; its outputs determine the unit.
    """
    budget = options.budget
    is_unlimited = not budget.is_set and options.quantization.max_bits is None
    if options.quantization.weights == "mixed" and is_unlimited:
        budget = MIXED_BUDGET if reference is None else MIXED_SINGLE_PASS_BUDGET
    return budget if reference is None else budget.with_unit(reference.meaning)


def _plans(planner: BitPlanner, options: ExportOptions, budget: DegradationBudget) -> Sequence[BitPlan]:
    """Return the plans in the order in which they are tried."""
    if options.quantization.weights == "mixed":
        return planner.mixed(budget, options.quantization.max_bits)
    if options.quantization.weights == "none" or (
        options.quantization.weights == "int8" and options.quantization.calibration is None
    ):
        return [BitPlan()]
    return [planner.uniform(int(options.quantization.weights[3:]))]


def _blocks_of(options: ExportOptions) -> str:
    """Return the goal that chooses the blocks of 4 bits. WebGPU kernels are fast for the longer blocks of latency."""
    return LATENCY if options.target == "web" else options.optimize_for


def _rewrite(
    compiled: CompiledModel,
    planner: BitPlanner,
    plan: BitPlan,
    options: ExportOptions,
    step: str | None,
    forms: KernelForms,
) -> tuple[CompiledModel, dict[str, Product]]:
    """Return a copy of the planner's model in the plan's bits, and the quantised products by name.

    If a shortlist will be added, the output projection is separated from the stages.
    """
    adds_shortlist = (
        options.shortlist is not None and options.quantization.weights != "none"
    )  # a file without quantised weights has its shortlist already
    products: dict[str, Product] = {}
    model, manifest, counts = planner.model.clone(), compiled.manifest, {}
    if adds_shortlist:
        separate_projection(model)
    if options.quantization.weights != "none":
        parts = quantize_weights(
            model,
            plan.bits,
            _blocks_of(options),
            step,
            plan.integers,
            few_rows=few_rows_limits(forms),
            on_cpu=options.target == "cpu",
            float_activations=options.target == "web",
            static_scales=planner.static_scales,
        )
        counts = {"static_scales": parts.static_scales, "row_scales": parts.row_scales, "quantized": parts.count}
        products = parts.products
        decode = manifest.decode and structs.replace(manifest.decode, small_batch_limit=parts.small_batch_limit)
        manifest = structs.replace(manifest, decode=decode)
    if adds_shortlist:
        manifest = with_columns(model, manifest)
    return replace(compiled, model=model, manifest=manifest, counts={**compiled.counts, **counts}), products
