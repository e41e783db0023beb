"""`export`: the one call, as a short visible template: read → compile → verify → quantise → measure → write."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from tokenizers import Tokenizer

from tformer_export.alignments import Wanted
from tformer_export.budget import COSINE, Budget
from tformer_export.describe import in_half
from tformer_export.forms import CHOICES, DEFAULTS, ROTARY, Forms, few_rows, session_settings
from tformer_export.passes.half import HALVES
from tformer_export.passes.half import run as run_half
from tformer_export.pipeline import Compiled, Understood, understand
from tformer_export.quantize import (
    ACTIVATIONS,
    CACHES,
    GOALS,
    QUANTIZATIONS,
    THROUGHPUT,
    Degradation,
    Fixed,
    Mixture,
    OutputDegradation,
    OutputYardstick,
    Plan,
    Planner,
    Product,
    hold_in_int8,
    measure,
    measure_outputs,
)
from tformer_export.quantize import quantize as quantize_weights  # `quantize` is an argument of `export`
from tformer_export.quantize.plan import MIXED_BUDGET, MIXED_ONCE
from tformer_export.quantize.products import find_matrices
from tformer_export.quantize.samples import draw_long, draw_samples, read_samples
from tformer_export.report import ExportReport, peak_memory
from tformer_export.shortlist import Measured, check_columns, choose_columns, make_shortlist, set_apart
from tformer_export.soundness import unchanged
from tformer_export.source import Mask, Source
from tformer_export.source.base import special_tokens
from tformer_export.source.hugging_face import from_transformers, is_transformers_model
from tformer_export.source.module import from_module
from tformer_export.source.program import from_program
from tformer_export.target import TARGETS
from tformer_export.tune import ROWS, Request, Tuning, requests
from tformer_export.tune import tune as tune_forms
from tformer_export.verify import ROUNDINGS, TOLERANCE, Gate, ParityReport
from tformer_export.write import data_file, removed, write
from tformer_runtime import shortlist as candidates
from tformer_runtime.engine import Engine
from tformer_runtime.errors import OptionError, OutputError, ParityError, SourceError
from tformer_runtime.manifest import KEY, Manifest, SpecialTokens
from tformer_runtime.options import GenerationOptions, Settings

DEFAULT_HALF = "fp16"  # of files for CUDA


def export(
    model: torch.nn.Module | torch.export.ExportedProgram | Source,
    path: str | os.PathLike[str],
    example: Mapping[str, torch.Tensor] | None = None,
    step: str | None = None,
    *,
    quantize: str = "none",
    optimize_for: str = THROUGHPUT,
    activations: str = "rows",
    cache: str = "float",
    target: str = "cpu",
    precision: str | None = None,
    max_length: int | None = None,
    masks: Mapping[str, Mask] | None = None,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    output: str | int | None = None,
    tokenizer: str | Mapping[str, str] | None = None,
    task: str | None = None,
    special: SpecialTokens | Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    max_degradation: float | str | Budget | None = None,
    calibration: str | os.PathLike[str] | None = None,
    min_speed: float | None = None,
    alignments: Wanted | None = None,
    hidden: str | Sequence[str] = (),
    shortlist: str | os.PathLike[str] | None = None,
    tune: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> ExportReport:
    """Export a model to one ONNX file that decodes incrementally, verified against the model, and report on it.

    model: any module, a transformers model or a program of torch.export (which need no example), or a Source. A module
    without forward is taken as decode(memory, …) after encode(…), bound by their parameters' names.
    example: name → tensor (batch, time, …); the names are forward's parameters, in any order.
    step: the autoregressive input, stepped over with a cache; None for a model that is run once.
    quantize: "none", "int8", "int4" or "mixed": the fewest bits, 4, 8 or float by matrix, that max_degradation allows,
        "1.01x" unless it is given. target: "cpu", "cuda" or "portable" (standard operators only).
    precision: of products and caches, "fp32" or, for the target cuda alone, "fp16", which is its default unless the
        file is quantised. Logits are float32 in any case.
    optimize_for: "throughput" has one kernel for each quantised product, and a row's result is the same alone and in
        any batch, bit for bit; "latency" has another for steps of two or three rows at most, which is faster, rounds
        activations otherwise and needs a second copy of the decoder's weights in memory; "balanced" has that for large
        products alone.
    activations: what scales the numbers that quantised products read: "rows", each row by its own largest, or "fixed",
        scales that were learnt from the calibration data, or from what the model makes of random ids. These are faster,
        the more so the more rows; a row's result is its own as well, but rows louder than those data are clipped.
        What would err by too much is scaled by row; the report counts both.
    cache: "float", or "int8" for the keys and values of earlier positions in a byte each, on the cpu: a quarter of the
        memory and a faster step where much is cached, for a slower prompt.
    max_length: of a sequence; by default the most that the model allows, up to 512.
    masks: arguments that follow from an input's lengths, described by `padding(…)`, `causal(…)`, `lengths(…)` or
    `positions(…)`; they are not in the example.
    dynamic: the batch and time axis of an input, where they are not (0, 1). The logits are in the step input's layout.
    constants: arguments that are always the same, such as {"use_cache": False}.
    output: name or index of the logits among forward's outputs; by default `.logits`, "logits" or the first tensor.
    tokenizer: text in tokenizers' JSON format, for all inputs or by name. special: start, end and pad ids.
    max_degradation: the largest share of tokens that quantisation may change, 0.01 or "1%", or how many times it may
        multiply the perplexity, "1.02x"; ParityError beyond it, which says what would fit. Of a model that is run once:
        the share of rows whose class may change, if its output is of classes (see `quantize.outputs`), else what may be
        missing to a mean cosine of 1 with the unquantised outputs; by default of mixed 1%.
    calibration: a text file, lines as `quantize.samples` has them, that integers are fitted to by GPTQ; every fourth
        line is measured on instead. Without it, what the model makes of random ids is.
    min_speed: how many times as fast as the unquantised file the quantised one must be, for one row; ParityError below.
    alignments: the file can tell how much each step attends to each position of the request: True for the mean of all
        heads of all cross-attentions, "last" for the last one's, or which: layers, or pairs (layer, head), counted from
        0 in the order of computation. hidden: names of submodules whose outputs the file can give. Both are computed at
        each step from then on, whether asked for or not; alignments cost about as much as the scores of those layers'
        attention.
    shortlist: a text file, lines as of calibration, from which candidates for each source id are learned, so that a
        step computes the logits of those alone. For a model with an encoder that reads ids. ParityError if fewer than
        99.5 % of the lines decode greedily as with all ids.
    tune: measure on this machine which forms of attention, norms, projections and kernels are the fastest, for batches
        of 32, of one with optimize_for="latency", or of 1, 8 and 32 with "balanced", and keep these; see `tune.py`.

    Raises a TformerError whose text says what is wrong; then nothing is written. Takes seconds to minutes, by the
    number of operations, and memory of about four times the weights.
    """
    if quantize not in QUANTIZATIONS:
        raise OptionError(f"quantize is one of {', '.join(QUANTIZATIONS)}, not {quantize!r}")
    if optimize_for not in GOALS:
        raise OptionError(f"optimize_for is one of {', '.join(GOALS)}, not {optimize_for!r}")
    if optimize_for != THROUGHPUT and quantize == "none" and not tune:
        raise OptionError(
            f"{optimize_for} chooses among kernels of quantised products: quantize to int8 or int4 too, or tune"
        )
    if optimize_for != THROUGHPUT and target != "cpu":
        raise OptionError(
            f"{optimize_for} needs onnxruntime's own operator for few rows, as measured on the CPU: leave out either "
            f"it or the target {target}"
        )
    if target not in TARGETS:
        raise OptionError(f"target is one of {', '.join(TARGETS)}, not {target!r}")
    if activations not in ACTIVATIONS:
        raise OptionError(f"activations is one of {', '.join(ACTIVATIONS)}, not {activations!r}")
    if activations != "rows" and quantize == "none":
        raise OptionError(f"{activations} activations are those of quantised products: quantize to int8 or int4 too")
    if cache not in CACHES:
        raise OptionError(f"cache is one of {', '.join(CACHES)}, not {cache!r}")
    if cache != "float" and target != "cpu":
        raise OptionError(
            f"caches in {cache} need onnxruntime's own operator, as measured on the CPU: leave out either them or the "
            f"target {target}"
        )
    if tune and target != "cpu":
        raise OptionError(
            f"tune measures on this machine's CPU, which says nothing of the target {target}: leave out either of them"
        )
    half = _half(precision, target, quantize)
    wanted = _Quantisation(
        quantize,
        optimize_for,
        activations,
        cache,
        Budget.of(max_degradation),
        Path(calibration) if calibration is not None else None,
        min_speed,
    )
    lines = Path(shortlist) if shortlist is not None else None
    if lines is not None and not lines.is_file():
        raise OptionError(f"there is no file {lines} to learn a shortlist from")
    hidden = [hidden] if isinstance(hidden, str) else list(dict.fromkeys(hidden))
    out = Path(path)
    check_writable(out, force)
    call = {"masks": masks, "dynamic": dynamic, "constants": constants, "output": output}
    source = _source(model, example, step, call, tokenizer, task, special, defaults)
    if lines is not None and (source.step is None or not set(source.example) - {source.step, *source.masks}):
        raise _no_encoder()
    if lines is not None and target == "cuda":
        raise OptionError("a shortlist is for files that run on the CPU: leave out either it or the target cuda")
    clock = _Clock(progress)
    with source.ready():
        compiled, manifest, parity, degradation, mixture, products, measured, tuning, size = _make(
            source, out, wanted, target, half, max_length, clock, alignments, hidden, lines, tune
        )
    return ExportReport(
        path=str(out),
        source=source.name,
        target=target,
        precision=manifest.precision,
        quantization=quantize,
        activations=activations,
        cache=cache,
        max_length=manifest.max_length,
        parameters=sum(p.numel() for p in source.module.parameters()),
        size=size,
        parity=parity,
        found=compiled.found,
        degradation=degradation,
        mixture=mixture,
        optimized_for=manifest.optimized_for,
        products=products,
        tuning=tuning,
        seconds=clock.seconds,
        peak_memory=peak_memory(),
        shortlist=measured,
    )


def _half(precision: str | None, target: str, quantize: str) -> str | None:
    """The half precision that is asked for, or None for float32. OptionError for what cannot be had."""
    if precision is None:
        return DEFAULT_HALF if target == "cuda" and quantize == "none" else None
    if precision not in ("fp32", *HALVES):
        raise OptionError(f"precision is one of fp32, {', '.join(HALVES)}, not {precision!r}")
    if precision == "fp32":
        return None
    if target != "cuda":
        raise OptionError(
            f"{precision} is for the target cuda: onnxruntime has no products of it for CPUs, and would convert every "
            "weight at every step; to read less, quantise to int8 or int4"
        )
    if quantize != "none":
        raise OptionError(f"a quantised file computes in fp32 beside its integers: leave out {precision} or {quantize}")
    return precision


@dataclass(frozen=True)
class _Quantisation:
    """What is asked of it; see `export`. OptionError for what cannot be."""

    kind: str
    optimize_for: str
    activations: str
    cache: str
    budget: Budget
    calibration: Path | None
    min_speed: float | None

    def for_once(self, tune: bool) -> _Quantisation:
        """The same for a model that is run once. tune: then the goal says for which batches, too."""
        if self.optimize_for != THROUGHPUT and not tune:
            raise OptionError(
                f"{self.optimize_for} chooses kernels for steps of two or three tokens, and a model that is run once "
                f"reads its input whole: leave it at {THROUGHPUT}"
            )
        if self.cache != "float":
            raise OptionError("a model that is run once has no cache: leave it at float")
        return replace(self, budget=self.budget.over(COSINE))

    def __post_init__(self) -> None:
        if self.calibration is not None and not self.calibration.is_file():
            raise OptionError(f"there is no file {self.calibration} to calibrate with")
        if not self.any and (self.calibration is not None or self.min_speed is not None):
            raise OptionError(
                "calibration and min_speed are for a quantised file: choose quantize='int8', 'int4' or 'mixed', or "
                "cache='int8'"
            )

    @property
    def any(self) -> bool:
        return self.kind != "none" or self.cache != "float"

    @property
    def exact(self) -> bool:
        """Whether a row's result is the same alone and in any batch. Products of floats are not to the last digit, and
        what is rounded after them may be to the next integer."""
        floats = self.cache != "float" and self.kind in ("none", "mixed")
        return self.optimize_for == THROUGHPUT and not floats


def _make(
    source: Source,
    out: Path,
    wanted: _Quantisation,
    target: str,
    half: str | None,
    max_length: int | None,
    clock: _Clock,
    alignments: Wanted | None,
    hidden: Sequence[str],
    lines: Path | None,
    tune: bool,
) -> tuple[
    Compiled,
    Manifest,
    ParityReport,
    Degradation | OutputDegradation | None,
    Mixture | None,
    dict[str, Product],
    Measured | None,
    Tuning | None,
    int,
]:
    """Compile, verify and write: the file is made in a folder beside its place and renamed when all is proven."""
    if source.step is None:
        wanted = wanted.for_once(tune)
    with _folder_beside(out) as folder:
        understood = understand(source, target, max_length, clock.stage, alignments, hidden, half is not None)
        compiled = understood.compile(stage=clock.stage)
        forms, tuning = DEFAULTS, None
        if tune:
            with clock.stage("tune"), unchanged(source.module):
                tuning = _tuned(understood, compiled, wanted, folder)
                forms = tuning.forms
                compiled = understood.compile(forms)
                compiled.manifest = replace(
                    compiled.manifest,
                    optimized_for=wanted.optimize_for,
                    forms=forms,
                    session=session_settings(forms),
                )
        del understood
        gate = Gate(source, compiled.inputs, compiled.landmarks, gives_last=compiled.gives_last)
        if lines is not None and not compiled.manifest.staged:
            raise _no_encoder()
        if lines is not None and wanted.kind == "none":
            set_apart(compiled.model)
            compiled.manifest = _with_columns(compiled.model, compiled.manifest)
        written = _save(compiled.model, compiled.manifest, folder / "model.onnx")
        degradation: Degradation | OutputDegradation | None = None
        mixture: Mixture | None = None
        products: dict[str, Product] = {}
        with clock.stage("verify"), unchanged(source.module):
            before = Engine(written, device="cpu")
            parity = gate.check(before)
        if half is not None:
            del before
            before, parity = _halved(compiled, gate, half, parity, folder, clock)
        manifest = _with_parity(compiled.manifest, parity, None)
        if wanted.any:
            manifest, degradation, mixture, products = _quantise(
                compiled,
                manifest,
                gate,
                before,
                wanted,
                folder,
                clock,
                forms,
                lines is not None and wanted.kind != "none",
            )
            manifest = _with_parity(manifest, parity, degradation)
        del before  # its session holds the weights once more
        measured: Measured | None = None
        if lines is not None:
            with clock.stage("shortlist"):
                manifest, measured = _add_shortlist(compiled.model, manifest, gate, lines, folder)
        with clock.stage("write"):
            size = _publish(compiled.model, manifest, folder / "done" / out.name, out)
    return compiled, manifest, parity, degradation, mixture, products, measured, tuning, size


def _no_encoder() -> OptionError:
    return OptionError(
        "a shortlist goes from the ids that an encoder reads to those that a decoder writes, and this model has not "
        "both: export it without --shortlist"
    )


def _with_columns(model: ir.Model, manifest: Manifest) -> Manifest:
    """Let the model's projection be of gathered columns, where there are candidates."""
    assert manifest.decode is not None
    return replace(manifest, decode=replace(manifest.decode, shortlist=choose_columns(model)))


