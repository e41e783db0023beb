"""What is said of a series at export, held against the graph that was captured."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tformer_export import padding
from tformer_export.analysis.input_facts import find_input_facts
from tformer_export.analysis.series import make_series_preprocessor
from tformer_export.capture.trace import capture
from tformer_export.sources.torch_module import from_module
from tformer_runtime import OptionError, UnsupportedModelError


class Stepped(nn.Module):
    """`inputs` features of a step in, `outputs` out; beside a history of three columns, or alone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.of_step, self.of_history = nn.Linear(inputs, outputs), nn.Linear(3, outputs)

    def forward(self, x, history=None):
        given = self.of_step(x)
        return given if history is None else given + self.of_history(history).mean(1, keepdim=True)


class AtOnce(nn.Module):
    def forward(self, history):
        return history[:, :4]


def captured(module, example, step, **call):
    source = from_module(module.eval(), example, step, **call)
    graph = capture(source.module, source.example, step, source.axes)
    return SimpleNamespace(source=source, graph=graph, inputs=find_input_facts(graph, source))


def settled(made, **said):
    return make_series_preprocessor(replace(made.source, series=said), made.graph, made.inputs)


@pytest.fixture(scope="module")
def alone():
    return captured(Stepped(2, 3), {"x": torch.zeros(2, 3, 2)}, "x")


@pytest.fixture(scope="module")
def beside():
    example = {"x": torch.zeros(2, 3, 1), "history": torch.zeros(2, 4, 3)}
    return captured(Stepped(1, 1), example, "x")


@pytest.fixture(scope="module")
def at_once():
    return captured(AtOnce(), {"history": torch.zeros(2, 6, 2)}, None, axes={"history": (0,)})


def test_what_follows_from_the_graph(alone, beside, at_once):
    own = settled(alone, feedback=[2, 0], columns=["a", "b"], normalize="instance")
    assert (own.input, own.features, own.targets, own.feedback, own.begin) == ("x", 2, (0, 1), (2, 0), 0)
    assert own.ragged
    both = settled(beside, targets=[1], begin=3, normalize={"mean": [1, 2, 3], "scale": [1, 1, 2]}, shortest=2)
    assert (both.input, both.features, both.targets, both.feedback, both.begin) == ("history", 3, (1,), (0,), 3)
    assert (both.mean, both.scale, both.shortest, both.longest) == ((1.0, 2.0, 3.0), (1.0, 1.0, 2.0), 3, None)
    assert not both.ragged  # nothing tells where a history ends
    once = settled(at_once)
    assert (once.at_once, once.horizon, once.shortest, once.longest) == (True, 4, 6, 6)
    assert settled(at_once, horizon=3).horizon == 3
    assert make_series_preprocessor(replace(at_once.source, series=None), at_once.graph, at_once.inputs) is None


def test_histories_may_be_ragged_where_padding_is_hidden():
    class Masked(Stepped):
        def forward(self, x, history, keep):
            return self.of_step(x) + (self.of_history(history) * keep[..., None]).sum(1, keepdim=True)

    example = {"x": torch.zeros(2, 3, 1), "history": torch.zeros(2, 4, 3)}
    made = captured(Masked(1, 1), example, "x", masks={"keep": padding("history", dtype=torch.float32)})
    assert settled(made, targets=[0]).ragged


@pytest.mark.parametrize(
    ("of", "said", "sentence"),
    [
        ("alone", {"horizont": 3}, "series has no horizont: it takes columns, targets"),
        ("alone", {"feedback": [0, 1], "columns": ["a"]}, "x has 2 columns: give as many names"),
        ("alone", {"feedback": [0, 1], "columns": ["a", "a"]}, "each once, not a, a"),
        ("alone", {}, "forward gives 3 numbers a step and 2 are fed back: say which of them each target is"),
        ("alone", {"feedback": [0]}, "for each of 2 targets, not [0]"),
        ("alone", {"feedback": [0, 3]}, "the number of an output, 0 to 2"),
        ("alone", {"feedback": [0, 1], "begin": 2}, "begin is for a decoder beside an encoder"),
        ("alone", {"feedback": [0, 1], "normalize": "mean"}, "normalize is 'instance' or {'mean': […], 'scale': […]}"),
        ("alone", {"feedback": [0, 1], "normalize": {"mean": [1], "scale": [1]}}, "above 0 for each of 2 columns"),
        ("alone", {"feedback": [0, 1], "normalize": {"mean": [1, 2], "scale": [1, 0]}}, "a scale above 0"),
        ("alone", {"feedback": [0, 1], "horizon": 0}, "horizon of a series is a whole number of 1 or more, not 0"),
        ("alone", {"feedback": [0, 1], "shortest": 5, "longest": 4}, "5 rows at least and 4 at most"),
        ("beside", {}, "history has 3 columns and x 1: say which of them it is"),
        ("beside", {"targets": [0, 1]}, "x has 1 features and there are 2 targets"),
        ("beside", {"targets": ["b"]}, "there is no column 'b' to forecast: history has 0 to 2"),
        ("beside", {"targets": [0], "begin": 0}, "rows of 1 numbers, not 0"),
        ("beside", {"targets": [0], "begin": [[1, 2]]}, "rows of 1 numbers, not [[1, 2]]"),
        ("at_once", {"horizon": 5}, "the model gives 4 steps at once: a horizon of 5 cannot be had"),
    ],
)
def test_what_does_not_fit_is_said(request, of, said, sentence):
    with pytest.raises(OptionError) as caught:
        settled(request.getfixturevalue(of), **said)
    assert sentence in str(caught.value)


def test_what_is_fed_must_be_forecast(alone):
    with pytest.raises(UnsupportedModelError, match="is fed all its columns at each step, so all must be forecast"):
        settled(alone, targets=[1, 0], feedback=[0, 1])


def test_one_history_of_numbers_is_read():
    ids = captured(nn.Embedding(5, 4), {"input": torch.zeros(2, 3, dtype=torch.int64)}, None)
    with pytest.raises(UnsupportedModelError, match="a forecast follows from one history"):
        settled(ids)
    stepped = captured(nn.Embedding(5, 4), {"input": torch.zeros(2, 3, dtype=torch.int64)}, "input")
    with pytest.raises(OptionError, match="series is for numbers, and the step input 'input' holds ids"):
        settled(stepped, horizon=3)


def test_a_horizon_has_a_size(at_once):
    free = captured(nn.Identity(), {"input": torch.zeros(2, 6, 2)}, None)
    with pytest.raises(
        UnsupportedModelError, match=r"a forecast that is given at once is \(batch, horizon, features\)"
    ):
        settled(free)
