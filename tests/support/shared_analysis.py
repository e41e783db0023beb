"""Exports of one model in several forms, which share its captured graph and what was lowered from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import tformer_export.build as build
from tformer_export.compile import AnalysedModel
from tformer_export.sources import Source


def analyse_once(model: Hashable, analysed: dict[Hashable, AnalysedModel]) -> Callable[..., AnalysedModel]:
    """Return an `analyse` for `tformer_export.build` that captures a model's graph once for all its files.

    model: tells the model and its extra outputs from the others in `analysed`, the analysed models so far.
    """
    original = build.analyse

    def analyse(
        source: Source,
        target: str,
        length: int | None,
        phase: Any,
        cross_attentions: Any,
        submodules: Any,
        half: bool,
        attentions: bool,
    ) -> AnalysedModel:
        key = model, length, repr(submodules), attentions
        if key not in analysed:
            analysed[key] = original(source, target, length, phase, cross_attentions, submodules, half, attentions)
        return replace(analysed[key], target=target, half=half)

    return analyse


@contextmanager
def shared_analysis(model: Hashable, analysed: dict[Hashable, AnalysedModel]) -> Iterator[None]:
    """Let exports of this model share its captured graph. The arguments are those of `analyse_once`."""
    with patch.object(build, "analyse", analyse_once(model, analysed)):
        yield
