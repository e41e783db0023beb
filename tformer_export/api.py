"""`export`, the entry point: it checks the options, reads and finishes the source, and builds the file.

Options are in `options.py`, sources in `sources/`, the build in `build.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tformer_export.build import build
from tformer_export.common.atomic_output import check_beside, check_writable
from tformer_export.common.clock import PhaseClock, exits_refused, memory_errors, unexpected_errors
from tformer_export.common.option_values import THROUGHPUT
from tformer_export.common.task import Task
from tformer_export.options import Adapters, ExportOptions, ExtraOutputs, Quantization
from tformer_export.report import ExportReport
from tformer_export.sources import Mask, Source
from tformer_export.sources.exported_program import from_program
from tformer_export.sources.finish import SourceOverrides, finish
from tformer_export.sources.hugging_face.folder import from_folder, from_transformers, is_transformers_model
from tformer_export.sources.sentence_transformers.objects import (
    from_sentence_transformers,
    is_sentence_transformers_model,
)
from tformer_export.sources.switched_adapters import with_adapters
from tformer_export.sources.torch_module import from_module
from tformer_runtime.base.errors import OptionError, OutputError, SourceError
from tformer_runtime.base.extras import import_onnxruntime
from tformer_runtime.base.validation import named_path
from tformer_runtime.format.manifest import SpecialTokens

Model = torch.nn.Module | torch.export.ExportedProgram | Source
Tokenizers = str | Mapping[str, str] | Callable[..., Any]


@memory_errors()
@exits_refused()
def export(
    model: Model,
    path: str | os.PathLike[str],
    example: Mapping[str, Any] | None = None,
    step_input: str | None = None,
    *,
    masks: Mapping[str, Mask] | None = None,
    axes: Mapping[str, Sequence[int | None]] | None = None,
    fixed_arguments: Mapping[str, Any] | None = None,
    output: str | int | Sequence[str | int] | None = None,
    head: str | Sequence[str] | None = None,
    tokenizer: Tokenizers | None = None,
    preprocessor: Any = None,
    image_size: tuple[int, int] | None = None,
    chat_template: str | None = None,
    task: str | Task | None = None,
    special_tokens: SpecialTokens | Mapping[str, Any] | None = None,
    generation_defaults: Mapping[str, Any] | None = None,
    series: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    quantization: str | Quantization = "none",
    target: str = "cpu",
    precision: str | None = None,
    optimize_for: str = THROUGHPUT,
    extra_outputs: ExtraOutputs | None = None,
    shortlist: str | os.PathLike[str] | None = None,
    tune: bool = False,
    adapters: Adapters = (),
    golden: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Callable[[str], None] = lambda phase: None,
) -> ExportReport:
    """Export a model to one ONNX file, verify the file against the model, and report on it.

    The model and its call:

    model: any module, a transformers model, a SentenceTransformer or a CrossEncoder (which need no example), a program
        of torch.export, or a Source. A module without forward is called as decode(memory, …) after encode(…), by
        parameter names.
    path: the file to write. Weights of more than 2 GB stand next to it, in `path` + ".data".
    example: name of a parameter of forward → tensor (batch, time, …), or a dict, list, tuple, dataclass or object that
        holds tensors. These become inputs by the names of their keys, or by their paths, such as `batch.0`. Sizes of
        batch and time do not matter; dtypes do. ids without a batch axis say that forward takes one row.
    step_input: the autoregressive input, which the file steps over with a cache; None for a single-pass model.
    masks: arguments that follow from the lengths of an input: `padding(…)`, `causal(…)`, `lengths(…)` or
        `positions(…)`. They are not in the example.
    axes: the batch and the time axis of an input, if they are not (0, 1). Logits have the layout of the step input.
        (0,) is for an input of one size, such as an image; (None, 0) for an input without a batch axis. Axes of an
        input of numbers are found by a few runs at other sizes, if forward does not run with other sizes of axis 1.
    fixed_arguments: arguments that are always the same, such as {"use_cache": False}.
    output: name or index of the logits among forward's outputs; by default `.logits`, "logits" or the first tensor. A
        list, for a single-pass model, names all outputs of the file.
    head: name of a submodule or method that is applied to the first output of forward, such as "generator", if forward
        leaves it out; or several names, in their order.

    Its text, data and purpose:

    tokenizer: text in tokenizers' JSON format, for all inputs or by name; or a transformers tokenizer or processor.
    preprocessor: how images become inputs, by name or for the one input: `image(…)` or a transformers image
        processor. The file then reads images of any size.
    image_size: height and width to which the images of a prompt are resized, for a transformers model in memory
        that reads them at their own size. Its processor is `tokenizer`.
    chat_template: Jinja text that makes a prompt of a conversation, as for transformers' apply_chat_template.
    task: the name of the task, such as "text-classification", or a `Task` with labels, problem type or pooling.
    special_tokens: bos_token_id and eos_token_id (ids or lists of ids) and pad_token_id.
    generation_defaults: generation options of the file, by name.
    series: the columns, normalisation and horizon of a series of numbers; see `tformer_export.analysis.series_options`.
    max_length: the longest sequence; by default the most that the model allows, up to 512.

    The file (help texts: `tformer_export.options`, docs/options.md):

    quantization: "none", "int8", "int4" or "mixed", or a `Quantization` with scales, cache, calibration and budget.
    target: "cpu", "cuda", "web" or "portable". precision: "fp32", "fp16" or "bf16". optimize_for: "throughput" or
        "latency".
    extra_outputs: attention weights and hidden states as outputs of the file.
    shortlist: a text file to learn from which ids belong to a source. Raises ParityError if fewer than 99.5 % of the
        lines decode greedily as with all ids.
    adapters: PEFT adapters (LoRA) that the file holds next to the model: name → folder or hub id; or a list of these
        or of texts NAME=FOLDER, without NAME under the name of the folder. Each request chooses one by its name. The
        model is not changed.
    tune: measure on this machine which forms of operators are the fastest.
    golden: a file for seeded requests and their results, by which another runtime proves itself (docs/golden.md).
    force: overwrite the file, and the golden file. progress: called with the name of each phase.

    Raises a TformerError that explains the problem; then nothing is written. Takes seconds to minutes, by the number of
    operations, and memory of about four times the weights. While a model is captured, analysed and lowered, torch is
    patched for the whole process under a lock: exports of other threads wait.
    """
    options = ExportOptions(
        quantization=Quantization.of(quantization),
        extra_outputs=extra_outputs or ExtraOutputs(),
        target=target,
        precision=precision,
        optimize_for=optimize_for,
        max_length=max_length,
        shortlist=shortlist,
        tune=tune,
        adapters=adapters,
        golden=golden,
    )
    out = _check_outputs(path, options, force)
    call = {"masks": masks, "axes": axes, "fixed_arguments": fixed_arguments, "output": output, "head": head}
    source, tokenizer = _source(model, example, step_input, call, tokenizer, series, preprocessor, image_size)
    overrides = SourceOverrides.of(
        task,
        tokenizer=tokenizer,
        special_tokens=special_tokens,
        generation_defaults=generation_defaults,
        series=series,
        chat_template=chat_template,
        preprocessor=preprocessor,
        max_length=max_length,
    )
    return _export(source, out, options, overrides, progress)


@memory_errors()
@exits_refused()
def export_source(
    source: Source,
    path: str | os.PathLike[str],
    options: ExportOptions,
    overrides: SourceOverrides,
    force: bool = False,
    progress: Callable[[str], None] = lambda phase: None,
) -> ExportReport:
    """Export a source with these options. For errors and the other arguments see `export`."""
    return _export(source, _check_outputs(path, options, force), options, overrides, progress)


def _export(
    source: Source, out: Path, options: ExportOptions, overrides: SourceOverrides, progress: Callable[[str], None]
) -> ExportReport:
    source = finish(source, overrides)
    if options.adapters:
        source = with_adapters(source, options.adapters)
    clock = PhaseClock(progress)
    with source.eval_mode(), unexpected_errors(clock):
        return build(source, out, options.for_model(source), clock)


def _check_outputs(path: str | os.PathLike[str], options: ExportOptions, force: bool) -> Path:
    """Return the file to write. Raises OutputError if it or the golden file cannot be written."""
    import_onnxruntime()  # without it nothing can be verified
    out = named_path(path, OutputError, "the file to write")
    check_writable(out, force)
    if options.golden is not None:
        check_beside(named_path(options.golden, OutputError, "the golden file"), out, force)
    return out


def _source(
    model: Model,
    example: Mapping[str, Any] | None,
    step_input: str | None,
    call: Mapping[str, Any],
    tokenizer: Tokenizers | None,
    series: Mapping[str, Any] | None,
    preprocessor: Any,
    image_size: tuple[int, int] | None,
) -> tuple[Source, Tokenizers | None]:
    """Return the source of a model, and the tokenizer unless the source holds it. call: arguments of `from_module`."""
    unread = [name for name, value in {**call, "step_input": step_input}.items() if value is not None]
    if isinstance(model, Source):
        source = model
    elif isinstance(model, torch.export.ExportedProgram):
        source, unread = from_program(model, step_input, example=example, **call), []
    elif example is None and is_sentence_transformers_model(model):
        source = from_sentence_transformers(model, from_folder)
    elif example is None and is_transformers_model(model) and hasattr(tokenizer, "feature_extractor"):
        processor: Any = tokenizer
        source = from_transformers(model, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
        tokenizer = None
    elif example is None and is_transformers_model(model) and hasattr(tokenizer, "image_processor"):
        source, tokenizer = from_transformers(model, tokenizer=tokenizer, image_size=image_size), None
        image_size = None
    elif example is None and is_transformers_model(model):
        source, image_size = from_transformers(model, image_size=image_size), None
    elif example is None:
        raise SourceError("give an example of the model's inputs: example={name of forward's parameter: tensor}")
    else:
        images = _image_inputs(preprocessor, example, step_input)
        source, unread = from_module(model, example, step_input, series=series, images=images, **call), []
    if image_size is not None:
        raise OptionError("image_size is for a transformers model in memory: give that of a folder to load_source")
    if unread:
        raise OptionError(f"{', '.join(unread)} is read together with an example of the inputs: give one")
    return source, tokenizer


def _image_inputs(preprocessor: Any, example: Mapping[str, Any], step_input: str | None) -> list[str]:
    """Return the names of the inputs that a preprocessor makes: those that it names, or the only one."""
    if preprocessor is None or not isinstance(example, Mapping):
        return []
    if isinstance(preprocessor, Mapping):
        return [*preprocessor]
    names = [name for name in example if name != step_input]
    return names if len(names) == 1 else []
