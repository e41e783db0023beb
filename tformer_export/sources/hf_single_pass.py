"""A transformers model that is run once for an input: what it reads by forward's signature, what its results are by its
config, and its own way from a text to them."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tformer_export.common.derived_inputs import padding
from tformer_export.sources.adapter import Adapter, chosen_output
from tformer_export.sources.base import Source, as_float32, evaluating
from tformer_export.sources.pooled_module import Answer
from tformer_export.sources.reference_pipelines import BY_TOKEN, answer_by_token
from tformer_export.sources.task_names import ANSWERS, CLASSES, FILLS, LABELS_TOKENS
from tformer_export.sources.tokenizer import read_encoder_tokenizer
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION, SINGLE_LABEL, Outcome, SpecialTokens
from tformer_runtime.tasks.fill_mask import MASK as MASKED
from tformer_runtime.tasks.question_answering import FIRST
from tformer_runtime.tasks.token_classification import UNKNOWN

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"  # transformers' names, of every model and tokenizer
OUTPUTS = {ANSWERS: ("start_logits", "end_logits")}  # of tasks that take several of forward's
SPECIAL = {LABELS_TOKENS: (UNKNOWN, "unk"), ANSWERS: (FIRST, "cls"), FILLS: (MASKED, "mask")}  # that results need
BOUNDLESS = 10**9  # what a tokenizer says that sets no limit is far above
MOST_TRIED = 1024  # positions that a model is tried with, to know whether it takes as many as its config says


def run_once(module: Any, task: str, name: str | None = None) -> Source:
    """The inputs of a model that reads text: ids, their padding mask, and token types if they change anything."""
    if module.main_input_name != IDS:
        raise SourceError(
            f"{type(module).__name__} reads {module.main_input_name}, not text: load it in Python and give an example "
            "of its inputs"
        )
    taken = inspect.signature(module.forward).parameters
    ids = torch.arange(1, 7).reshape(2, 3) % 3
    example, masks, types = {IDS: ids}, {}, {}
    if MASK in taken:
        masks[MASK] = padding(IDS, dtype=torch.int64)
        example[MASK] = torch.ones_like(ids)
    constants = {"use_cache": False} if "use_cache" in taken else {}
    single = as_float32(module)
    if TYPES in taken and _reads_types(single, example, constants):
        types[TYPES] = IDS
        example[TYPES] = torch.arange(6).reshape(2, 3) % 2
    outputs = OUTPUTS.get(task, ())
    adapter = Adapter(single, list(example), constants=constants, output=outputs or None)
    pad = getattr(module.config, "pad_token_id", None)
    return Source(
        module=adapter,
        example=example,
        step=None,
        name=name or type(module).__name__,
        task=task,
        masks=masks,
        types=types,
        special=SpecialTokens(pad=pad if isinstance(pad, int) else None),
        max_length=_longest(single, module.config, constants),
        outcome=outcome_of(module.config, task),
        outputs=outputs,
    )


def outcome_of(config: Any, task: str) -> Outcome:
    """Labels, and what is made of their scores: as transformers' pipeline does, for which a single label holds or not.
    Nothing for tasks that have no labels.

    https://huggingface.co/docs/transformers/main_classes/pipelines, TextClassificationPipeline
    """
    if task not in (*CLASSES, LABELS_TOKENS):
        return Outcome()
    held = {int(place): str(label) for place, label in (config.id2label or {}).items()}
    labels = tuple(held[i] for i in sorted(held))
    if task == LABELS_TOKENS:
        problem = SINGLE_LABEL
    elif config.problem_type == "regression":
        problem = REGRESSION
    elif config.problem_type == "multi_label_classification" or len(labels) == 1:
        problem = MULTI_LABEL
    else:
        problem = SINGLE_LABEL
    return Outcome(labels, problem)


def with_tokenizer(source: Source, tokenizer: Any) -> Source:
    """The source with a transformers tokenizer in memory, in tokenizers' JSON format, and its own way through that."""
    reads = source.given
    if source.step is not None or len(reads) != 1 or not hasattr(tokenizer, "model_max_length"):
        raise OptionError(
            "a tokenizer is text in tokenizers' JSON format (tokenizer.json); one of transformers is taken for a model "
            "that is run once on one text"
        )
    text, own = read_encoder_tokenizer(tokenizer)
    limits = [source.max_length, own.model_max_length if own.model_max_length < BOUNDLESS else None]
    most = min((n for n in limits if n is not None), default=None)
    module = source.module.module if isinstance(source.module, Adapter) else None
    named = module is not None and not source.module.derived and reads == [IDS]
    answer = own_answer(module, own, source.task, source.outputs) if named else None
    name, kind = SPECIAL.get(source.task, ("", ""))
    special = getattr(own, f"{kind}_token_id", None)
    settings = {**source.outcome.settings, **({name: int(special)} if special is not None else {})}
    outcome = replace(source.outcome, settings=settings)
    return replace(source, tokenizers={reads[0]: text}, max_length=most, answer=answer, outcome=outcome)


