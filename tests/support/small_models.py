"""A minimal model to stage: embedding, the subject of a test, projection; and its stages up to the plan."""

from __future__ import annotations

import inspect
import linecache
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tformer_export import export
from tformer_export.analysis.attention import ATTENTION
from tformer_export.analysis.binding_time import binding_times
from tformer_export.analysis.interpreter import Constants, run
from tformer_export.capture.trace import capture, merge_equal_nodes
from tformer_export.normalise.attention_patterns import recognise
from tformer_export.normalise.padding_tests import fold_padding_tests
from tformer_export.sources.torch_module import from_module
from tformer_export.staging.plan import make_plan
from tformer_export.staging.restriction import RestrictionSolver
from tformer_runtime import UnsupportedModelError

VOCABULARY, WIDTH, HEADS, LENGTH = 23, 16, 2, 40
EXAMPLE = {"tgt": torch.tensor([[3, 4, 5], [6, 7, 8]])}


class Mixer(nn.Module):
    """The subject of a test: a subclass has forward(x, tgt), (batch, time, width) → the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values (batch, heads, time, d)."""
        return [p(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for p in self.projections]


class Small(nn.Module):
    """logits = out(x + mix(x)), x = embedding + position."""

    def __init__(self, mixer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.mix = mixer()

    def forward(self, tgt: torch.Tensor) -> torch.Tensor:
        x = self.embed(tgt) + self.position[: tgt.shape[1]]  # HERE
        return self.out(x + self.mix(x, tgt))


def joined(heads: torch.Tensor) -> torch.Tensor:
    """Return heads (batch, heads, time, d) merged as (batch, time, heads · d)."""
    return heads.transpose(1, 2).flatten(2)


def causal(x: torch.Tensor) -> torch.Tensor:
    """Return a mask (time, time), true where a position may attend."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def line_of(function: Any, text: str) -> str:
    """Return `file:line` of the first line of a function that contains a text, relative to the working folder."""
    lines, first = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if text in line)
    file = str(inspect.getsourcefile(function)).removeprefix(os.getcwd() + os.sep)
    return f"{file}:{first + at}"


def here(function: Any) -> str:
    """Return `file:line: code` of the line of a function that is marked with HERE."""
    place = line_of(function, "# HERE")
    return f"{place}: {linecache.getline(place.rsplit(':', 1)[0], int(place.rsplit(':', 1)[1])).strip()}"


def refusal(
    model: Any, folder: Path, kind: type[Exception] = UnsupportedModelError, example: Any = EXAMPLE, **options: Any
) -> str:
    """Export a module, or a Mixer in Small, and return the one-line message of its refusal. No file may be written."""
    module = model if isinstance(model, nn.Module) else Small(model) if issubclass(model, Mixer) else model()
    with pytest.raises(kind) as caught:
        export(module, folder / "model.onnx", example, options.pop("step_input", "tgt"), **options)
    assert type(caught.value) is kind
    assert list(folder.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def captured_of(module: nn.Module, step: str | None = "tgt", example: Any = EXAMPLE) -> Any:
    return capture(from_module(module.eval(), example, step).module, example, step)


def staged(module: nn.Module, fuses: bool = False) -> SimpleNamespace:
    """Return the stages of a model up to the plan of its decode stage."""
    captured = captured_of(module)
    attentions = recognise(captured).count
    fold_padding_tests(captured, 0)
    merge_equal_nodes(captured)
    level = binding_times(captured)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (3, 6), generator=generator)
    values, others = (run(captured, {"tgt": ids[[0, second]]}) for second in (1, 2))
    constants = Constants(captured, level)
    solver = RestrictionSolver(captured, level, values, others, constants)
    plan = make_plan(captured, level, solver, lambda attention: fuses)
    return SimpleNamespace(
        captured=captured,
        attentions=attentions,
        level=level,
        values=values,
        constants=constants,
        solver=solver,
        plan=plan,
    )


def attention_nodes(captured: Any) -> list[Any]:
    return [node for node in captured.nodes if node.target is ATTENTION]
