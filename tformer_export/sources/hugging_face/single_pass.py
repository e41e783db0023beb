"""A single-pass transformers model.

Its inputs follow from the signature of forward, the meaning of its outputs from its config. Its own pipeline, from a
text to its results, is for verification.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import nn

from tformer_export.common.derived_inputs import padding
from tformer_export.common.example_sizes import least_size
from tformer_export.sources.base import Source, as_float32, eval_mode
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.call.outputs import choose_output
from tformer_export.sources.call.signature import parameters_of
from tformer_export.sources.pooled_module import Pipeline
from tformer_export.sources.reference_pipelines import TOKEN_TASKS, make_token_pipeline
from tformer_export.sources.task_names import ANSWERS, CLASSES, FILLS, LABELS_TOKENS
from tformer_export.sources.tokenizer import read_encoder_tokenizer
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION, SINGLE_LABEL, OutputMeaning, SpecialTokens
from tformer_runtime.tasks.fill_mask import MASK as MASKED
from tformer_runtime.tasks.question_answering import FIRST
from tformer_runtime.tasks.token_classification import UNKNOWN

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"  # transformers' names, of every model and tokenizer
OUTPUTS = {ANSWERS: ("start_logits", "end_logits")}  # task → the outputs of forward that it needs
SPECIAL = {
    LABELS_TOKENS: (UNKNOWN, "unk"),
    ANSWERS: (FIRST, "cls"),
    FILLS: (MASKED, "mask"),
}  # task → the setting of the special token that results need, and its name in transformers
MIN_UNLIMITED_TOKENS = 10**9  # tokenizers without a limit state a number far above
FIRST_LENGTH, TRIED_LENGTHS = 3, (4, 8, 16, 32, 64)  # of an example
MAX_TRIED_TOKENS = 1024  # positions up to which the length in the config is verified by a run


def from_text_model(module: Any, task: str, name: str | None = None) -> Source:
    """Read a model that takes text: ids, their padding mask, and token types if they change the output.

    Raises SourceError for a model that reads anything else.
    """
    if module.main_input_name != IDS:
        raise SourceError(
            f"{type(module).__name__} reads {module.main_input_name}, not text: load it in Python and give an example "
            "of its inputs"
        )
    taken = inspect.signature(module.forward).parameters
    constants = {"use_cache": False} if "use_cache" in taken else {}
    single = as_float32(module)
    ids, needs_length = _example_ids(single, MASK in taken, constants)
    example, masks = {IDS: ids}, {}
    if MASK in taken:
        masks[MASK] = padding(IDS, dtype=torch.int64)
        example[MASK] = torch.ones_like(ids)
    is_of_one_length = needs_length == ids.shape[1]
    outputs = OUTPUTS.get(task, ())
    adapter = Adapter(single, list(example), fixed_arguments=constants, output=outputs or None)
    pad = getattr(module.config, "pad_token_id", None)
    source = Source(
        module=adapter,
        example=example,
        step_input=None,
        name=name or type(module).__name__,
        task=task,
        masks=masks,
        special_tokens=SpecialTokens(pad_token_id=pad if isinstance(pad, int) else None),
        max_length=needs_length if is_of_one_length else _max_positions(single, module.config, constants, ids),
        output_meaning=output_meaning_of(module.config, task),
        outputs=outputs,
        axes=dict.fromkeys(example, (0,)) if is_of_one_length else {},
        min_lengths={IDS: needs_length} if needs_length and not is_of_one_length else {},
        made_example=True,
    )
    return _with_token_types(source, returned=False)


def _example_ids(module: nn.Module, masked: bool, constants: Mapping[str, Any]) -> tuple[torch.Tensor, int]:
    """Return ids, (batch, time), that forward takes; those of the first try if it takes none.

    A layer may need some positions, or exactly as many as its config states.

    Return with them the least length at which forward runs, if it does not run at the first one; the length of the ids
    if it runs at no other. Cost: one run, or some dozens if forward fails.

    Raises SourceError for a model that takes only rows with its end token.
    """

    config: Any = module.config
    end = getattr(config, "eos_token_id", None)
    others = torch.tensor([i for i in range(4) if i != end][:3])

    def ids_of(length: int) -> torch.Tensor:
        return others[torch.arange(1, 2 * length + 1).reshape(2, length) % 3]

    def runs(ids: torch.Tensor) -> bool:
        mask = {MASK: torch.ones_like(ids)} if masked else {}
        try:
            with eval_mode(module), torch.no_grad():
                module(**{IDS: ids, **mask}, **constants)
        except Exception:  # forward may raise anything; that of the first try is reported later
            return False
        return True

    first = ids_of(FIRST_LENGTH)
    if runs(first):
        return first, 0
    if isinstance(end, int) and runs(first.index_fill(1, torch.tensor([FIRST_LENGTH - 1]), end)):
        raise SourceError(
            f"{type(module).__name__} takes only rows that hold its end token, id {end}, and selects positions by "
            "their ids, which cannot be exported: give it a head that reads the first position, the last or the mean"
        )
    stated = {n for n in config.to_dict().values() if isinstance(n, int) and n <= MAX_TRIED_TOKENS}
    for length in sorted({*TRIED_LENGTHS, *(n for n in stated if n > FIRST_LENGTH)}):
        if runs(ids_of(length)) and runs(ids_of(length)[[0, 1, 0]]):  # at some lengths it may mix two rows
            if not runs(ids_of(length + 1)):
                return ids_of(length), length
            return ids_of(length + 1), least_size(lambda n: runs(ids_of(n)), length)
    return first, 0


def output_meaning_of(config: Any, task: str) -> OutputMeaning:
    """Return the labels and the problem type of a classifier, as transformers' pipeline interprets the config.

    A single label is a yes-or-no question. Tasks without labels get an empty meaning.

    https://huggingface.co/docs/transformers/main_classes/pipelines, TextClassificationPipeline
    """
    if task not in (*CLASSES, LABELS_TOKENS):
        return OutputMeaning()
    label_of = {int(place): str(label) for place, label in (config.id2label or {}).items()}
    labels = tuple(label_of[i] for i in sorted(label_of))
    if task == LABELS_TOKENS:
        problem = SINGLE_LABEL
    elif config.problem_type == REGRESSION:
        problem = REGRESSION
    elif config.problem_type == MULTI_LABEL or len(labels) == 1:
        problem = MULTI_LABEL
    else:
        problem = SINGLE_LABEL
    return OutputMeaning(labels, problem)


def with_tokenizer(source: Source, tokenizer: Any) -> Source:
    """Add a transformers tokenizer in memory, in tokenizers' JSON format, and the model's own pipeline with it.

    Token types are an input only if the tokenizer returns them. Otherwise the model has its default for them, which is
    not always what tokenizers' JSON format gives for the second text of a pair.

    Raises OptionError for other models than single-pass models of one text.
    """
    reads = source.caller_inputs
    if source.step_input is not None or len(reads) != 1 or not hasattr(tokenizer, "model_max_length"):
        raise OptionError(
            "a tokenizer is text in tokenizers' JSON format (tokenizer.json); one of transformers is taken for a "
            "single-pass model of one text"
        )
    text, checked = read_encoder_tokenizer(tokenizer)
    returned = TYPES in checked("a", "a")
    source = _with_token_types(source, returned) if returned else _without_token_types(source)
    limits = [source.max_length, checked.model_max_length if checked.model_max_length < MIN_UNLIMITED_TOKENS else None]
    max_length = min((n for n in limits if n is not None), default=None)
    module = source.module.module if isinstance(source.module, Adapter) else None
    named = module is not None and not source.module.derived and reads == [IDS]
    answer = make_own_pipeline(module, checked, source.task, source.outputs) if named else None
    name, kind = SPECIAL.get(source.task, ("", ""))
    special = getattr(checked, f"{kind}_token_id", None)
    settings = {**source.output_meaning.settings, **({name: int(special)} if special is not None else {})}
    outcome = structs.replace(source.output_meaning, settings=settings)
    return replace(
        source, tokenizers={reads[0]: text}, max_length=max_length, own_pipeline=answer, output_meaning=outcome
    )


def _with_token_types(source: Source, returned: bool) -> Source:
    """Add an input of token types, if they change the output. Cost: three runs.

    returned: whether the tokenizer returns them. Otherwise ids come without types, which are then zeros in the file; so
        they are not an input of a model that computes something else without them.
    """
    adapter, ids = source.module, source.example.get(IDS)
    if not isinstance(adapter, Adapter) or ids is None or source.token_types or adapter.derived:
        return source
    if TYPES not in parameters_of(adapter.module) or TYPES in adapter.fixed_arguments:
        return source
    without, zeros, ones = (_output(adapter, source.example, kind) for kind in (None, 0, 1))
    if zeros is None:
        return source
    needs_types = without is None or not torch.allclose(without, zeros, rtol=1e-4, atol=1e-5)
    has_several = ones is not None and not torch.equal(zeros, ones)
    if not ((returned or without is None) if needs_types else has_several):
        return source
    types = torch.arange(ids.numel()).reshape(ids.shape) % (2 if has_several else 1)
    source = _with_example(source, {**source.example, TYPES: types})
    axes = {**source.axes, TYPES: source.axes[IDS]} if IDS in source.axes else source.axes
    return replace(source, axes=axes, token_types={TYPES: IDS}, needs_types=needs_types)


def _without_token_types(source: Source) -> Source:
    """Leave the token types to the model's default, if the tokenizer returns none."""
    if not source.token_types or not isinstance(source.module, Adapter):
        return source
    example = {name: value for name, value in source.example.items() if name not in source.token_types}
    return replace(_with_example(source, example), token_types={}, needs_types=False)