def _add_shortlist(
    model: ir.Model, manifest: Manifest, gate: Gate, lines: Path, folder: Path
) -> tuple[Manifest, Measured]:
    """Prove that the file computes the same for candidates, learn which they are, and put them into its metadata."""
    engine = Engine(_save(model, manifest, folder / "shortlist.onnx"), device="cpu")
    error = check_columns(gate, engine)
    made, measured = make_shortlist(engine, lines)
    model.metadata_props[candidates.KEY] = made.to_text()
    held = {name: value for name, value in asdict(measured).items() if name != "speed"} | {"max_relative_error": error}
    assert manifest.decode is not None
    assert manifest.decode.shortlist is not None
    spec = replace(manifest.decode.shortlist, common=len(made.common), each=measured.each, measured=held)
    return replace(manifest, decode=replace(manifest.decode, shortlist=spec)), measured


def _tuned(understood: Understood, compiled: Compiled, wanted: _Quantisation, folder: Path) -> Tuning:
    """What is the fastest here, of what the model has: with weights rounded to nearest if quantised, and always with
    caches in float and logits of all ids."""
    source, gate = understood.source, Gate(understood.source, compiled.inputs)

    def asked(manifest: Manifest, forms: Forms) -> Manifest:
        return replace(
            manifest,
            quantization=wanted.kind,
            optimized_for=wanted.optimize_for,
            forms=forms,
            session=session_settings(forms),
        )

    def build(forms: Forms) -> Request:
        made = understood.compile(forms)
        manifest = asked(made.manifest, forms)
        if wanted.kind != "none":
            bits = 4 if wanted.kind == "int4" else 8
            names = [name for matrix in find_matrices(made.model) for name in matrix.products]
            fixed = dict.fromkeys(names, Fixed.between(-1, 1)) if wanted.activations == "fixed" else {}
            quantised = quantize_weights(
                made.model, bits, wanted.optimize_for, source.step, few_rows=few_rows(forms), on_cpu=True, fixed=fixed
            )
            manifest = replace(manifest, narrow=quantised.narrow)
        with removed(folder / "candidate.onnx") as path:  # a session has it mapped
            return requests(gate, Engine(_save(made.model, manifest, path), device="cpu"))

    compiled = replace(compiled, manifest=asked(compiled.manifest, DEFAULTS))
    # A cache in int8 has scales that hold at all positions where the attention operator itself turns the keys.
    fixed = {ROTARY} if wanted.cache != "float" else set()
    choices = [choice for choice in CHOICES if choice not in fixed and choice.applies(compiled)]
    return tune_forms(build, choices, ROWS[wanted.optimize_for])


