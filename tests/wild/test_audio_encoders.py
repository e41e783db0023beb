"""Encoders of spectrograms in the styles of published code: subsampling, masks of lengths, padding that is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
from tiny import WIDTH, Attention

from tformer_export import export, lengths, padding
from tformer_runtime import Model, ParityError

MELS, LEAST = 11, 7  # frames for one result
# At most ten layers, each with sums of at most 60 products, and float32 rounds each partial sum by 2⁻²⁴ of its value.
TOLERANCE = 10 * 60 * 2.0**-24


class Subsampled(nn.Module):
    """Two convolutions of stride 2 make one position of four frames. The mask is shortened by slices."""

    leaks = False

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, WIDTH, 3, 2), nn.Conv2d(WIDTH, WIDTH, 3, 2)
        self.enter = nn.Linear(WIDTH * 2, WIDTH)
        self.attention = Attention()
        self.near = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)

    def forward(self, x, counts):
        valid = (torch.arange(x.shape[1])[None] < counts[:, None])[:, None]
        x = self.second(self.first(x.unsqueeze(1)).relu()).relu()
        x = self.enter(x.transpose(1, 2).flatten(2))
        valid = valid[:, :, 2::2][:, :, 2::2]
        x = x + self.attention(x, ~valid[:, None])
        hidden = ~valid.transpose(1, 2)
        return x + self.near((x if self.leaks else x.masked_fill(hidden, 0.0)).transpose(1, 2)).transpose(1, 2)


class Leaking(Subsampled):
    """The convolution after the attention reads padding, so a row has another result next to a longer one."""

    leaks = True


class LeakingMask(Leaking):
    """The same with a mask in place of lengths."""

    def forward(self, x, keep):
        return super().forward(x, keep.sum(1))


@pytest.mark.parametrize(("build", "ragged"), [(Subsampled, True), (Leaking, False)])
def test_shortened_spectrograms(build: type[Subsampled], ragged: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build().eval()
    path = tmp_path / "model.onnx"
    export(model, path, {"x": torch.randn(2, 29, MELS)}, masks={"counts": lengths("x")})
    file = Model.load(path, "cpu", threads=1)
    assert file.manifest.encode is not None
    assert file.manifest.encode.ragged == ragged
    frames = [torch.randn(length, MELS) for length in (LEAST, 30, 17, 30, 16, 8)]
    results = [np.asarray(result) for result in file.predict([one.numpy() for one in frames], batch_size=6)]
    for one, result in zip(frames, results, strict=True):
        with torch.no_grad():
            expected = model(one[None], torch.tensor([len(one)]))[0].numpy()
        np.testing.assert_allclose(result, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


def test_mask_that_hides_too_little_is_refused(tmp_path: Path) -> None:
    """A mask may be described the wrong way round, which shows only next to a longer row."""
    torch.manual_seed(0)
    arguments = {"example": {"x": torch.randn(2, 29, MELS)}, "masks": {"keep": padding("x")}}
    with pytest.raises(ParityError, match="forward does not hide padding with it everywhere"):
        export(LeakingMask().eval(), tmp_path / "model.onnx", **arguments)