def _with_example(source: Source, example: dict[str, torch.Tensor]) -> Source:
    """Return the source with other inputs of its forward."""
    adapter = source.module
    assert isinstance(adapter, Adapter)
    module = Adapter(adapter.module, list(example), adapter.fixed_arguments, output=adapter.output)
    return replace(source, module=module, example=example)


def make_own_pipeline(module: Any, tokenizer: Any, task: str, outputs: tuple[str, ...] = ()) -> Pipeline | None:
    """Make the model's own pipeline from a text or a pair to its output or result, for one input without padding.

    It consists of the tokenizer, which truncates, and forward. None if the task needs the offsets of tokens in the
    text and the tokenizer does not give them.
    """
    taken = inspect.signature(module.forward).parameters
    constants = {"use_cache": False} if "use_cache" in taken else {}

    def read(sample: Any, max_tokens: int | None, stride: int | None) -> Any:
        cut: dict[str, Any] = {"truncation": True, "max_length": max_tokens} if max_tokens is not None else {}
        if stride is not None:
            cut |= {"truncation": "only_second", "stride": stride, "return_overflowing_tokens": True}
        return tokenizer(*((sample,) if isinstance(sample, str) else sample), **cut).encodings

    def run(encoding: Any) -> tuple[torch.Tensor, ...]:
        parts = {IDS: encoding.ids, MASK: encoding.attention_mask, TYPES: encoding.type_ids}
        inputs = {name: torch.tensor([part]) for name, part in parts.items() if name in names}
        with torch.no_grad():
            returned = module(**inputs, **constants)
        return tuple(choose_output(returned, which)[0].float() for which in outputs or (None,))

    names = [name for name in tokenizer.model_input_names if name in taken]
    if task in TOKEN_TASKS:
        special = getattr(tokenizer, f"{SPECIAL[task][1]}_token_id", None)
        return make_token_pipeline(task, read, run, special) if tokenizer.is_fast else None

    def answer(sample: Any, max_tokens: int | None) -> torch.Tensor:
        texts = (sample,) if isinstance(sample, str) else sample
        cut = {"truncation": True, "max_length": max_tokens} if max_tokens is not None else {}
        read = tokenizer(*texts, return_tensors="pt", **cut)
        with torch.no_grad():
            return choose_output(module(**{n: v for n, v in read.items() if n in taken}, **constants))[0].float()

    return answer


