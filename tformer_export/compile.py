"""The pipeline from a source to an ONNX model, one function and one dataclass for each of its five steps.

| function | result | content |
| --- | --- | --- |
| `capture_model` | `CapturedModel` | the traced graph of the whole sequence |
| `analyse_model` | `AnalysedModel` | binding times, attentions, facts on inputs |
| `stage_model` | `StagedModel` | the encode and decode stages as programs |
| `lower_model` | `LoweredModel` | each stage as an ONNX model |
| `assemble_model` | `CompiledModel` | both stages in one model, its passes, its manifest |

`analyse` runs the first two. `AnalysedModel.compile` runs the others, for files of several kernel forms. All but the
last one hold `TORCH_PATCH_LOCK`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
from msgspec import structs
from torch.fx import Node

from tformer_export.analysis.batch_axes import BatchAxis, times_batch
from tformer_export.analysis.binding_time import Level, binding_times
from tformer_export.analysis.input_facts import InputFacts, find_input_facts
from tformer_export.analysis.interpreter import Constants
from tformer_export.analysis.series_options import make_series_preprocessor
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.example_sizes import Axis
from tformer_export.common.fx_nodes import describe_node, expression, meta
from tformer_export.common.kernel_choices import DEFAULT_FORMS, KernelForms
from tformer_export.common.option_values import DEFAULT_MAX_LENGTH
from tformer_export.common.torch_patch_lock import TORCH_PATCH_LOCK
from tformer_export.lowering.join_stages import assemble
from tformer_export.lowering.model_manifest import describe
from tformer_export.lowering.target import TARGETS, Target
from tformer_export.lowering.to_onnx import to_onnx
from tformer_export.normalise import FOLDS, FORMS, NormaliseSettings, normalise
from tformer_export.normalise.attention_patterns import Recognition
from tformer_export.normalise.attention_weights import AttentionSelection
from tformer_export.passes import run_passes
from tformer_export.soundness.determinism import (
    refuse_mixed_rows,
    refuse_not_finite,
)
from tformer_export.soundness.row_independence import refuse_rows_that_meet
from tformer_export.soundness.step_checks import (
    check_logits,
    check_max_length,
    check_output,
    check_special_tokens,
    check_step_input,
)
from tformer_export.sources import Source
from tformer_export.staging.auxiliary_outputs import AuxiliaryOutput, find_auxiliary_outputs
from tformer_export.staging.decode import DecodeEmitter
from tformer_export.staging.difference_locator import DifferenceLocator
from tformer_export.staging.emitter import CONTEXT, ENCODED, ContextTensor, Program, axis_names
from tformer_export.staging.encode import EncodeEmitter
from tformer_export.staging.plan import StagingPlan, make_plan
from tformer_export.staging.probe import compared_ids, run_other_row, run_probe
from tformer_export.staging.restriction import RestrictionSolver
from tformer_export.staging.rotary import find_rotations
from tformer_export.staging.tables import Table, is_causal_alone, make_tables
from tformer_export.trace.captured_model import CapturedModel, capture_model
from tformer_runtime.base.errors import UnsupportedModelError
from tformer_runtime.format.manifest import Manifest
from tformer_runtime.preprocess.series import SeriesPreprocessor

Phase = Callable[[str], AbstractContextManager[None]]  # entered with the name of each phase, to time it or report it
# Outputs in addition to the logits, of encode and of decode.
Extras = tuple[list[AuxiliaryOutput], list[AuxiliaryOutput]]


def _no_phase(name: str) -> AbstractContextManager[None]:
    return nullcontext()


# -- the results of the steps -----------------------------------------------------------------------------------------


@dataclass
class AnalysedModel:
    """A source with its graph and the facts on it, from which files of several kernel forms are compiled.

    level: node → its binding time.
    recognition: the attentions in the graph.
    max_length: the longest sequence; None for the default.
    half: whether the file will compute in half precision. The graph computes in float32 in any case.
    lowered: results of lowering, which files of several forms share.
    """

    source: Source
    target: str
    graph: CapturedGraph
    level: Mapping[Node, Level]
    extras: Extras
    inputs: dict[str, InputFacts]
    recognition: Recognition
    gives_last: bool
    max_length: int | None
    half: bool = False
    series: SeriesPreprocessor | None = None
    lowered: dict[Target, LoweredModel] = field(default_factory=dict)

    def compile(self, forms: KernelForms = DEFAULT_FORMS, phase: Phase = _no_phase) -> CompiledModel:
        """Stage, lower and assemble the model in these kernel forms (`tformer_export.common.kernel_choices`).

        Takes seconds, by the number of operations; exports of other threads wait. Later calls are faster for forms that
        change neither staging nor lowering.
        """
        target = replace(TARGETS[self.target], half=self.half).in_forms(forms)
        if target not in self.lowered:
            with phase("staging"), TORCH_PATCH_LOCK:
                staged = stage_model(self, target)
            with phase("lowering"), TORCH_PATCH_LOCK:
                self.lowered[target] = lower_model(self, staged, target)
        with phase("passes"):
            return assemble_model(self, self.lowered[target], target, forms)


@dataclass(frozen=True)
class StagedModel:
    """Both stages as programs; a stage that the model does not need is None.

    contexts: values that encode gives and decode reads. max_length: the longest sequence; 0 without a decode stage.
    counts: name → count of recognised parts.
    """

    encode: Program | None
    decode: Program | None
    contexts: tuple[ContextTensor, ...] = ()
    max_length: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoweredModel:
    """Both stages as ONNX models before any pass, encode first, with the programs that they come from."""

    staged: StagedModel
    models: tuple[ir.Model | None, ir.Model | None]
    counts: Mapping[str, int]


@dataclass
class CompiledModel:
    """A model that is ready to be quantised, verified and written.

    counts: name → count of recognised parts, of all phases. gives_last: see `Normalised`.
    unrecognised: see `Recognition.others`.
    max_length_cause: why no sequence is longer, such as the user's line that allows none; "" for a single-pass model.
    """

    model: ir.Model
    manifest: Manifest
    inputs: dict[str, InputFacts]
    locator: DifferenceLocator
    counts: dict[str, int]
    gives_last: bool = False
    series: SeriesPreprocessor | None = None
    unrecognised: tuple[str, ...] = ()
    max_length_cause: str = ""


def analyse(
    source: Source,
    target: str,
    max_length: int | None = None,
    phase: Phase = _no_phase,
    cross_attentions: AttentionSelection | None = None,
    hidden_states: Sequence[str] = (),
    half: bool = False,
    attentions: bool = False,
) -> AnalysedModel:
    """Capture and analyse a source. Takes seconds, by the number of operations; exports of other threads wait.

    max_length, half: see `AnalysedModel`.
    phase: entered with the name of each phase.
    cross_attentions, hidden_states, attentions: see `tformer_export.options.ExtraOutputs`.

    Raises UnsupportedModelError for a model that cannot be compiled, OptionError for extra outputs that it does not
    have.
    """
    with phase("capture"), TORCH_PATCH_LOCK:
        captured = capture_model(source, hidden_states, max_length)
    with phase("analysis"), TORCH_PATCH_LOCK:
        return analyse_model(captured, target, max_length, cross_attentions, half, attentions)


# -- captured → analysed ----------------------------------------------------------------------------------------------


def analyse_model(
    captured: CapturedModel,
    target: str,
    max_length: int | None = None,
    cross_attentions: AttentionSelection | None = None,
    half: bool = False,
    attentions: bool = False,
) -> AnalysedModel:
    """Normalise the graph, in place, find its facts, and check both.

    For the arguments see `analyse`. Raises OptionError for special tokens or extra outputs that the model does
    not have.
    """
    source, graph = captured.source, captured.graph
    special = source.special_tokens
    padding = special.pad_token_id if special.pads_alone else None
    settings = NormaliseSettings(source.masks, padding, cross_attentions, attentions)
    normalised = normalise(graph, settings, FORMS)
    inputs = find_input_facts(graph, source)
    normalise(graph, settings, FOLDS, normalised)
    check_special_tokens(source, inputs)
    check_max_length(source, inputs, max_length)
    series = make_series_preprocessor(source, graph, inputs)
    level = binding_times(graph)
    encode, decode = find_auxiliary_outputs(graph, level)
    return AnalysedModel(
        source=_without_padding(source, graph) if normalised.hides_padding else source,
        target=target,
        graph=graph,
        level=level,
        extras=(_without(encode, source.outputs), _without(decode, source.outputs)),
        inputs=inputs,
        recognition=normalised.recognition,
        gives_last=normalised.gives_last,
        max_length=max_length,
        half=half,
        series=series,
    )


def _without_padding(source: Source, graph: CapturedGraph) -> Source:
    """Return the source with generation options that exclude padding, which forward hides from all later positions."""
    pad, width = source.special_tokens.pad_token_id, meta(graph.output).shape[-1]
    suppressed = source.generation_defaults.get("suppress_tokens") or []
    if pad is None or pad >= width or pad in suppressed:
        return source
    defaults = {**source.generation_defaults, "suppress_tokens": [*suppressed, pad]}
    return replace(source, generation_defaults=defaults)


def _without(extras: list[AuxiliaryOutput], names: Sequence[str]) -> list[AuxiliaryOutput]:
    """Return the extra outputs without the results of the model itself."""
    return [extra for extra in extras if extra.name not in names]


# -- analysed → staged ------------------------------------------------------------------------------------------------


def stage_model(analysed: AnalysedModel, target: Target) -> StagedModel:
    """Split the graph into the encode and the decode stage; a single-pass model has encode alone.

    Raises UnsupportedModelError for a model that cannot be decoded step by step.
    """
    graph = analysed.graph
    values = run_probe(graph, analysed.inputs)
    refuse_not_finite(graph, values, analysed.source)
    if graph.step is None:
        return _stage_single_pass(analysed, values)
    check_step_input(graph, analysed.inputs)
    check_output(graph, analysed.source)
    if analysed.inputs[graph.step_name or ""].ids is not None:
        check_logits(graph, values)
    return _stage_steps(analysed, target, values)


def _stage_single_pass(analysed: AnalysedModel, values: Mapping[Node, Any]) -> StagedModel:
    graph = analysed.graph
    refuse_mixed_rows(graph, values, run_other_row(graph, analysed.inputs))
    refuse_rows_that_meet(graph)
    names = list(analysed.source.outputs) or ["output"]
    outputs = [ContextTensor(node) for node in (graph.output, *(graph.extras[name] for name in names[1:]))]
    encode = EncodeEmitter(graph, analysed.level, values).emit(outputs, names, analysed.extras[0])
    return StagedModel(encode, None)


def _stage_steps(analysed: AnalysedModel, target: Target, values: dict[Node, Any]) -> StagedModel:
    graph, level = analysed.graph, analysed.level
    constants = Constants(graph, level)
    other_row = run_other_row(graph, analysed.inputs)
    solver = RestrictionSolver(graph, level, values, other_row, constants)
    plan = _plan(analysed, solver, target)
    refuse_mixed_rows(graph, values, other_row)
    refuse_rows_that_meet(graph)
    plan, tables, max_length = _with_tables(analysed, solver, target, plan)
    contexts = [ContextTensor(node, one, _context_rows(solver, node)) for node, one in plan.contexts]
    names = [f"{CONTEXT}{i}" for i in range(len(contexts))]
    turning = [attention for attention in plan.fused.values() if target.rotates(attention)]
    rotations = find_rotations(graph, level, constants, turning, max_length)
    emitter = DecodeEmitter(graph, level, values, solver, plan, tables, rotations, max_length)
    decode = emitter.emit(contexts, names, analysed.extras[1])
    encode = None
    if contexts or analysed.extras[0]:
        encoded = [name + ENCODED for name in names]
        encode = EncodeEmitter(graph, level, values).emit(contexts, encoded, analysed.extras[0])
    counts = {
        "fused": len(plan.fused),
        "rotary": len(rotations),
        "caches": len(decode.caches),
        "context": len(contexts),
        "tables": len(tables),
        "recomputed": solver.num_recomputed(plan.looking_back),
        "at_one_length": int(graph.at_one_length),
    }
    return StagedModel(encode, decode, tuple(contexts), max_length, counts)


def _plan(analysed: AnalysedModel, solver: RestrictionSolver, target: Target) -> StagingPlan:
    """Plan the stages. The refusal of a model that compares its ids with one names the padding as a possible cause."""
    graph = analysed.graph
    try:
        return make_plan(graph, analysed.level, solver, target.fuses)
    except UnsupportedModelError as error:
        compared = compared_ids(graph, graph.step_name or "")
        if not compared:
            raise
        raise UnsupportedModelError(
            f"{error}; the model asks whether a token is {' or '.join(map(str, compared))}: if that is its padding, "
            "declare it (special_tokens={'pad_token_id': …}, --pad-id), and it must not be a token that decoding "
            "starts or ends with"
        ) from error


def _with_tables(
    analysed: AnalysedModel, solver: RestrictionSolver, target: Target, plan: StagingPlan
) -> tuple[StagingPlan, dict[Node, Table], int]:
    """Return the plan, its tables and the maximum length.

    If the target's attention operator takes no bias, attentions whose mask is not causal alone get another plan.
    """
    lengths = analysed.max_length, analysed.source.max_length
    tables, max_length = make_tables(solver, plan.tables, plan.length_invariant, *lengths)
    biased: set[Node] = (
        set() if target.takes_bias else {a.node for a in plan.fused.values() if not is_causal_alone(a, tables)}
    )
    if biased:
        plan = make_plan(analysed.graph, analysed.level, solver, lambda a: target.fuses(a) and a.node not in biased)
        tables, max_length = make_tables(solver, plan.tables, plan.length_invariant, *lengths)
    return plan, tables, max_length


def _context_rows(solver: RestrictionSolver, node: Node) -> BatchAxis | None:
    rows = solver.rows(node)
    merged = [size for size in meta(node).shape if (times_batch(solver.captured, size) or 1) > 1]
    if rows is None and merged:
        raise UnsupportedModelError(
            f"{describe_node(node)} is computed once a request, and its batch axis is merged with "
            "another in a way that cannot be told apart; keep the batch an axis of its own"
        )
    return rows


# -- staged → lowered -------------------------------------------------------------------------------------------------


def lower_model(analysed: AnalysedModel, staged: StagedModel, target: Target) -> LoweredModel:
    """Translate each stage to ONNX with the target's operators."""
    limit = min((facts.max_length for facts in analysed.inputs.values() if facts.max_length), default=None)
    graph, grouped = analysed.graph, 0
    least = {
        str(name): graph.least[expression(size)]
        for node in graph.inputs.values()
        for name, size in zip(axis_names(graph, meta(node)), meta(node).shape, strict=True)
        if expression(size) in graph.least
    }

    def lower(program: Program | None) -> ir.Model | None:
        nonlocal grouped
        if program is None:
            return None
        grouped += target.lower(program.module)
        return to_onnx(program, limit, analysed.source.min_drawn_length, least, _no_longer_than(analysed))

    models = lower(staged.encode), lower(staged.decode)
    return LoweredModel(staged, models, {**staged.counts, "grouped": grouped})


