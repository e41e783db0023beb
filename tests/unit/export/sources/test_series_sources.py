"""Descriptions of a series at export, checked against the captured graph."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tformer_export import padding
from tformer_export.analysis.input_facts import find_input_facts
from tformer_export.analysis.series_options import make_series_preprocessor
from tformer_export.capture.trace import capture
from tformer_export.sources.torch_module import from_module
from tformer_runtime import OptionError, UnsupportedModelError


class Stepped(nn.Module):
    """A decoder with `inputs` features and `outputs` targets a step, alone or with a history of three columns."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.of_step, self.of_history = nn.Linear(inputs, outputs), nn.Linear(3, outputs)

    def forward(self, x, history=None):
        forecast = self.of_step(x)
        return forecast if history is None else forecast + self.of_history(history).mean(1, keepdim=True)


class AtOnce(nn.Module):
    def forward(self, history):
        return history[:, :4]


def capture_case(module, example, step, **call):
    source = from_module(module.eval(), example, step, **call)
    graph = capture(source.module, source.example, step, source.axes)
    return SimpleNamespace(source=source, graph=graph, inputs=find_input_facts(graph, source))


def make_preprocessor(case, **options):
    return make_series_preprocessor(replace(case.source, series=options), case.graph, case.inputs)


@pytest.fixture(scope="module")
def decoder_only():
    return capture_case(Stepped(2, 3), {"x": torch.zeros(2, 3, 2)}, "x")


@pytest.fixture(scope="module")
def encoder_decoder():
    example = {"x": torch.zeros(2, 3, 1), "history": torch.zeros(2, 4, 3)}
    return capture_case(Stepped(1, 1), example, "x")


@pytest.fixture(scope="module")
def at_once():
    return capture_case(AtOnce(), {"history": torch.zeros(2, 6, 2)}, None, axes={"history": (0,)})


def test_series_facts_follow_from_the_graph(decoder_only, encoder_decoder, at_once):
    of_steps = make_preprocessor(decoder_only, feedback=[2, 0], columns=["a", "b"], normalize="instance")
    assert (of_steps.input, of_steps.features, of_steps.targets, of_steps.feedback, of_steps.begin) == (
        "x",
        2,
        (0, 1),
        (2, 0),
        0,
    )
    assert of_steps.ragged
    of_history = make_preprocessor(
        encoder_decoder, targets=[1], begin=3, normalize={"mean": [1, 2, 3], "scale": [1, 1, 2]}, min_context_length=2
    )
    assert (of_history.input, of_history.features, of_history.targets, of_history.feedback, of_history.begin) == (
        "history",
        3,
        (1,),
        (0,),
        3,
    )
    assert (of_history.mean, of_history.scale, of_history.min_context_length, of_history.max_context_length) == (
        (1.0, 2.0, 3.0),
        (1.0, 1.0, 2.0),
        3,
        None,
    )
    assert not of_history.ragged  # without a mask, the end of a history is unknown
    of_horizon = make_preprocessor(at_once)
    assert (of_horizon.at_once, of_horizon.horizon, of_horizon.min_context_length, of_horizon.max_context_length) == (
        True,
        4,
        6,
        6,
    )
    assert make_preprocessor(at_once, horizon=3).horizon == 3
    assert make_series_preprocessor(replace(at_once.source, series=None), at_once.graph, at_once.inputs) is None


def test_histories_are_ragged_if_padding_is_masked():
    class Masked(Stepped):
        def forward(self, x, history, keep):
            return self.of_step(x) + (self.of_history(history) * keep[..., None]).sum(1, keepdim=True)

    example = {"x": torch.zeros(2, 3, 1), "history": torch.zeros(2, 4, 3)}
    case = capture_case(Masked(1, 1), example, "x", masks={"keep": padding("history", dtype=torch.float32)})
    assert make_preprocessor(case, targets=[0]).ragged


@pytest.mark.parametrize(
    ("fixture", "options", "message"),
    [
        ("decoder_only", {"horizont": 3}, "series has no horizont: it takes columns, targets"),
        ("decoder_only", {"feedback": [0, 1], "columns": ["a"]}, "x has 2 columns: give as many names"),
        ("decoder_only", {"feedback": [0, 1], "columns": ["a", "a"]}, "each once, not a, a"),
        ("decoder_only", {}, "forward returns 3 numbers per step and 2 are fed back: name the output for each target"),
        ("decoder_only", {"feedback": [0]}, "for each of 2 targets, not [0]"),
        ("decoder_only", {"feedback": [0, 3]}, "feedback must list an output, 0 to 2"),
        ("decoder_only", {"feedback": [0, 1], "begin": 2}, "begin is for encoder-decoders"),
        (
            "decoder_only",
            {"feedback": [0, 1], "normalize": "mean"},
            "normalize is 'instance' or {'mean': […], 'scale': […]}",
        ),
        (
            "decoder_only",
            {"feedback": [0, 1], "normalize": {"mean": [1], "scale": [1]}},
            "above 0 for each of 2 columns",
        ),
        ("decoder_only", {"feedback": [0, 1], "normalize": {"mean": [1, 2], "scale": [1, 0]}}, "a scale above 0"),
        (
            "decoder_only",
            {"feedback": [0, 1], "horizon": 0},
            "horizon of a series is a whole number of 1 or more, not 0",
        ),
        (
            "decoder_only",
            {"feedback": [0, 1], "min_context_length": 5, "max_context_length": 4},
            "5 rows, is longer than the longest, 4",
        ),
        ("encoder_decoder", {}, "history has 3 columns and x has 1: name the columns of history"),
        ("encoder_decoder", {"targets": [0, 1]}, "x has 1 features and there are 2 targets"),
        ("encoder_decoder", {"targets": ["b"]}, "there is no column 'b' to forecast: history has 0 to 2"),
        ("encoder_decoder", {"targets": [0], "begin": 0}, "rows of 1 numbers, not 0"),
        ("encoder_decoder", {"targets": [0], "begin": [[1, 2]]}, "rows of 1 numbers, not [[1, 2]]"),
        ("at_once", {"horizon": 5}, "horizon must be at most 4, the number of steps that the model returns, not 5"),
    ],
)
def test_invalid_series_options_raise_option_error(request, fixture, options, message):
    with pytest.raises(OptionError) as caught:
        make_preprocessor(request.getfixturevalue(fixture), **options)
    assert message in str(caught.value)


def test_fed_columns_must_all_be_forecast(decoder_only):
    with pytest.raises(UnsupportedModelError, match="is fed all its columns at each step, so all must be forecast"):
        make_preprocessor(decoder_only, targets=[1, 0], feedback=[0, 1])


def test_series_needs_one_history_of_numbers():
    ids = capture_case(nn.Embedding(5, 4), {"input": torch.zeros(2, 3, dtype=torch.int64)}, None)
    with pytest.raises(UnsupportedModelError, match="a forecaster reads one history"):
        make_preprocessor(ids)
    stepped = capture_case(nn.Embedding(5, 4), {"input": torch.zeros(2, 3, dtype=torch.int64)}, "input")
    with pytest.raises(OptionError, match="series is for numbers, and the step input 'input' holds ids"):
        make_preprocessor(stepped, horizon=3)


def test_horizon_must_have_a_fixed_size(at_once):
    free = capture_case(nn.Identity(), {"input": torch.zeros(2, 6, 2)}, None)
    with pytest.raises(UnsupportedModelError, match=r"must return \(batch, horizon, features\)"):
        make_preprocessor(free)
