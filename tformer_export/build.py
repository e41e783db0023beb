"""One file, from a source to its place: compile → tune → verify → halve or quantise → shortlist → golden → write.

Each step takes the values of the steps before it and returns new ones. Nothing is assigned from outside.
"""

from __future__ import annotations

import functools
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx_ir as ir
import torch
from msgspec import structs

from tformer_export.calibration.samples import check_lines, check_text_file
from tformer_export.calibration.series_windows import read_values
from tformer_export.common.atomic_output import folder_next_to, publish
from tformer_export.common.clock import PhaseClock, peak_memory
from tformer_export.common.kernel_choices import DEFAULT_FORMS, KernelForms, with_forms
from tformer_export.common.module_state import unchanged
from tformer_export.common.onnx_writer import save
from tformer_export.compile import AnalysedModel, CompiledModel, analyse
from tformer_export.lowering.model_manifest import with_half_precision
from tformer_export.options import ExportOptions, no_encoder
from tformer_export.passes.check_graph import check_rewrite
from tformer_export.passes.half import emulate_half_on_cpu
from tformer_export.passes.half.half_precision import HALVES
from tformer_export.passes.half.half_precision import run as run_half
from tformer_export.passes.weight_bits import count_weights
from tformer_export.quantize import Degradation, OutputDegradation
from tformer_export.quantize.apply import QuantizedResult, check_quantizable, quantize_within_budget
from tformer_export.report import ExportReport, tokenizer_gaps
from tformer_export.shortlist import add_shortlist, separate_projection, with_columns
from tformer_export.sources import Source
from tformer_export.tune.tune import Tuning, tune_model
from tformer_export.verify.end_to_end import check_raw
from tformer_export.verify.golden.record import golden_bytes, make_golden
from tformer_export.verify.parity import MAX_TOLERANCE, ROUNDINGS, ParityGate
from tformer_export.verify.report import TOLERANCE, ParityReport
from tformer_runtime.backend.native_kernels import wanted_kernels
from tformer_runtime.backend.session import find_missing_cuda
from tformer_runtime.base.errors import ParityError
from tformer_runtime.base.whole_files import replaced_file
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest


@dataclass(frozen=True)
class _VerifiedModel:
    """A compiled model, the engine of its file, and the gate that compared the two."""

    compiled: CompiledModel
    gate: ParityGate
    engine: Engine
    parity: ParityReport


def build(source: Source, out: Path, options: ExportOptions, clock: PhaseClock) -> ExportReport:
    """Compile a model, verify its file and move the file to its place, from a temporary folder next to it.

    Return the report.

    options: for this model (`ExportOptions.for_model`). Raises a TformerError; then nothing is written.
    """
    _check_files(source, options)
    with folder_next_to(out) as folder:
        compiled, forms, tuning = _compile(source, options, folder, clock)
        if source.packed_weights:
            compiled = replace(compiled, manifest=structs.replace(compiled.manifest, quantization="int4"))
        verified = _verify(compiled, source, folder, clock)
        if options.half is not None:
            verified = _round_to_half(verified, options.half, folder, clock)
        verified = _verify_raw_inputs(verified, clock)
        compiled, gate, parity = verified.compiled, verified.gate, verified.parity
        compiled = replace(compiled, manifest=_with_parity(compiled.manifest, parity, None))
        quantized = QuantizedResult(compiled)
        if options.quantization.quantizes:
            quantized = quantize_within_budget(compiled, gate, verified.engine, options, folder, clock, forms)
        del verified, compiled  # a session and a model that hold copies of the weights
        model, manifest, measured = quantized.compiled.model, quantized.compiled.manifest, None
        manifest = _with_parity(manifest, parity, quantized.degradation)
        if options.shortlist is not None:
            with clock.phase("shortlist"):
                manifest, measured = add_shortlist(model, manifest, gate, Path(options.shortlist), folder)
        bits = {str(bits): count for bits, count in count_weights(model).items()}
        manifest = structs.replace(manifest, weight_bits=bits)
        size = _write(model, manifest, folder / "done" / out.name, out, options, clock)
    return ExportReport(
        path=str(out),
        source=source.name,
        adapters=source.adapters,
        task=source.task,
        target=options.target,
        precision=manifest.precision,
        quantization=manifest.quantization,
        activation_scales=options.quantization.activation_scales,
        kv_cache=options.quantization.kv_cache,
        max_length=manifest.max_length,
        parameters=sum(p.numel() for p in source.module.parameters()),
        size=size,
        parity=parity,
        counts=quantized.compiled.counts,
        weight_bits=bits,
        unrecognised=quantized.compiled.unrecognised,
        max_length_cause=quantized.compiled.max_length_cause,
        input_limits={
            spec.name: spec.max_length
            for spec in (manifest.encode.inputs if manifest.encode else ())
            if spec.max_length is not None
        },
        degradation=quantized.degradation,
        mixture=quantized.mixture,
        optimized_for=manifest.optimized_for,
        products=quantized.products,
        calibration=quantized.calibration,
        tuning=tuning,
        seconds=clock.seconds,
        peak_memory=peak_memory(),
        shortlist=measured,
        tokenizer_gaps=tokenizer_gaps(manifest),
    )