def _output(adapter: Adapter, example: Mapping[str, torch.Tensor], kind: int | None) -> torch.Tensor | None:
    """Return the output for token types that are all `kind`, or that are left out; None if forward fails."""
    types = {} if kind is None else {TYPES: torch.full_like(example[IDS], kind)}
    try:
        with eval_mode(adapter.module), torch.no_grad():
            return choose_output(adapter.module(**example, **adapter.fixed_arguments, **types))
    except Exception:  # forward may raise anything
        return None


def _max_positions(module: nn.Module, config: Any, constants: Mapping[str, Any], ids: torch.Tensor) -> int | None:
    """Return the number of positions that the model takes; None if its config does not state it.

    ids: an example that forward takes.

    It is fewer than the config states if forward fails at that length. Tables of positions may begin with unused
    entries. Cost: one run at that length, or a binary search of runs.
    """
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    limit = min((n for n in limits if isinstance(n, int) and n > 0), default=None)
    if limit is None or limit > MAX_TRIED_TOKENS:
        return limit
    pad = getattr(config, "pad_token_id", None)
    row = ids[:1] if pad is None else torch.where(ids[:1] == pad, 1 if pad == 0 else 0, ids[:1])

    def works(length: int) -> bool:
        try:
            with eval_mode(module), torch.no_grad():
                module(**{IDS: row[:, torch.arange(length) % row.shape[1]]}, **constants)
        except Exception:  # forward may raise anything
            return False
        return True

    return limit if works(limit) else 1 + bisect_left(range(2, limit), True, key=lambda length: not works(length))