# -- lowered → compiled -----------------------------------------------------------------------------------------------


def assemble_model(analysed: AnalysedModel, lowered: LoweredModel, target: Target, forms: KernelForms) -> CompiledModel:
    """Join both stages into one model, run the passes of these kernel forms, and describe it in a manifest."""
    staged, series, graph = lowered.staged, analysed.series, analysed.graph
    model = assemble(*(stage and stage.clone() for stage in lowered.models))
    source = analysed.source
    passes = run_passes(model, staged.max_length, forms, analysed.target, source.packed_weights, analysed.half)
    target.check(model)
    manifest = describe(
        analysed.source,
        staged.encode,
        staged.decode,
        analysed.inputs,
        max_length=staged.max_length,
        target=analysed.target,
        min_lengths={_axis_name(graph, axis): least for axis, least in graph.needed.items()},
        no_longer_than=_no_longer_than(analysed),
        shares_context=passes.get("shared_encoder_context", 0) > 0,
        series=series,
    )
    caches = tuple(staged.decode.caches) if staged.decode else ()
    extras = (*analysed.extras[0], *analysed.extras[1])
    locator = DifferenceLocator(graph, staged.contexts, caches, extras)
    counts = {"attentions": analysed.recognition.count, **lowered.counts, **passes}
    cause, line = _length_cause(analysed, staged.max_length)
    manifest = structs.replace(manifest, max_length_cause=cause)  # a line has a path of this machine
    return CompiledModel(
        model,
        manifest,
        analysed.inputs,
        locator,
        counts,
        analysed.gives_last,
        series,
        analysed.recognition.others,
        f"limited by {line}" if line else cause,
    )


def _no_longer_than(analysed: AnalysedModel) -> dict[str, list[str]]:
    """Return name of a free axis → those along which a row is no shorter."""
    found: dict[str, list[str]] = {}
    for pair in analysed.source.length_order:
        one, other = (_axis_name(analysed.graph, axis) for axis in pair)
        if other not in found.setdefault(one, []):
            found[one].append(other)
    return found


def _axis_name(graph: CapturedGraph, axis: Axis) -> str:
    return str(axis_names(graph, meta(graph.inputs[axis[0]]))[axis[1]])


def _length_cause(analysed: AnalysedModel, max_length: int) -> tuple[str, str]:
    """Return why no sequence is longer than the maximum length, and the user's line that allows none, or ""."""
    graph, stated = analysed.graph, analysed.source.max_length
    if not max_length:
        return "", ""
    if graph.time is not None and max_length == graph.time_limit:
        return "the model's code allows no more", graph.limit_lines.get(graph.time, "")
    if analysed.max_length is not None:
        return "as asked (--max-length)", ""
    if max_length == (stated or DEFAULT_MAX_LENGTH):
        default = "the default for a model that states no limit: --max-length takes more"
        return ("as the model states" if stated else default), ""
    return "the model's position tables end there", ""
