"""One file, from a source to its place: compile → tune → verify → round or quantise → shortlist → write."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tformer_export.analysis.determinism import unchanged
from tformer_export.common.atomic_output import folder_beside, publish
from tformer_export.common.clock import Clock
from tformer_export.common.kernel_choices import DEFAULTS
from tformer_export.common.onnx_writer import save
from tformer_export.compile import Compiled, understand
from tformer_export.lowering.manifest import in_half
from tformer_export.options import Asked, no_encoder
from tformer_export.passes import emulate_half_on_cpu
from tformer_export.passes.half_precision import HALVES
from tformer_export.passes.half_precision import run as run_half
from tformer_export.quantize import Degradation, Mixture, OutputDegradation, Product
from tformer_export.quantize.apply import FewerBits, in_fewer_bits
from tformer_export.shortlist import Measured, add_shortlist, set_apart, with_columns
from tformer_export.sources import Source
from tformer_export.tune.tune import Tuning, tune_model
from tformer_export.verify.end_to_end import check_raw
from tformer_export.verify.parity import LOOSEST, ROUNDINGS, Gate
from tformer_export.verify.report import TOLERANCE, ParityReport
from tformer_runtime.backend.session import cuda_missing
from tformer_runtime.base.errors import ParityError
from tformer_runtime.engine.engine import Engine
from tformer_runtime.format.manifest import Manifest


@dataclass
class Made:
    """A file that stands in its place, and what `ExportReport` says of it."""

    manifest: Manifest
    found: dict[str, int]
    parity: ParityReport
    size: int
    degradation: Degradation | OutputDegradation | None
    mixture: Mixture | None
    products: dict[str, Product]
    tuning: Tuning | None
    shortlist: Measured | None


def make(source: Source, out: Path, asked: Asked, clock: Clock) -> Made:
    """Compile, verify and write: the file is made in a folder beside its place and renamed when all is proven.

    asked: of this model (`Asked.of_model`). Raises a TformerError; then nothing is written.
    """
    with folder_beside(out) as folder:
        understood = understand(
            source,
            asked.target,
            asked.max_length,
            clock.stage,
            asked.alignments,
            asked.hidden,
            asked.half is not None,
            asked.attention,
        )
        compiled = understood.compile(stage=clock.stage)
        forms, tuning = DEFAULTS, None
        if asked.tune:
            with clock.stage("tune"), unchanged(source.module):
                tuning = tune_model(understood, compiled, asked, folder)
                forms = tuning.forms
                compiled = understood.compile(forms)
                compiled.manifest = asked.in_forms(compiled.manifest, forms)
        del understood
        gate = Gate(source, compiled.inputs, compiled.landmarks, gives_last=compiled.gives_last, series=compiled.series)
        if asked.shortlist is not None:
            if not compiled.manifest.staged or compiled.series is not None:
                raise no_encoder()
            if asked.quantize == "none":
                set_apart(compiled.model)
                compiled.manifest = with_columns(compiled.model, compiled.manifest)
        before, parity = _verified(compiled, gate, folder, clock)
        if asked.half is not None:
            del before
            before, parity = _halved(compiled, gate, asked.half, parity, folder, clock)
        _compare_raw(compiled, gate, before, parity, clock)
        fewer = FewerBits(_with_parity(compiled.manifest, parity, None))
        if asked.fewer_bits:
            fewer = in_fewer_bits(compiled, fewer.manifest, gate, before, asked, folder, clock, forms)
        del before  # its session holds the weights once more
        manifest, measured = _with_parity(fewer.manifest, parity, fewer.degradation), None
        if asked.shortlist is not None:
            with clock.stage("shortlist"):
                manifest, measured = add_shortlist(compiled.model, manifest, gate, asked.shortlist, folder)
        with clock.stage("write"):
            size = publish(save(compiled.model, manifest, folder / "done" / out.name), out)
    return Made(
        manifest, compiled.found, parity, size, fewer.degradation, fewer.mixture, fewer.products, tuning, measured
    )


def _verified(compiled: Compiled, gate: Gate, folder: Path, clock: Clock) -> tuple[Engine, ParityReport]:
    written = save(compiled.model, compiled.manifest, folder / "model.onnx")
    with clock.stage("verify"), unchanged(gate.source.module):
        engine = Engine(written, device="cpu")
        return engine, gate.check(engine)


def _compare_raw(compiled: Compiled, gate: Gate, engine: Engine, parity: ParityReport, clock: Clock) -> None:
    """From raw inputs to final results, of a model that is run once; with rows of one size alone, if others change
    them."""
    if not parity.ragged and compiled.manifest.encode is not None:
        encode = replace(compiled.manifest.encode, ragged=False)
        engine.manifest = compiled.manifest = replace(compiled.manifest, encode=encode)
    with clock.stage("verify"), unchanged(gate.source.module):
        parity.raw = check_raw(gate.source, engine, gate.tolerance)


def _halved(
    compiled: Compiled, gate: Gate, half: str, exact: ParityReport, folder: Path, clock: Clock
) -> tuple[Engine, ParityReport]:
    """Round the compiled model to half and compare it again, on a GPU if there is one. exact: parity before."""
    precision = HALVES[half]
    with clock.stage("half"):
        compiled.found["half"] = run_half(compiled.model, precision)
        compiled.manifest = in_half(compiled.manifest, compiled.model, half)
        judged, name = compiled.model, "half.onnx"
        if cuda_missing():
            judged, name = judged.clone(), "on_cpu.onnx"
            emulate_half_on_cpu.run(judged)
        written = save(judged, compiled.manifest, folder / name)
    with clock.stage("verify"), unchanged(gate.source.module):
        rounded = functools.partial(precision.rounded, random=torch.Generator().manual_seed(0))
        moved = gate.sensitivity(rounded, compiled.manifest.max_length)
        gate.tolerance = max(TOLERANCE, ROUNDINGS * moved)
        if gate.tolerance > LOOSEST:
            raise ParityError(
                f"rounding the weights to {half}, and nothing else, moves the source's logits by {moved:.2g} of their "
                f"range, so that a file in it could be compared with nothing: choose {_other_than(half)}; no file was "
                "written"
            )
        engine = Engine(written, device="auto" if judged is compiled.model else "cpu")
        try:
            parity = gate.check(engine)
        except ParityError as error:
            raise ParityError(f"computed in {half}, {error}: choose {_other_than(half)}") from error
    parity.device, parity.tolerance, parity.exact_error = engine.session.device, gate.tolerance, exact.relative_error
    return engine, parity


def _other_than(half: str) -> str:
    return "bf16, which has the range of float32, or fp32" if half == "fp16" else "fp16 or fp32"


def _with_parity(
    manifest: Manifest, parity: ParityReport, degradation: Degradation | OutputDegradation | None
) -> Manifest:
    measured = parity.to_dict()
    if degradation is not None:
        measured["quantised"] = asdict(degradation)
        del measured["quantised"]["speed"]  # a time would make every export of a model another file
    return replace(manifest, parity=measured)