def _halved(
    compiled: Compiled, gate: Gate, half: str, exact: ParityReport, folder: Path, clock: _Clock
) -> tuple[Engine, ParityReport]:
    """Round the compiled model to half and compare it again, on a GPU if there is one. exact: parity before."""
    precision = HALVES[half]
    with clock.stage("half"):
        compiled.found["half"] = run_half(compiled.model, precision)
        compiled.manifest = in_half(compiled.manifest, compiled.model, half)
        written = _save(compiled.model, compiled.manifest, folder / "half.onnx")
    with clock.stage("verify"), unchanged(gate.source.module):
        length = compiled.manifest.max_length
        gate.tolerance = max(TOLERANCE, ROUNDINGS * gate.sensitivity(precision.rounded, length))
        engine = Engine(written, device="auto")
        parity = gate.check(engine)
    parity.device, parity.tolerance, parity.exact_error = engine.session.device, gate.tolerance, exact.relative_error
    return engine, parity


def _quantise(
    compiled: Compiled,
    manifest: Manifest,
    gate: Gate,
    before: Engine,
    wanted: _Quantisation,
    folder: Path,
    clock: _Clock,
    forms: Forms,
    columns: bool,
) -> tuple[Manifest, Degradation | OutputDegradation, Mixture | None, dict[str, Product]]:
    """Plan, rewrite and measure, for a mixture with more bits while the file is beyond the budget; or refuse.

    columns: the output projection is to be of gathered columns, too, and is not yet.
    """
    budget, once = wanted.budget, gate.source.step is None
    if wanted.kind == "mixed" and budget.tokens is None and budget.perplexity is None:
        budget = MIXED_ONCE if once else MIXED_BUDGET
    with clock.stage("calibrate"):
        samples = read_samples(wanted.calibration, before) if wanted.calibration is not None else None
        if wanted.cache == "int8":
            seen = (samples or draw_samples(gate, before)).seen
            manifest = hold_in_int8(compiled.model, manifest, before, [*seen, draw_long(gate, before)])
        planner = Planner(compiled.model, manifest, before, lambda: samples or draw_samples(gate, before), folder)
        if wanted.kind != "none":  # as which the runtime opens what is measured
            manifest = replace(manifest, quantization=wanted.kind, optimized_for=wanted.optimize_for)
        if wanted.activations == "fixed":
            seen = planner.samples.seen
            planner.fix(seen if samples is not None or once else [*seen, draw_long(gate, before)])
        if samples is not None and wanted.kind != "none":
            planner.fit({"int8": (8,), "int4": (4,), "mixed": (4, 8)}[wanted.kind])
    with clock.stage("search"):
        yardstick = planner.yardstick if once else None
        if yardstick is not None:
            budget = budget.over(yardstick.meaning)
        if wanted.kind == "mixed":
            plans: Sequence[Plan] = planner.mixed(budget)
        elif wanted.kind == "none":
            plans = [Plan()]
        else:
            plans = [Plan() if wanted.kind == "int8" and samples is None else planner.uniform(int(wanted.kind[3:]))]
    products: dict[str, Product] = {}
    measured_on = planner.samples.measured if samples is not None or wanted.kind == "mixed" else ()
    for plan in plans:
        with clock.stage("quantise"):
            compiled.model = planner.model.clone()
            if columns:
                set_apart(compiled.model)
            if wanted.kind != "none":
                made = quantize_weights(
                    compiled.model,
                    plan.bits,
                    wanted.optimize_for,
                    gate.source.step,
                    plan.ready,
                    few_rows=few_rows(forms),
                    on_cpu=manifest.target == "cpu",
                    fixed=planner.fixed,
                )
                compiled.found |= {"fixed": made.fixed, "by_row": made.by_row}
                compiled.found["quantised"], products = made.count, made.products
                manifest = replace(manifest, narrow=made.narrow)
            if columns:
                manifest = _with_columns(compiled.model, manifest)
            written = _save(compiled.model, manifest, folder / "quantised.onnx")
        with clock.stage("measure"):
            after = Engine(written, device="cpu")
            degradation: Degradation | OutputDegradation
            if isinstance(yardstick, OutputYardstick):
                degradation = measure_outputs(gate, before, after, yardstick)
            else:
                degradation = measure(gate, before, after, measured_on, exact=wanted.exact)
        beyond = degradation.beyond(budget)
        if beyond is None:
            break
    else:
        with clock.stage("search"):
            advice = (
                planner.what_would_fit(budget) if wanted.kind != "none" else "leave the caches in float, or allow more"
            )
        raise ParityError(f"quantisation {beyond}; no file was written: {advice}")
    if wanted.min_speed is not None and degradation.speed < wanted.min_speed:
        raise ParityError(
            f"the quantised file is {degradation.speed:.2f} times as fast as the unquantised one, for one row, and "
            f"{wanted.min_speed:g} is asked for; no file was written: small models gain size by quantisation, not speed"
        )
    return manifest, degradation, plan.mixture, products


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """A folder in which the file is made, on the same disk as its place; gone afterwards, whatever happens."""
    try:
        folder = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    with folder as name:
        (Path(name) / "done").mkdir()
        yield Path(name)


