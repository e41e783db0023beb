"""A table that forward makes again when it needs a longer one is no limit of the file."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tformer_export import export
from tformer_export.soundness.size_branches import runs_beyond
from tformer_export.sources.torch_module import from_module
from tformer_export.trace.captured_model import capture_model
from tformer_runtime import UnsupportedModelError
from tformer_runtime.format.manifest import SpecialTokens

EXAMPLE = 7  # longer than the sequences of a trace
TABLE = 32  # rows


class Tables(dict):
    """A dictionary that the layers of a model share."""


class Holder:
    """An object that is not a module."""


class Decoder(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.tokens, self.qkv, self.head = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 20)
        self.place = place

    def table(self, time):
        known = self.place.get("table") if isinstance(self.place, dict) else getattr(self.place, "table", None)
        if known is None or known.shape[-1] < time:
            known = torch.full((time, time), float("-inf")).triu(1)
            if isinstance(self.place, dict):
                self.place["table"] = known
            else:
                self.place.table = known
        return known[:time, :time]

    def forward(self, ids):
        q, k, v = self.qkv(self.tokens(ids)).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, self.table(ids.shape[1])))


@pytest.mark.parametrize("place", [dict, Tables, Holder])
@pytest.mark.parametrize("called_before", [0, 20])
def test_table_of_an_earlier_run_is_no_limit(place, called_before, tmp_path):
    torch.manual_seed(0)
    module = Decoder(place()).eval()
    if called_before:
        module(torch.zeros(1, called_before, dtype=torch.int64))
    example = {"ids": torch.randint(20, (2, EXAMPLE))}
    report = export(module, tmp_path / "model.onnx", example, "ids", max_length=64)
    assert report.max_length == 64
    known = module.place.get("table") if isinstance(module.place, dict) else getattr(module.place, "table", None)
    assert (0 if known is None else len(known)) == called_before, "the export has changed the user's module"
    assert known is None or type(known) is torch.Tensor


class Bounded(Decoder):
    def table(self, time):
        return torch.full((24, 24), float("-inf")).triu(1)[:time, :time]


def test_table_that_stays_is_a_limit(tmp_path):
    example = {"ids": torch.randint(20, (2, EXAMPLE))}
    report = export(Bounded({}).eval(), tmp_path / "model.onnx", example, "ids")
    assert report.max_length == 24
    line = "torch.full((24, 24)"
    assert re.fullmatch(rf"24, limited by .*test_growing_tables\.py:\d+: .*{re.escape(line)}.*", row_of_maximum(report))


class AnotherPath(Decoder):
    def forward(self, ids):
        return super().forward(ids) * (2 if ids.shape[1] > 24 else 1)

    def table(self, time):
        return torch.full((time, time), float("-inf")).triu(1)


def test_longer_than_a_branch_allows_is_refused_with_its_line(tmp_path):
    example = {"ids": torch.randint(20, (2, EXAMPLE))}
    with pytest.raises(UnsupportedModelError, match=r"at a length of 64: at most 24 is possible, by .*shape\[1\] > 24"):
        export(AnotherPath({}).eval(), tmp_path / "model.onnx", example, "ids", max_length=64)


class CountedPositions(Decoder):
    """Positions are those among the ids that are not padding. An adapter runs for the rows of its language."""

    def __init__(self):
        super().__init__({})
        self.positions, self.adapter = nn.Embedding(TABLE, 8), nn.Linear(8, 8)

    def forward(self, ids):
        keep, own_language = ids != 0, torch.ones(len(ids)) == 1
        x = self.tokens(ids) + self.positions(keep.cumsum(1) * keep)
        adapted = torch.zeros_like(x)
        adapted[own_language] = self.adapter(x[own_language])
        q, k, v = self.qkv(x + adapted).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_padding_makes_a_table_of_counted_positions_no_longer(tmp_path):
    example = {"ids": torch.tensor([[1, 12, 0, 3], [14, 5, 0, 0]])}
    torch.manual_seed(0)
    module = CountedPositions().eval()
    with pytest.raises(IndexError):
        module(torch.ones(1, TABLE, dtype=torch.int64))
    source = from_module(module, example, "ids", special_tokens=SpecialTokens(pad_token_id=0))
    graph = capture_model(source).graph
    assert graph.time_limit == TABLE - 1
    assert not runs_beyond(graph, source), "the padding of an example counts as room"
    assert export(source, tmp_path / "model.onnx").max_length == TABLE - 1


class Undeclared(CountedPositions):
    """Its padding is not declared, so no table of the file ends where that of the positions does."""

    def forward(self, ids):
        keep = ids != 0
        return self.head(self.tokens(ids) + self.positions(keep.cumsum(1) * keep))


def test_table_of_positions_that_data_count_is_a_limit(tmp_path):
    example = {"ids": torch.tensor([[1, 12, 0, 3], [14, 5, 0, 0]])}
    torch.manual_seed(0)
    report = export(Undeclared().eval(), tmp_path / "model.onnx", example, "ids")
    assert report.max_length == TABLE - 1
    assert re.fullmatch(rf"{TABLE - 1}, limited by .*self\.positions.*", row_of_maximum(report))
    with pytest.raises(UnsupportedModelError, match=rf"at a length of {TABLE}: at most {TABLE - 1} is possible, by .*"):
        export(Undeclared().eval(), tmp_path / "longer.onnx", example, "ids", max_length=TABLE)


def row_of_maximum(report):
    return dict(report.rows())["maximum length"]
