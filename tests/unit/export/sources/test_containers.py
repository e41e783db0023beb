"""Arguments of forward that hold several tensors: a module gets them as it does from its own caller."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn

from tformer_export import padding
from tformer_export.sources.torch_module import from_module
from tformer_runtime import SourceError

IDS, OTHERS = torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([[1, 2], [3, 1]])
Pair = namedtuple("Pair", "src tgt")


@dataclasses.dataclass
class Batch:
    src: torch.Tensor
    tgt: torch.Tensor
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    src: torch.Tensor
    tgt: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    src: torch.Tensor
    tgt: torch.Tensor


class Model(nn.Module):
    """Logits (batch, time, 10) of the target ids and the mean of the source ids. read: src and tgt of the argument."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.read = nn.Embedding(10, 10), read

    def forward(self, batch, weight=1.0):
        src, tgt = self.read(batch)
        return self.embed(tgt) + self.embed(src).mean(1, keepdim=True) * getattr(batch, "scale", weight)


def keys(batch):
    return batch["src"], batch["tgt"]


def attributes(batch):
    return batch.src, batch.tgt


@pytest.mark.parametrize(
    ("container", "read", "names"),
    [
        ({"src": OTHERS, "tgt": IDS}, keys, ["src", "tgt"]),
        (UserDict(src=OTHERS, tgt=IDS, note="text"), keys, ["src", "tgt"]),
        (MappingProxyType({"src": OTHERS, "tgt": IDS}), keys, ["src", "tgt"]),
        ((OTHERS, IDS), tuple, ["batch.0", "batch.1"]),
        ([OTHERS, IDS, None], lambda batch: batch[:2], ["batch.0", "batch.1"]),
        (Pair(OTHERS, IDS), attributes, ["src", "tgt"]),
        (Batch(OTHERS, IDS), attributes, ["src", "tgt"]),
        (Frozen(OTHERS, IDS), attributes, ["src", "tgt"]),
        (Slots(OTHERS, IDS), attributes, ["src", "tgt"]),
        (SimpleNamespace(src=OTHERS, tgt=IDS), attributes, ["src", "tgt"]),
        ({"a": {"x": OTHERS}, "b": {"x": IDS}}, lambda b: (b["a"]["x"], b["b"]["x"]), ["batch.a.x", "batch.b.x"]),
        ({"weight": OTHERS, "tgt": IDS}, lambda b: (b["weight"], b["tgt"]), ["batch.weight", "tgt"]),
    ],
)  # fmt: skip
def test_values_of_a_container_are_inputs_by_name(container, read, names):
    """New values reach the module in a container of the same type, and the example stays as it is."""
    model = Model(read)
    source = from_module(model, {"batch": container}, names[1])
    assert list(source.example) == names
    src, tgt = torch.tensor([[9, 8, 7, 6]]), torch.tensor([[1, 2]])
    scale = getattr(container, "scale", 1.0)
    with torch.no_grad():
        expected = model.embed(tgt) + model.embed(src).mean(1, keepdim=True) * scale
        assert torch.equal(source.module(src, tgt), expected)
        assert torch.equal(source.module(OTHERS, IDS), model(container))
    assert source.users_module is model


class Masked(Model):
    def forward(self, batch):
        keep = batch["mask"].unsqueeze(-1)
        mean = (self.embed(batch["src"]) * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
        return self.embed(batch["tgt"]) + mean


def test_mask_in_a_container_is_described_by_its_name():
    model = Masked(keys)
    batch = {"src": OTHERS, "tgt": IDS, "mask": torch.ones(2, 2)}
    masks = {"mask": padding("src", dtype=torch.float32)}
    source = from_module(model, {"batch": batch}, "tgt", masks=masks)
    assert list(source.example) == ["src", "tgt", "src.keep"]
    keep = torch.tensor([[True, False], [True, True]])
    with torch.no_grad():
        padded = source.module(OTHERS, IDS, keep)[:1]
        alone = source.module(OTHERS[:1, :1], IDS[:1], keep[:1, :1])
    torch.testing.assert_close(padded, alone)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"src": OTHERS, "tgt": IDS, "mask": torch.ones(2, 2)}, "the example of 'mask' looks like a mask"),
        ({"sizes": (2, 3)}, "the example of 'batch' must be a tensor"),
    ],
)
def test_container_without_inputs_or_with_a_mask_is_refused(batch, message):
    with pytest.raises(SourceError, match=message):
        from_module(Masked(keys), {"batch": batch}, "tgt")
