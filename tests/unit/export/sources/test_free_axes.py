"""The axes of an input that may vary are found by running forward, and named in a question if there are several."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tformer_export.sources.torch_module import from_module
from tformer_runtime import SourceError

torch.manual_seed(0)
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class Call(nn.Module):
    """A module that runs a function of its arguments."""

    def __init__(self, run):
        super().__init__()
        self.run, self.calls = run, 0

    def forward(self, x):
        return self.run(x)


def images(x):
    """(batch, 3, 32, 32) → (batch, 16, 5), with 16 positions."""
    return F.conv2d(x, torch.ones(5, 3, 8, 8), stride=8).flatten(2).transpose(1, 2) + torch.ones(16, 1)


def mel(x):
    """(batch, 8, frames) → (batch, frames / 2, 5)."""
    return F.conv1d(x, torch.ones(5, 8, 3), stride=2, padding=1).transpose(1, 2)


def samples(x):
    """(batch, samples) → (batch, frames, 5), for at least 40 samples."""
    return F.conv1d(F.conv1d(x[:, None], torch.ones(5, 1, 10), stride=10), torch.ones(5, 5, 4), stride=2).mT


CASES = {
    "time second": (lambda x: x @ torch.ones(6, 2), (2, 4, 6), (0, 1), {}),
    "channels second": (mel, (2, 8, 20), (0, 2), {}),
    "channels second, few frames": (mel, (1, 8, 1), (0, 2), {}),
    "positions of one size after a convolution": (
        lambda x: mel(x) + torch.ones(10, 1), (2, 8, 20), (0,), {},
    ),
    "image": (images, (2, 3, 32, 32), (0,), {}),
    "history": (lambda x: x.flatten(1) @ torch.ones(24, 2), (2, 6, 4), (0,), {}),
    "features": (lambda x: x @ torch.ones(6, 2), (2, 6), (0,), {}),
    "samples": (samples, (2, 100), (0, 1), {"x": 40}),
    "samples, as few as may be": (samples, (2, 40), (0, 1), {"x": 40}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_axes_of_an_input_are_found(name):
    run, shape, axes, min_lengths = CASES[name]
    source = from_module(Call(run), {"x": torch.randn(shape)}, None)
    assert source.axes.get("x", (0, 1)) == (0, 1)[: len(axes)]
    moved = torch.randn(shape).movedim(axes, (0, 1)[: len(axes)])
    assert source.example["x"].shape == moved.shape
    assert source.min_lengths == min_lengths


class Two(nn.Module):
    """An attention over frames, with a mask of numbers of the same length in front of the channels."""

    def forward(self, mel, weights):
        return (mel * weights[:, None]).sum(2) + mel.mean((1, 2))[:, None]


def test_lengths_that_vary_together_are_found_together():
    source = from_module(Two(), {"mel": torch.randn(2, 8, 20), "weights": torch.randn(2, 20)}, None)
    assert source.example["mel"].shape == (2, 20, 8)
    assert source.axes.get("weights", (0, 1)) == source.axes.get("mel", (0, 1)) == (0, 1)


class Caption(nn.Module):
    def forward(self, ids, image):
        return F.one_hot(ids, 10).float() + images(image).mean((1, 2))[:, None, None]


def test_ids_keep_their_axes_next_to_a_image():
    source = from_module(Caption(), {"ids": IDS, "image": torch.randn(2, 3, 32, 32)}, "ids")
    assert source.axes == {"image": (0,)}


def test_module_is_as_before():
    """Runs at other sizes change neither the mode nor the state of the module."""
    module = nn.Sequential(nn.Conv1d(8, 4, 1), nn.BatchNorm1d(4)).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert from_module(module, {"input": torch.randn(2, 8, 20)}, None).example["input"].shape == (2, 20, 8)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def refusal(run, shape):
    with pytest.raises(SourceError) as caught:
        from_module(Call(run), {"x": torch.randn(shape)}, None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_several_free_axes_are_asked_for():
    text = refusal(lambda x: F.conv2d(x, torch.ones(5, 3, 8, 8), stride=8).mean((2, 3)), (2, 3, 32, 32))
    assert "axis 2 or 3 of 'x'" in text
    assert "axes={'x': (0, 2)}, axes={'x': (0, 3)}, or axes={'x': (0,)}" in text


def test_input_without_a_batch_axis_is_asked_for():
    text = refusal(lambda x: F.conv2d(x, torch.ones(5, 3, 8, 8)).mean((1, 2)), (3, 32, 32))
    assert "axes={'x': (None,)}" in text
    assert "test_free_axes.py" in text