def _write(
    model: ir.Model, manifest: Manifest, unfinished: Path, out: Path, options: ExportOptions, clock: PhaseClock
) -> int:
    """Write the finished file, and its golden file, and move both to their places. Return the size of the first."""
    with clock.phase("write"):
        written = save(model, manifest, unfinished)
    if options.golden is None:
        with clock.phase("write"):
            return publish(written, out)
    with clock.phase("golden"):
        golden = golden_bytes(make_golden(written))
    with clock.phase("write"), replaced_file(Path(options.golden)) as file:  # it takes its place after the model
        file.write(golden)
        file.flush()
        os.fsync(file.fileno())  # a full disk is noticed before the model takes its place
        return publish(written, out)


def _compile(
    source: Source, options: ExportOptions, folder: Path, clock: PhaseClock
) -> tuple[CompiledModel, KernelForms, Tuning | None]:
    """Compile the model in the kernel forms of its file, with a separate output projection if it gets a shortlist."""
    extra = options.extra_outputs
    analysed: AnalysedModel = analyse(
        source,
        options.target,
        options.max_length,
        clock.phase,
        extra.cross_attentions,
        extra.submodules,
        options.half is not None,
        extra.attentions,
    )
    calibration = options.quantization.calibration
    if calibration is not None and analysed.series is not None:
        read_values(Path(calibration), analysed.series)
    compiled, forms, tuning = analysed.compile(phase=clock.phase), DEFAULT_FORMS, None
    _check_compiled(compiled, options)
    if options.tune:
        with clock.phase("tune"), unchanged(source.module):
            tuning = tune_model(analysed, compiled, options, folder)
            forms = tuning.forms
            compiled = analysed.compile(forms)
            compiled = replace(compiled, manifest=with_forms(compiled.manifest, forms, options.optimize_for))
    if options.shortlist is not None and options.quantization.weights == "none":
        separate_projection(compiled.model)  # that of quantised weights is separated after the rewrite
        compiled = replace(compiled, manifest=with_columns(compiled.model, compiled.manifest))
    return compiled, forms, tuning


def _check_files(source: Source, options: ExportOptions) -> None:
    """Raise OptionError for files of data that hold too little to use, and TFORMER_KERNELS, before it is traced."""
    wanted_kernels()
    if options.quantization.calibration is not None and source.series is None:
        check_text_file(Path(options.quantization.calibration), "--calibration")
    if options.shortlist is not None:
        check_text_file(Path(options.shortlist), "--shortlist")


def _check_compiled(compiled: CompiledModel, options: ExportOptions) -> None:
    """Raise the errors of data, and of options of quantisation, that the compiled model cannot use.

    Verification, tuning and quantisation come later, and take longer.
    """
    if options.shortlist is not None and (not compiled.manifest.staged or compiled.series is not None):
        raise no_encoder()
    if options.quantization.quantizes:
        check_quantizable(compiled, options)
    files = {"--calibration": options.quantization.calibration, "--shortlist": options.shortlist}
    if compiled.series is None:
        for option, file in files.items():
            if file is not None:
                check_lines(Path(file), compiled.manifest, option)


