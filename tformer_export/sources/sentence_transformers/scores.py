"""The activation that a CrossEncoder applies to its scores, which several versions save in several places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import nn

from tformer_export.sources.base import Source
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.pooled_module import Pipeline
from tformer_export.sources.sentence_transformers.layers import activation_named
from tformer_export.sources.sentence_transformers.saved import CROSS_ENCODER, SavedModel
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import MULTI_LABEL, REGRESSION, SINGLE_LABEL

_BLOCK, _OLD_KEY = (
    "sentence_transformers",
    "sbert_ce_default_activation_function",
)  # of config.json, since and before 4.0
_PROBLEM_TYPES = {nn.Identity: REGRESSION, nn.Sigmoid: MULTI_LABEL}


def with_named_activation(source: Source, saved: SavedModel | None, config: Any) -> Source:
    """Give the scores of a classifier the activation that its folder names; as it is if the folder names none.

    saved: the files of its folder; None for a folder without modules. config: the model's own, of transformers.

    Raises SourceError for an activation that is not of torch.nn.
    """
    name = _name(saved, config)
    if name is None and (saved is None or saved.model_type != CROSS_ENCODER):
        return source
    labels = len(source.output_meaning.labels)
    activation = activation_named(name) if name is not None else nn.Sigmoid() if labels == 1 else nn.Identity()
    if activation is None:
        raise SourceError(
            f"its config names the activation {name} of scores, which is not of torch.nn and is not run: remove it, or "
            "load the model in Python and give an example of its inputs"
        )
    problem_type = _PROBLEM_TYPES.get(type(activation))
    if isinstance(activation, nn.Softmax) and labels > 1:
        problem_type = SINGLE_LABEL
    if problem_type is None:
        source, problem_type = _with_activation(source, activation), REGRESSION
    return replace(source, output_meaning=structs.replace(source.output_meaning, problem_type=problem_type))


def _name(saved: SavedModel | None, config: Any) -> str | None:
    """Return the name of the activation: of the first place that has one, in the order of the package."""
    block = getattr(config, _BLOCK, None)
    places = [saved.options.get("activation_fn") if saved is not None else None]
    places += [block.get("activation_fn") if isinstance(block, dict) else None, getattr(config, _OLD_KEY, None)]
    return next((str(name) for name in places if name is not None), None)


def _with_activation(source: Source, activation: nn.Module) -> Source:
    """Compute an activation in the graph."""
    adapter, answer = source.module, source.own_pipeline
    assert isinstance(adapter, Adapter)
    module = Adapter(adapter.module, adapter.names, adapter.fixed_arguments, heads=[activation])
    return replace(source, module=module, own_pipeline=None if answer is None else _activated(answer, activation))


def _activated(answer: Pipeline, activation: nn.Module) -> Pipeline:
    def pipeline(sample: Any, max_tokens: int | None) -> torch.Tensor:
        result: torch.Tensor = activation(answer(sample, max_tokens))
        return result

    return pipeline