def check_writable(out: Path, force: bool) -> None:
    """OutputError if the file cannot be made, or is there already and may not be overwritten."""
    if out.exists() and not force:
        raise OutputError(f"{out} exists: give --force (force=True) to overwrite it, or another path")
    if data_file(out).exists() and not force:
        raise OutputError(
            f"{data_file(out)} exists, where weights would go: give --force (force=True), or another path"
        )
    if not out.parent.is_dir():
        raise OutputError(f"{out} cannot be written: there is no folder {out.parent}")
    if not os.access(out.parent, os.W_OK) or out.is_dir():
        raise OutputError(f"{out} cannot be written: {'it is a folder' if out.is_dir() else 'permission denied'}")


def _source(
    model: torch.nn.Module | torch.export.ExportedProgram | Source,
    example: Mapping[str, torch.Tensor] | None,
    step: str | None,
    call: Mapping[str, Any],
    tokenizer: str | Mapping[str, str] | None,
    task: str | None,
    special: SpecialTokens | Mapping[str, Any] | None,
    defaults: Mapping[str, Any] | None,
) -> Source:
    """`call`: how forward is called, as `from_module` takes it."""
    if isinstance(special, Mapping):
        special = special_tokens(special)
    unread = [name for name, value in {**call, "step": step}.items() if value is not None]
    if isinstance(model, Source):
        source = model
    elif isinstance(model, torch.export.ExportedProgram):
        source, unread = from_program(model, step, example=example, **call), []
    elif example is None and is_transformers_model(model):
        source = from_transformers(model)
    elif example is None:
        raise SourceError("give an example of the model's inputs: example={name of forward's parameter: tensor}")
    else:
        source, unread = from_module(model, example, step, **call), []
    if unread:
        raise OptionError(f"{', '.join(unread)} is read together with an example of the inputs: give one")
    names = [n for n in source.example if n not in source.masks]
    given: dict[str, Any] = {
        "tokenizers": dict.fromkeys(names, tokenizer) if isinstance(tokenizer, str) else tokenizer,
        "task": task,
        "special": special,
        "defaults": defaults,
    }
    source = replace(source, **{name: value for name, value in given.items() if value is not None})
    _check_texts(source)
    return source


