"""`export`: the one call. What is asked is checked (`options.py`), the source is read, and the file made
(`build.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tformer_export.analysis.attention_weights import Wanted
from tformer_export.build import make
from tformer_export.common.atomic_output import check_writable
from tformer_export.common.clock import Clock, peak_memory
from tformer_export.common.degradation_budget import Budget
from tformer_export.common.quantization import ROWS, THROUGHPUT
from tformer_export.options import Asked
from tformer_export.report import ExportReport
from tformer_export.sources import Mask, Source
from tformer_export.sources.base import special_tokens
from tformer_export.sources.chat_template import with_template
from tformer_export.sources.exported_program import from_program
from tformer_export.sources.hf_images import with_preparation
from tformer_export.sources.hf_single_pass import with_tokenizer
from tformer_export.sources.hugging_face import from_folder, from_transformers, is_transformers_model
from tformer_export.sources.outcome import for_its_task
from tformer_export.sources.sentence_encoder import from_sentence_encoder, is_sentence_encoder
from tformer_export.sources.torch_module import from_module
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.decoding.options import GenerationOptions, Settings
from tformer_runtime.format.manifest import SpecialTokens


def export(
    model: torch.nn.Module | torch.export.ExportedProgram | Source,
    path: str | os.PathLike[str],
    example: Mapping[str, torch.Tensor] | None = None,
    step: str | None = None,
    *,
    quantize: str = "none",
    optimize_for: str = THROUGHPUT,
    activations: str = ROWS,
    cache: str = "float",
    target: str = "cpu",
    precision: str | None = None,
    max_length: int | None = None,
    masks: Mapping[str, Mask] | None = None,
    dynamic: Mapping[str, Sequence[int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    output: str | int | Sequence[str | int] | None = None,
    tokenizer: str | Mapping[str, str] | Callable[..., Any] | None = None,
    task: str | None = None,
    special: SpecialTokens | Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    series: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    prepare: Any = None,
    labels: Sequence[str] | None = None,
    problem: str | None = None,
    pool: str | None = None,
    normalize: bool = False,
    max_degradation: float | str | Budget | None = None,
    calibration: str | os.PathLike[str] | None = None,
    min_speed: float | None = None,
    alignments: Wanted | None = None,
    hidden: str | Sequence[str] = (),
    attention: bool = False,
    shortlist: str | os.PathLike[str] | None = None,
    tune: bool = False,
    force: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> ExportReport:
    """Export a model to one ONNX file that decodes incrementally, verified against the model, and report on it.

    model: any module, a transformers model, a SentenceTransformer or a program of torch.export (which need no example),
    or a Source. A module
    without forward is taken as decode(memory, …) after encode(…), bound by their parameters' names.
    example: name → tensor (batch, time, …); the names are forward's parameters, in any order.
    step: the autoregressive input, stepped over with a cache; None for a model that is run once.
    quantize: "none", "int8", "int4" or "mixed": the fewest bits, 4, 8 or float by matrix, that max_degradation allows,
        "1.01x" unless it is given. target: "cpu", "cuda" or "portable" (standard operators only).
    precision: of products and caches, "fp32" or, for the target cuda alone, "fp16", which is its default unless the
        file is quantised, or "bf16", for models that were trained in it and whose values are beyond float16: it has an
        eighth of its accuracy. Logits are float32 in any case.
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
    output: name or index of the logits among forward's outputs; by default `.logits`, "logits" or the first tensor. A
        list of them, of a model that is run once, names all outputs of the file.
    tokenizer: text in tokenizers' JSON format, for all inputs or by name; or a transformers processor, for a model that
        reads sound; or a tokenizer of transformers, for a model that is run once.
    special: start, end and pad ids.
    chat_template: Jinja text that makes a prompt of a conversation, as transformers has it for apply_chat_template, for
        a model that goes on with a text alone. Special tokens are written out, but for those of a folder's tokenizer.
    series: of a model that reads or steps over numbers, (batch, time, features), what its columns are, how they are
        normalised and how many steps are forecast; see `tformer_export.analysis.series`. The file then forecasts from a
        history in its own units.
    prepare: how inputs are made of pictures, by name: `image(…)` or an image processor of transformers; or one of
        these, of a model with one input. The file then reads pictures, all made one size.
    task: what the model does, by transformers' names, such as "text-classification". labels: of classes, in the order
    of the output's numbers. problem: "single_label" (softmax, the default), "multi_label" (sigmoid) or "regression".
    pool: one vector for each row of a model that is run once and gives one for each position: "mean", "first", "max" or
    "last" of the row's own positions. normalize: to length 1.
    max_degradation: the largest share of tokens that quantisation may change, 0.01 or "1%", or how many times it may
        multiply the perplexity, "1.02x"; ParityError beyond it, which says what would fit. Of a model that is run once:
        the share of rows whose class may change, if its output is of classes (see `quantize.outputs`), else what may be
        missing to a mean cosine of 1 with the unquantised outputs; by default of mixed 1%.
    calibration: a text file, lines as `quantize.samples` has them, or a series (`quantize.series`), that
        integers are fitted to by GPTQ; every fourth line, or window, is measured on instead. Without it, what the model
        makes of random ids is.
    min_speed: how many times as fast as the unquantised file the quantised one must be, for one row; ParityError below.
    alignments: the file can tell how much each step attends to each position of the request: True for the mean of all
        heads of all cross-attentions, "last" for the last one's, or which: layers, or pairs (layer, head), counted from
        0 in the order of computation. hidden: names of submodules whose outputs the file can give. Both are computed at
        each step from then on, whether asked for or not; alignments cost about as much as the scores of those layers'
        attention.
    attention: the file can tell what each position of an input takes of each, in every layer and head, of a model that
        is run once; computed at each run from then on, at about the cost of the scores once more.
    shortlist: a text file, lines as of calibration, from which candidates for each source id are learned, so that a
        step computes the logits of those alone. For a model with an encoder that reads ids. ParityError if fewer than
        99.5 % of the lines decode greedily as with all ids.
    tune: measure on this machine which forms of attention, norms, projections and kernels are the fastest, for batches
        of 32, of one with optimize_for="latency", or of 1, 8 and 32 with "balanced", and keep these; see
        `tune/tune.py`.

    Raises a TformerError whose text says what is wrong; then nothing is written. Takes seconds to minutes, by the
    number of operations, and memory of about four times the weights.
    """
    asked = Asked.of(
        quantize=quantize,
        optimize_for=optimize_for,
        activations=activations,
        cache=cache,
        target=target,
        precision=precision,
        max_degradation=max_degradation,
        calibration=calibration,
        min_speed=min_speed,
        max_length=max_length,
        alignments=alignments,
        hidden=hidden,
        attention=attention,
        shortlist=shortlist,
        tune=tune,
    )
    out = Path(path)
    check_writable(out, force)
    call = {"masks": masks, "dynamic": dynamic, "constants": constants, "output": output}
    source = _source(model, example, step, call, tokenizer, task, special, defaults, series, chat_template)
    if prepare is not None:
        source = with_preparation(source, prepare, labels is not None or problem is not None)
    source = for_its_task(source, labels, problem, pool, normalize)
    if source.step is None and max_length is not None:
        source = replace(source, max_length=min(max_length, source.max_length or max_length))
    asked = asked.of_model(source)
    clock = Clock(progress)
    with source.ready():
        made = make(source, out, asked, clock)
    return ExportReport(
        path=str(out),
        source=source.name,
        task=source.task,
        target=target,
        precision=made.manifest.precision,
        quantization=quantize,
        activations=activations,
        cache=cache,
        max_length=made.manifest.max_length,
        parameters=sum(p.numel() for p in source.module.parameters()),
        size=made.size,
        parity=made.parity,
        found=made.found,
        degradation=made.degradation,
        mixture=made.mixture,
        optimized_for=made.manifest.optimized_for,
        products=made.products,
        tuning=made.tuning,
        seconds=clock.seconds,
        peak_memory=peak_memory(),
        shortlist=made.shortlist,
    )


def _source(
    model: torch.nn.Module | torch.export.ExportedProgram | Source,
    example: Mapping[str, torch.Tensor] | None,
    step: str | None,
    call: Mapping[str, Any],
    tokenizer: str | Mapping[str, str] | Callable[..., Any] | None,
    task: str | None,
    special: SpecialTokens | Mapping[str, Any] | None,
    defaults: Mapping[str, Any] | None,
    series: Mapping[str, Any] | None,
    chat_template: str | None,
) -> Source:
    """`call`: how forward is called, as `from_module` takes it."""
    if isinstance(special, Mapping):
        special = special_tokens(special)
    unread = [name for name, value in {**call, "step": step}.items() if value is not None]
    if isinstance(model, Source):
        source = model
    elif isinstance(model, torch.export.ExportedProgram):
        source, unread = from_program(model, step, example=example, **call), []
    elif example is None and is_sentence_encoder(model):
        source = from_sentence_encoder(model, from_folder)
    elif example is None and is_transformers_model(model) and hasattr(tokenizer, "feature_extractor"):
        processor: Any = tokenizer
        source = from_transformers(model, extractor=processor.feature_extractor, tokenizer=processor.tokenizer)
        tokenizer = None
    elif example is None and is_transformers_model(model):
        source = from_transformers(model)
    elif example is None:
        raise SourceError("give an example of the model's inputs: example={name of forward's parameter: tensor}")
    else:
        source, unread = from_module(model, example, step, series=series, **call), []
    if unread:
        raise OptionError(f"{', '.join(unread)} is read together with an example of the inputs: give one")
    if callable(tokenizer):
        source, tokenizer = with_tokenizer(source, tokenizer), None
    elif tokenizer is not None:
        source = replace(source, answer=None)
    given: dict[str, Any] = {
        "tokenizers": dict.fromkeys(source.given, tokenizer) if isinstance(tokenizer, str) else tokenizer,
        "task": task,
        "special": special,
        "defaults": defaults,
        "series": series,
    }
    source = replace(source, **{name: value for name, value in given.items() if value is not None})
    _check_texts(source)
    if chat_template is not None:
        source = with_template(source, chat_template)
        if source.step not in source.tokenizers:
            raise OptionError("a chat template makes texts, and there is no tokenizer to read them: give one")
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