def own_answer(module: Any, tokenizer: Any, task: str, outputs: tuple[str, ...] = ()) -> Answer | None:
    """The model's own way from a text or a pair to its output, or its result: its tokenizer, which cuts, and forward,
    for one input that is not padded. None where the tokenizer does not tell where in a text its tokens stand, and the
    task needs that."""
    taken = inspect.signature(module.forward).parameters
    constants = {"use_cache": False} if "use_cache" in taken else {}

    def read(sample: Any, most: int | None, stride: int | None) -> Any:
        cut: dict[str, Any] = {"truncation": True, "max_length": most} if most is not None else {}
        if stride is not None:
            cut |= {"truncation": "only_second", "stride": stride, "return_overflowing_tokens": True}
        return tokenizer(*((sample,) if isinstance(sample, str) else sample), **cut).encodings

    def run(found: Any) -> tuple[torch.Tensor, ...]:
        parts = {IDS: found.ids, MASK: found.attention_mask, TYPES: found.type_ids}
        given = {name: torch.tensor([part]) for name, part in parts.items() if name in names}
        with torch.no_grad():
            returned = module(**given, **constants)
        return tuple(chosen_output(returned, which)[0].float() for which in outputs or (None,))

    names = [name for name in tokenizer.model_input_names if name in taken]
    if task in BY_TOKEN:
        special = getattr(tokenizer, f"{SPECIAL[task][1]}_token_id", None)
        return answer_by_token(task, read, run, special) if tokenizer.is_fast else None

    def answer(sample: Any, most: int | None) -> torch.Tensor:
        texts = (sample,) if isinstance(sample, str) else sample
        cut = {"truncation": True, "max_length": most} if most is not None else {}
        read = tokenizer(*texts, return_tensors="pt", **cut)
        with torch.no_grad():
            return chosen_output(module(**{n: v for n, v in read.items() if n in taken}, **constants))[0].float()

    return answer


def _reads_types(module: nn.Module, example: Mapping[str, torch.Tensor], constants: Mapping[str, Any]) -> bool:
    """Whether other token types than zeros give another output."""
    ids = example[IDS]
    try:
        with evaluating(module), torch.no_grad():
            one, other = (
                chosen_output(module(**example, **constants, **{TYPES: torch.full_like(ids, kind)})) for kind in (0, 1)
            )
    except (IndexError, RuntimeError):  # there is one type alone
        return False
    return not torch.equal(one, other)


def _longest(module: nn.Module, config: Any, constants: Mapping[str, Any]) -> int | None:
    """How many positions the model takes: what its config says, or fewer if forward fails for so many, as where tables
    of positions begin with some that no token has. Cost: one run at that length, or some."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    limit = min((n for n in limits if isinstance(n, int) and n > 0), default=None)
    if limit is None or limit > MOST_TRIED:
        return limit
    pad = getattr(config, "pad_token_id", None)
    token = 1 if pad == 0 else 0

    def works(length: int) -> bool:
        try:
            with evaluating(module), torch.no_grad():
                module(**{IDS: torch.full((1, length), token)}, **constants)
        except (IndexError, RuntimeError):
            return False
        return True

    return limit if works(limit) else 1 + bisect_left(range(2, limit), True, key=lambda length: not works(length))
