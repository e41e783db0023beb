"""Random inputs of two rows on which a traced graph is run: its values show which rows and positions they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from tformer_export.analysis.binding_time import padding_tests
from tformer_export.analysis.input_facts import InputFacts
from tformer_export.analysis.interpreter import run
from tformer_export.capture.trace import CapturedGraph
from tformer_export.common.source_lines import torch_error_words
from tformer_export.soundness.determinism import failing_line
from tformer_export.staging.restriction import PROBE_LENGTH
from tformer_runtime.base.errors import UnsupportedModelError


def run_probe(captured: CapturedGraph, inputs: Mapping[str, InputFacts]) -> dict[Node, Any]:
    """Run the graph on the probe and return the value of each node.

    Raises UnsupportedModelError if the graph fails at the length of the probe. Cost: one forward.
    """
    probe = _draw(captured, inputs)
    try:
        return run(captured, probe)
    except (RuntimeError, IndexError) as error:
        where = failing_line(captured, probe)
        raise UnsupportedModelError(
            f"the traced model fails at a length of {PROBE_LENGTH}{where}: {torch_error_words(error)}. The file "
            "has to run at any size"
        ) from error


def run_other_row(captured: CapturedGraph, inputs: Mapping[str, InputFacts]) -> dict[Node, Any]:
    """Run the graph on the probe with another second row: a value that changes belongs to that row.

    Its ids are not those with which the model compares its ids, such as the end of a document.
    """
    return run(captured, _with_other_row(captured, inputs))


def compared_ids(captured: CapturedGraph, name: str) -> list[int]:
    """Return the ids of an input with which the model compares its ids, sorted."""
    return sorted({t.padding for t in padding_tests(captured, name) if t.padding is not None})


def _draw(
    captured: CapturedGraph, inputs: Mapping[str, InputFacts], seed: int = 0, with_compared: bool = True
) -> dict[str, torch.Tensor]:
    """Draw two rows of each input. Ids are random, so that positions differ.

    with_compared: half of the ids are among the compared ones; otherwise none is, if there are others.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, value in captured.example.items():
        value, ids = value[:2], inputs[name].ids
        if ids is not None:
            shape = (2, PROBE_LENGTH, *value.shape[2:]) if name == captured.step_name else value.shape
            # Values that follow from the comparison vary.
            compared = compared_ids(captured, name)
            pad = inputs[name].pad
            allowed = [i for i in range(ids) if i != pad or (name == captured.step_name and i in compared)] or [0]
            compared = [i for i in compared if i in allowed]
            others = [i for i in allowed if i not in compared] or allowed
            pool = torch.tensor(
                allowed + compared * (len(allowed) // max(1, len(compared))) if with_compared else others
            )
            value = pool[torch.randint(len(pool), shape, generator=generator)].to(value.dtype)
        elif name == captured.step_name:
            value = torch.randn((2, PROBE_LENGTH, *value.shape[2:]), generator=generator).to(value.dtype)
        drawn[name] = value
    return drawn


def _with_other_row(captured: CapturedGraph, inputs: Mapping[str, InputFacts]) -> dict[str, torch.Tensor]:
    first, second = _draw(captured, inputs), _draw(captured, inputs, 1, with_compared=False)
    for name, value in second.items():
        facts, is_step = inputs[name], name == captured.step_name
        if facts.masked and facts.ids is not None and not is_step and value.dim() > 1:
            value[1:, -1:] = facts.pad  # positions that a mask made of ids hides belong to their row
        if facts.ids is None and not is_step:  # a mask hides another position; data are other data
            whole = not value.is_floating_point() or torch.equal(value, value.round())
            flipped = value[1:] == 0 if not value.is_floating_point() else value[1:] - 1 if whole else 3 * value[1:] + 1
            value[1:, ..., -1:] = flipped.to(value.dtype)[..., -1:]
    return {name: torch.cat([first[name][:1], value[1:]]) for name, value in second.items()}