def _verify(compiled: CompiledModel, source: Source, folder: Path, clock: PhaseClock) -> _VerifiedModel:
    """Write the compiled model to a file and compare it with its source in float32."""
    gate = ParityGate(source, compiled.inputs, compiled.locator, gives_last=compiled.gives_last, series=compiled.series)
    written = save(compiled.model, compiled.manifest, folder / "model.onnx")
    with clock.phase("verify"), unchanged(source.module):
        engine = Engine(written, device="cpu", native_kernels=False)
        return _VerifiedModel(compiled, gate, engine, gate.check(engine))


def _verify_raw_inputs(verified: _VerifiedModel, clock: PhaseClock) -> _VerifiedModel:
    """Compare a single-pass model from raw inputs to final results as well.

    If the comparison of rows showed that padding changes them, its file runs rows of one size alone.
    """
    compiled, gate, engine, parity = verified.compiled, verified.gate, verified.engine, verified.parity
    if not parity.ragged and compiled.manifest.encode is not None:
        manifest = structs.replace(compiled.manifest, encode=structs.replace(compiled.manifest.encode, ragged=False))
        compiled, engine = replace(compiled, manifest=manifest), Engine(engine.session, manifest=manifest)
    with clock.phase("verify"), unchanged(gate.source.module):
        raw = check_raw(gate.source, engine, gate.tolerance)
    return _VerifiedModel(compiled, gate, engine, replace(parity, raw=raw))


def _round_to_half(verified: _VerifiedModel, half: str, folder: Path, clock: PhaseClock) -> _VerifiedModel:
    """Round the model to half precision and compare it again, on a GPU if there is one."""
    precision, gate = HALVES[half], verified.gate
    with clock.phase("half"):
        model = verified.compiled.model
        counts = {**verified.compiled.counts, "half": run_half(model, precision)}
        check_rewrite(model, "half_precision")
        manifest = with_half_precision(verified.compiled.manifest, model, half)
        compiled = replace(verified.compiled, manifest=manifest, counts=counts)
        judged, name = model, "half.onnx"
        if find_missing_cuda():
            judged, name = judged.clone(), "on_cpu.onnx"
            emulate_half_on_cpu.run(judged)
            check_rewrite(judged, "emulate_half_on_cpu")
        written = save(judged, manifest, folder / name)
    with clock.phase("verify"), unchanged(gate.source.module):
        rounded = functools.partial(precision.add_rounding_error, random=torch.Generator().manual_seed(0))
        moved = gate.sensitivity(rounded, manifest.max_length)
        tolerance = max(TOLERANCE, ROUNDINGS * moved)
        if tolerance > MAX_TOLERANCE:
            raise ParityError(
                f"rounding the weights to {half}, and nothing else, moves the source's logits by {moved:.2g} of their "
                f"range, so that a file in it could be compared with nothing: choose {_other_than(half)}; no file was "
                "written"
            )
        gate = gate.with_tolerance(tolerance)
        engine = Engine(written, device="auto" if judged is model else "cpu", native_kernels=False)
        try:
            parity = gate.check(engine)
        except ParityError as error:
            raise ParityError(f"computed in {half}, {error}: choose {_other_than(half)}") from error
    exact = verified.parity.relative_error
    parity = replace(parity, device=engine.session.device, tolerance=tolerance, exact_error=exact)
    return _VerifiedModel(compiled, gate, engine, parity)


def _other_than(half: str) -> str:
    return "bf16, which has the range of float32, or fp32" if half == "fp16" else "fp16 or fp32"


def _with_parity(
    manifest: Manifest, parity: ParityReport, degradation: Degradation | OutputDegradation | None
) -> Manifest:
    measured = parity.to_dict()
    if degradation is not None:
        measured["quantized"] = asdict(degradation)
        for name in ("speed", "kernels"):  # facts of this machine would make every export of a model another file
            del measured["quantized"][name]
    return structs.replace(manifest, parity=measured)
