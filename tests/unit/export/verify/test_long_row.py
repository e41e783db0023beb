"""A single-pass model is compared on a row as long as its file promises, so that what begins at a length is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tformer_export import export
from tformer_export.verify import long_row
from tformer_export.verify.torch_reference import Reference
from tformer_runtime import Model, ParityError, UnsupportedModelError

IDS = torch.tensor([[3, 4, 5, 6, 7], [6, 7, 8, 9, 10]])
BEGIN = 100  # positions after which a model does something else


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 3)

    def forward(self, ids):
        return self.out(self.change(self.embed(ids), ids))

    def change(self, x, ids):
        return x


class ChangesFar(Encoder):
    """Only positions far from the beginning are changed, which no condition on a size says."""

    def change(self, x, ids):
        far = (torch.ones_like(ids).cumsum(1) > BEGIN).float()
        return x * (1 + far[..., None])


class EndsFar(Encoder):
    """A table that is looked up by a number of the data, and ends before UNLIMITED_LENGTH."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(long_row.UNLIMITED_LENGTH - 1))

    def change(self, x, ids):
        return x + self.table[ids.cumsum(1) * 0 + ids.shape[1] - 1][..., None]


class Placed(Encoder):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(64, 8)

    def change(self, x, ids):
        return x + self.places(torch.arange(ids.shape[1]))


@pytest.fixture
def lengths(monkeypatch):
    """Return the lengths of the rows on which a module runs."""
    seen = []
    forward = Encoder.forward

    def watched(self, ids):
        if type(ids) is torch.Tensor:
            seen.append(ids.shape[1])
        return forward(self, ids)

    monkeypatch.setattr(Encoder, "forward", watched)
    return seen


@pytest.mark.parametrize(("module", "longest"), [(Encoder, long_row.UNLIMITED_LENGTH), (Placed, 64)])
def test_row_of_the_greatest_length_is_compared(module, longest, lengths, tmp_path):
    report = export(module().eval(), tmp_path / "model.onnx", {"ids": IDS})
    assert "a long row" in report.parity.errors
    assert max(lengths) == longest


def test_costly_row_is_shortened(lengths, monkeypatch, tmp_path):
    monkeypatch.setattr(long_row, "MAX_NUMBERS", 8 * 200)
    export(Encoder().eval(), tmp_path / "model.onnx", {"ids": IDS})
    assert 100 < max(length for length in lengths if length != 512) <= 200


def test_change_that_begins_at_a_length_is_compared(tmp_path):
    path, module = tmp_path / "model.onnx", ChangesFar().eval()
    assert export(module, path, {"ids": IDS}).parity.errors["a long row"] < 1e-5
    ids = torch.randint(12, (1, 150), generator=torch.Generator().manual_seed(0))
    (result,) = Model.load(path, threads=1).predict([ids[0].numpy()])
    torch.testing.assert_close(torch.from_numpy(result), module(ids)[0].detach())


def test_difference_that_begins_at_a_length_is_refused(monkeypatch, tmp_path):
    """The model is another one for long rows, which the trace does not see."""
    outputs, changed = Reference.outputs, ChangesFar().eval()

    def of_another(self, requests, tokens, left_out=()):
        if len(requests["ids"]) < BEGIN:
            return outputs(self, requests, tokens, left_out)
        return [changed(torch.from_numpy(requests["ids"])[None])[0].detach().numpy()]

    monkeypatch.setattr(Reference, "outputs", of_another)
    with pytest.raises(ParityError, match="in the case 'a long row'"):
        export(Encoder().eval(), tmp_path / "model.onnx", {"ids": IDS})
    assert not list(tmp_path.iterdir())


def test_table_that_ends_unseen_is_refused_with_the_option_that_ends_the_rows_before(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"ids \(1, 500\).*set the greatest length of the file"):
        export(EndsFar().eval(), tmp_path / "model.onnx", {"ids": IDS})
    report = export(EndsFar().eval(), tmp_path / "model.onnx", {"ids": IDS}, max_length=300)
    assert report.input_limits == {"ids": 300}
