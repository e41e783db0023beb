"""Source → compiled model, in one visible line of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
from torch.fx import Node

from tformer_export.analysis.attention import recognise
from tformer_export.analysis.attention_weights import Wanted, add_alignments, add_attention
from tformer_export.analysis.batch_axes import Rows, times_batch
from tformer_export.analysis.binding_time import Level, binding_times, fold_padding_tests, padding_tests
from tformer_export.analysis.determinism import (
    check_devices,
    failing_line,
    refuse_half,
    refuse_mixed_rows,
    refuse_not_finite,
    refuse_random,
    rehearse,
    unchanged,
    warm_up,
)
from tformer_export.analysis.input_facts import About, about_inputs
from tformer_export.analysis.interpreter import Constants, run
from tformer_export.analysis.last_position import give_every_position
from tformer_export.analysis.series import settle
from tformer_export.analysis.size_branches import limit_by_branches
from tformer_export.capture.submodule_outputs import WithHidden, find_modules
from tformer_export.capture.trace import Captured, capture, merge_equal, vocabulary
from tformer_export.common.fx_nodes import expression, meta, source_line
from tformer_export.common.kernel_choices import DEFAULTS, Forms
from tformer_export.common.names import CONTEXT, ENCODED
from tformer_export.common.source_lines import said
from tformer_export.lowering.join_stages import assemble
from tformer_export.lowering.manifest import describe
from tformer_export.lowering.target import TARGETS, Target
from tformer_export.lowering.to_onnx import to_onnx
from tformer_export.passes import run_passes
from tformer_export.sources import Source
from tformer_export.sources.adapter import Adapter, all_outputs
from tformer_export.staging.auxiliary_outputs import Extra, find_extras
from tformer_export.staging.decode import DecodeEmitter
from tformer_export.staging.emitter import Context, Program
from tformer_export.staging.encode import EncodeEmitter
from tformer_export.staging.landmarks import Landmarks
from tformer_export.staging.plan import Plan, make_plan
from tformer_export.staging.restriction import LENGTH, Views
from tformer_export.staging.rotary import find_rotations
from tformer_export.staging.tables import is_causal_alone, make_tables
from tformer_runtime.base.errors import OptionError, UnsupportedModelError
from tformer_runtime.format.manifest import HIDDEN, Manifest
from tformer_runtime.preprocess.series import Series

SUM = 1e-3  # by which a sum of probabilities may miss 1

Stage = Callable[[str], AbstractContextManager[None]]


@dataclass
class Compiled:
    """A model that is ready to be quantised, verified and written.

    found: what each stage recognised, counted. gives_last: whether the source gives logits of the last position alone.
    """

    model: ir.Model
    manifest: Manifest
    inputs: dict[str, About]
    landmarks: Landmarks
    found: dict[str, int]
    gives_last: bool = False
    series: Series | None = None


@dataclass(frozen=True)
class _Lowered:
    """Both stages, encode first, as programs and as ONNX models that nothing has been done to yet."""

    programs: tuple[Program | None, Program | None]
    models: tuple[ir.Model | None, ir.Model | None]
    contexts: tuple[Context, ...]
    length: int
    found: dict[str, int]


@dataclass
class Understood:
    """A source whose graph has been captured and read, from which files of several forms can be compiled.

    extras: of encode, and of decode. lowered: what files of other forms are made of too.
    """

    source: Source
    target: str
    captured: Captured
    level: Mapping[Node, Level]
    extras: tuple[list[Extra], list[Extra]]
    inputs: dict[str, About]
    attentions: int
    gives_last: bool
    max_length: int | None
    half: bool = False
    series: Series | None = None
    lowered: dict[Target, _Lowered] = field(default_factory=dict)

    def compile(self, forms: Forms = DEFAULTS, stage: Stage = lambda name: nullcontext()) -> Compiled:
        """Stage, lower, assemble, clean up: seconds, by the number of operations; less from the second time on, for
        forms that these stages do not know of. forms: of `tformer_export.common.kernel_choices`."""
        chosen = replace(TARGETS[self.target], half=self.half).in_forms(forms)
        if chosen not in self.lowered:
            self.lowered[chosen] = self._lower(chosen, stage)
        low = self.lowered[chosen]
        with stage("passes"):
            model = assemble(*(lowered and lowered.clone() for lowered in low.models))
            passes = run_passes(model, low.length, forms, self.target)
            chosen.check(model)
        shares = passes.get("shared_encoder_context", 0) > 0
        manifest = describe(
            self.source,
            *low.programs,
            self.inputs,
            max_length=low.length,
            target=self.target,
            shares_context=shares,
            series=self.series,
        )
        decode = low.programs[1]
        landmarks = Landmarks(
            self.captured, low.contexts, tuple(decode.caches) if decode else (), (*self.extras[0], *self.extras[1])
        )
        found = {"attentions": self.attentions, **low.found, **passes}
        return Compiled(model, manifest, self.inputs, landmarks, found, self.gives_last, self.series)

    def _lower(self, target: Target, stage: Stage) -> _Lowered:
        with stage("staging"):
            encode, decode, contexts, length, found = _stage(
                self.captured, self.level, self.extras, self.source, self.inputs, target, self.max_length
            )
        limits = {about.max_length for about in self.inputs.values() if about.max_length}
        models = []
        with stage("lowering"):
            for program in (encode, decode):
                if program is not None:
                    found["grouped"] = found.get("grouped", 0) + target.lower(program.module)
                models.append(to_onnx(program, min(limits, default=None), self.source.least) if program else None)
        return _Lowered((encode, decode), (models[0], models[1]), contexts, length, found)


def understand(
    source: Source,
    target: str,
    max_length: int | None = None,
    stage: Stage = lambda name: nullcontext(),
    alignments: Wanted | None = None,
    hidden: Sequence[str] = (),
    half: bool = False,
    attention: bool = False,
) -> Understood:
    """Capture, recognise attention, find binding times. UnsupportedModelError says what cannot be.

    The model computes in float32; `half` says that it will not for long, which decides among operators.

    `stage` is entered with the name of each part, for whoever shows progress or takes the time. `alignments`,
    `hidden` and `attention` as in `export`; OptionError if the model does not have them.
    """
    with stage("capture"):
        captured = _sound(source, hidden)
        gives_last = give_every_position(captured)
    with stage("staging"):
        attentions = recognise(captured)
        if alignments is not None and alignments is not False:
            add_alignments(captured, alignments)
        if attention:
            add_attention(captured)
        inputs = about_inputs(captured, source)
        _check_special(source, inputs)
        series = settle(source, captured, inputs)
        if attention and series is not None:
            raise OptionError(
                "attention is given for what is run once as it is, and a series is cut, scaled and fed back"
            )
        pad = source.special.pad
        fold_padding_tests(captured, None if pad in (*source.special.start, *source.special.end) else pad)
        merge_equal(captured)
        level = binding_times(captured)
        found = find_extras(captured, level)
        extras = _but(found[0], source.outputs), _but(found[1], source.outputs)
    return Understood(source, target, captured, level, extras, inputs, attentions, gives_last, max_length, half, series)


def _sound(source: Source, hidden: Sequence[str]) -> Captured:
    """The captured graph of a module that answers the same whenever it is asked the same."""
    check_devices(source)
    try:
        with unchanged(source.module):
            warm_up(source)
            captured = _capture(source, hidden)
            limit_by_branches(captured)
    except UnsupportedModelError:
        rehearse(source)  # if forward fails by itself, that is what to say
        raise
    refuse_half(captured)
    refuse_random(captured, rehearse(source))
    return captured


def _capture(source: Source, hidden: Sequence[str]) -> Captured:
    others = source.outputs[1:]
    if not hidden:
        return capture(source.module, source.example, source.step, source.dynamic, others, source.least)
    watching = WithHidden(source.module, find_modules(source.owner, hidden), 1 + len(others))
    watching.training = False
    names = (*others, *(f"{HIDDEN}.{name}" for name in watching.watched))
    return capture(watching, source.example, source.step, source.dynamic, names, source.least)


def _but(extras: list[Extra], names: Sequence[str]) -> list[Extra]:
    """Those that are not results of the model themselves."""
    return [extra for extra in extras if extra.name not in names]


def _stage(
    captured: Captured,
    level: Mapping[Node, Level],
    extras: tuple[list[Extra], list[Extra]],
    source: Source,
    inputs: Mapping[str, About],
    target: Target,
    wanted: int | None,
) -> tuple[Program | None, Program | None, tuple[Context, ...], int, dict[str, int]]:
    probe = _probe(captured, inputs)
    try:
        values = run(captured, probe)
    except (RuntimeError, IndexError) as error:
        where = failing_line(captured, probe)
        raise UnsupportedModelError(
            f"the traced model fails at a length of {LENGTH}{where}: {said(error)}. The file has to run at any size"
        ) from error
    refuse_not_finite(captured, values, source.module)
    constants = Constants(captured, level)
    if captured.step is None:
        names = list(source.outputs) or ["output"]
        outputs = [Context(node) for node in (captured.output, *(captured.extras[name] for name in names[1:]))]
        encode = EncodeEmitter(captured, level, values).emit(outputs, names, extras[0])
        return encode, None, (), 0, {}
    _check_step(captured, inputs)
    _check_output(captured, source)
    if inputs[captured.step_name or ""].ids is not None:
        _check_logits(captured, values)
    other_row = run(captured, _other_row(captured, inputs))
    views = Views(captured, level, values, other_row, constants)
    try:
        plan: Plan = make_plan(captured, level, views, target.fuses)
    except UnsupportedModelError as error:
        asked = _asked(captured, captured.step_name or "")
        if not asked:
            raise
        raise UnsupportedModelError(
            f"{error}; the model asks whether a token is {' or '.join(map(str, asked))}: if that is its padding, "
            "declare it (special={'pad': …}, --pad), and it must not be a token that decoding starts or ends with"
        ) from error
    refuse_mixed_rows(captured, values, other_row)
    lengths = wanted, source.max_length
    tables, length = make_tables(views, plan.tables, plan.still, *lengths)
    biased: set[Node] = (
        set() if target.takes_bias else {a.node for a in plan.fused.values() if not is_causal_alone(a, tables)}
    )
    if biased:
        plan = make_plan(captured, level, views, lambda a: target.fuses(a) and a.node not in biased)
        tables, length = make_tables(views, plan.tables, plan.still, *lengths)
    contexts = [Context(node, one, _context_rows(views, node)) for node, one in plan.contexts]
    names = [f"{CONTEXT}{i}" for i in range(len(contexts))]
    turning = [attention for attention in plan.fused.values() if target.turns(attention)]
    rotations = find_rotations(captured, level, constants, turning, length)
    emitter = DecodeEmitter(captured, level, values, views, plan, tables, rotations, length)
    decode = emitter.emit(contexts, names, extras[1])
    encode_program = None
    if contexts or extras[0]:
        encoded = [name + ENCODED for name in names]
        encode_program = EncodeEmitter(captured, level, values).emit(contexts, encoded, extras[0])
    found = {
        "fused": len(plan.fused),
        "rotary": len(rotations),
        "caches": len(decode.caches),
        "context": len(contexts),
        "tables": len(tables),
    }
    return encode_program, decode, tuple(contexts), length, found


def _probe(captured: Captured, inputs: Mapping[str, About], seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs for the runs that the analysis looks at: two rows, ids drawn at random so that positions differ."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, value in captured.example.items():
        value, ids = value[:2], inputs[name].ids
        if ids is not None:
            shape = (2, LENGTH, *value.shape[2:]) if name == captured.step_name else value.shape
            # Ids that the model asks about are drawn half of the time: what follows from them must be seen to vary.
            asked = _asked(captured, name)
            every = [i for i in range(ids) if i != inputs[name].pad or (name == captured.step_name and i in asked)]
            every, asked = every or [0], [i for i in asked if i in every]
            choice = torch.tensor(every + asked * (len(every) // max(1, len(asked))))
            value = choice[torch.randint(len(choice), shape, generator=generator)].to(value.dtype)
        elif name == captured.step_name:
            value = torch.randn((2, LENGTH, *value.shape[2:]), generator=generator).to(value.dtype)
        drawn[name] = value
    return drawn


def _other_row(captured: Captured, inputs: Mapping[str, About]) -> dict[str, torch.Tensor]:
    """The probe with another second row: what changes with it belongs to that row."""
    first, second = (_probe(captured, inputs, seed) for seed in (0, 1))
    for name, value in second.items():
        if inputs[name].masked and inputs[name].ids is not None and name != captured.step_name:
            value[1:, -1:] = inputs[name].pad  # what a mask that is made of ids hides, belongs to its row
        if (
            inputs[name].ids is None and name != captured.step_name
        ):  # a mask hides another position; data are other data
            flipped = value[1:] - 1 if value.is_floating_point() else value[1:] == 0
            value[1:, ..., -1:] = flipped.to(value.dtype)[..., -1:]
    return {name: torch.cat([first[name][:1], value[1:]]) for name, value in second.items()}


def _context_rows(views: Views, node: Node) -> Rows | None:
    rows = views.rows(node)
    merged = [size for size in meta(node).shape if (times_batch(views.captured, size) or 1) > 1]
    if rows is None and merged:
        raise UnsupportedModelError(
            f"`{node.target}` at {source_line(node)} is computed once a request, and its batch axis is merged with "
            "another in a way that cannot be told apart; keep the batch an axis of its own"
        )
    return rows


def _check_special(source: Source, inputs: Mapping[str, About]) -> None:
    """Ids that the model does not have would never come, and could not be fed."""
    ids = inputs[source.step].vocabulary if source.step is not None else None
    special = source.special
    for name, given in (("start", special.start), ("end", special.end)):
        for i in given:
            if ids is not None and not 0 <= i < ids:
                raise OptionError(f"the special id {name}={i} is not in the model's vocabulary, which has {ids} ids")


def _wide_output(captured: Captured, source: Source, ids: int) -> str | int | None:
    """Another output that has a row for each position, as wide as the vocabulary; None if the user chose one."""
    module = source.module
    if not isinstance(module, Adapter) or module.output is not None:
        return None
    assert captured.step_name is not None
    with torch.no_grad(), unchanged(module):
        outputs = all_outputs(module.returned(*captured.example.values()))
    rows = sorted(captured.example[captured.step_name].shape[:2])
    wide = [name for name, v in outputs.items() if v.dim() == 3 and v.shape[2] == ids and sorted(v.shape[:2]) == rows]
    return wide[0] if wide else None


def _check_logits(captured: Captured, values: Mapping[Node, Any]) -> None:
    """Probabilities would be scored, sampled and searched as if they were logits."""
    output = values[captured.output]
    if bool((output >= 0).all()) and bool(((output.sum(-1) - 1).abs() < SUM).all()):
        raise UnsupportedModelError(
            f"forward returns probabilities, at {source_line(captured.output)}: they are not negative and sum to 1 at "
            "every position. Return the logits, or the log-probabilities (log_softmax), from which they follow"
        )


def _asked(captured: Captured, name: str) -> list[int]:
    """The ids of an input that the model compares its ids with."""
    return sorted({t.padding for t in padding_tests(captured, name) if t.padding is not None})


def _check_step(captured: Captured, inputs: Mapping[str, About]) -> None:
    """Decoding appends a token to the step input, or a step of a series."""
    assert captured.step_name is not None
    given = captured.example[captured.step_name]
    if given.is_floating_point() and given.dim() != 3:
        raise UnsupportedModelError(
            f"the step input {captured.step_name!r} holds numbers in {given.dim()} axes: let forward take (batch, "
            "time, features), with one feature where there is one, or export it without a step input (step=None)"
        )
    if inputs[captured.step_name].ids is None and not given.is_floating_point():
        raise UnsupportedModelError(
            f"the step input {captured.step_name!r} holds {given.dtype}, neither token ids nor numbers: let forward "
            "take the ids (int64) and look them up itself, or export it without a step input (step=None)"
        )


def _check_output(captured: Captured, source: Source) -> None:
    """Decoding needs logits for every position: (batch, time, vocabulary), or with the first two exchanged."""
    shape = meta(captured.output).shape
    first = [expression(size) for size in shape[:2]]
    well = len(shape) == 3 and isinstance(shape[2], int)
    well = well and any(size == captured.time for size in first) and any(size in captured.batch for size in first)
    assert captured.step_name is not None
    ids = vocabulary(captured, captured.step_name)
    if well and ids in (None, shape[2]):
        return
    other = _wide_output(captured, source, ids) if ids else None
    if well and other is None:
        return
    of_ids = not captured.example[captured.step_name].is_floating_point()
    wanted = "(batch, time, vocabulary)" if of_ids else "(batch, time, features)"
    names = {**dict.fromkeys(captured.batch, "batch"), captured.time: "time"}
    sizes = ", ".join(str(expression(size).subs(names)) for size in shape)
    if not any(captured.time in expression(size).free_symbols for size in shape):
        what = "which has no row for each position of it: it is pooled, or one position is taken out"
    else:
        what = f"which is not {wanted}"
    if other is not None:
        raise UnsupportedModelError(
            f"forward returns ({sizes}) first, at {source_line(captured.output)}, which is not as wide as the "
            f"vocabulary of {captured.step_name!r}, {ids}, and its output {other!r} is: name the logits, "
            f"output={other!r}"
        )
    raise UnsupportedModelError(
        f"forward returns ({sizes}) first, at {source_line(captured.output)}, {what}. To be stepped over "
        f"{captured.step_name!r} it must return {'logits' if of_ids else 'numbers'} for every position, {wanted}; a "
        "model that gives one answer for its input is exported without a step input (step=None)"
    )
