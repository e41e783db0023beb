"""The weights of a module are found in the files that training loops write."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tformer_export.sources.state_dict import read_weights
from tformer_runtime import SourceError


@pytest.fixture
def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))


def prefixed(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in weights.items()}


FILES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "alone": lambda w: w,
    "next-to-an-optimiser": lambda w: {"model": w, "optimizer": {"state": {}, "lr": 0.1}, "step": 3},
    "of-a-compiled-module": lambda w: {"model": prefixed("_orig_mod.", w), "step": 3},
    "of-data-parallel": lambda w: prefixed("module.", w),
    "of-a-lightning-module": lambda w: {"state_dict": prefixed("model.", w), "epoch": 1, "hyper_parameters": {"lr": 1}},
    "with-two-prefixes": lambda w: {"state_dict": prefixed("module._orig_mod.", w)},
    "two-dicts-deep": lambda w: {"trainer": {"model": w}, "loss": {"history": [1.0]}},
    "with-an-optimiser-of-tensors": lambda w: {"model": w, "optimizer": {"exp_avg": torch.zeros(3)}},
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_weights_are_found(make: Callable[..., Any], module: nn.Module, tmp_path: Path) -> None:
    expected = module.state_dict()
    torch.save(make(dict(expected)), tmp_path / "run.pt")
    weights = read_weights(tmp_path / "run.pt", expected.keys())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_weights_of_safetensors_are_read(module: nn.Module, tmp_path: Path) -> None:
    expected = module.state_dict()
    save_file(prefixed("model.", expected), tmp_path / "weights.safetensors")
    weights = read_weights(tmp_path / "weights.safetensors", expected.keys())
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_weights_of_another_module_are_left_out_and_named(module, tmp_path, caplog) -> None:
    content = {"state_dict": {**prefixed("model.", module.state_dict()), "loss.weight": torch.ones(7)}}
    torch.save(content, tmp_path / "run.ckpt")
    with caplog.at_level(logging.WARNING, "tformer_export"):
        weights = read_weights(tmp_path / "run.ckpt", module.state_dict().keys())
    assert weights.keys() == module.state_dict().keys()
    assert "left out: loss.weight" in caplog.text


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda w: {"model": w, "ema": w}, "at ['model'] and at ['ema']"),
        (lambda w: prefixed("student.", w) | prefixed("teacher.", w), "with the prefix 'student.'"),
    ],
)
def test_several_weights_that_fit_are_refused(make, names: str, module: nn.Module, tmp_path: Path) -> None:
    torch.save(make(module.state_dict()), tmp_path / "run.pt")
    with pytest.raises(SourceError, match="holds several state dicts that fit the module") as caught:
        read_weights(tmp_path / "run.pt", module.state_dict().keys())
    assert names in str(caught.value)


def test_weights_that_nearly_fit_are_returned_for_the_list_of_differences(module: nn.Module, tmp_path: Path) -> None:
    weights = module.state_dict()
    del weights["1.bias"]
    torch.save({"model": prefixed("module.", weights), "ema": {"0.weight": torch.zeros(7, 4)}}, tmp_path / "run.pt")
    assert read_weights(tmp_path / "run.pt", module.state_dict().keys()).keys() == weights.keys()


@pytest.mark.parametrize("content", [[1, 2], {}, {"step": 3}, torch.zeros(2)])
def test_file_without_weights_is_refused(content: Any, module: nn.Module, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "run.pt")
    with pytest.raises(SourceError, match="does not hold a state dict"):
        read_weights(tmp_path / "run.pt", module.state_dict().keys())


@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
def test_file_that_is_no_such_file_is_refused(name: str, module: nn.Module, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x00" * 64)
    with pytest.raises(SourceError, match=name):
        read_weights(tmp_path / name, module.state_dict().keys())