def _check_texts(source: Source) -> None:
    """Refuse before minutes of work what the runtime would refuse after it: options and tokenizers."""
    Settings.of(GenerationOptions(), source.defaults)
    for name, text in source.tokenizers.items():
        if name not in source.example:
            raise OptionError(f"there is no input {name!r} for the tokenizer of that name: {', '.join(source.example)}")
        try:
            Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises plain Exception
            raise OptionError(f"the tokenizer of {name} is not in tokenizers' JSON format: {error}") from error


def _save(model: ir.Model, manifest: Manifest, path: Path) -> Path:
    """Write the model with its manifest."""
    model.metadata_props[KEY] = manifest.to_json()
    write(model, path)
    return path


def _publish(model: ir.Model, manifest: Manifest, written: Path, out: Path) -> int:
    """Write the file under its own name, beside its place, and rename it, weights first; returns its bytes."""
    _save(model, manifest, written)
    files = [(f, place) for f, place in ((data_file(written), data_file(out)), (written, out)) if f.exists()]
    size = sum(f.stat().st_size for f, _ in files)
    try:
        if len(files) == 1:
            data_file(out).unlink(missing_ok=True)  # of what stood here before
        for file, place in files:
            file.replace(place)
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from error
    return size


def _with_parity(
    manifest: Manifest, parity: ParityReport, degradation: Degradation | OutputDegradation | None
) -> Manifest:
    measured = parity.to_dict()
    if degradation is not None:
        measured["quantised"] = asdict(degradation)
        del measured["quantised"]["speed"]  # a time would make every export of a model another file
    return replace(manifest, parity=measured)


class _Clock:
    """Seconds by stage, in the order in which they ran."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress(name)
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
