"""Models that loop over the rows of a batch in Python to bring images and masks to one size export unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from tiny import WIDTH

from tformer_export import export
from tformer_runtime import Model

SIZE, PATCH, HEADS, CLASSES, VOCABULARY = 16, 4, 2, 5, 23
# At most ten layers, each with sums of at most 48 products, and float32 rounds each partial sum by 2⁻²⁴ of its value.
TOLERANCE = 10 * 48 * 2.0**-24


def in_one_batch(images):
    """Return images of several sizes in one tensor, and a mask that is True at its padding."""
    size = [max(axis) for axis in zip(*(list(image.shape) for image in images), strict=True)]
    batch = torch.zeros([len(images), *size])
    hidden = torch.ones(len(images), *size[1:], dtype=torch.bool)
    for image, into, mask in zip(images, batch, hidden, strict=True):
        into[: image.shape[0], : image.shape[1], : image.shape[2]].copy_(image)
        mask[: image.shape[1], : image.shape[2]] = False
    return batch, hidden


class Detector(nn.Module):
    """Queries that attend to patches, with positions that follow from the mask. Time comes first."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.encoder = nn.MultiheadAttention(WIDTH, HEADS)
        self.decoder = nn.MultiheadAttention(WIDTH, HEADS)
        self.queries = nn.Embedding(3, WIDTH)
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        batch, hidden = in_one_batch(images)
        patches = self.patches(batch)
        hidden = F.interpolate(hidden[None].float(), size=patches.shape[-2:]).to(torch.bool)[0]
        rows = (~hidden).cumsum(1, dtype=torch.float32).flatten(1).T[..., None]
        patches = patches.flatten(2).permute(2, 0, 1)
        keys = patches + (rows * torch.arange(WIDTH)).sin()
        memory = patches + self.encoder(keys, keys, patches, key_padding_mask=hidden.flatten(1))[0]
        queries = self.queries.weight.unsqueeze(1).repeat(1, len(images), 1)
        found = self.decoder(queries, memory, memory, key_padding_mask=hidden.flatten(1))[0]
        return self.leave(found).transpose(0, 1)


class AskedDetector(Detector):
    """The same, with attention by `F.scaled_dot_product_attention` for the queries."""

    def forward(self, images):
        batch, hidden = in_one_batch(images)
        patches = self.patches(batch).flatten(2).transpose(1, 2)
        visible = ~F.interpolate(hidden[None].float(), scale_factor=1 / PATCH)[0].to(torch.bool).flatten(1)
        queries = self.queries.weight.expand(len(images), -1, -1)
        return self.leave(F.scaled_dot_product_attention(queries, patches, patches, visible[:, None]))


@pytest.mark.parametrize("build", [Detector, AskedDetector])
def test_images_that_a_loop_brings_to_one_size(build: type[Detector], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build().eval()
    images = torch.randn(4, 3, SIZE, SIZE)
    export(model, tmp_path / "model.onnx", {"images": images[:2]}, axes={"images": (0,)})
    results = Model.load(tmp_path / "model.onnx", "cpu").predict([*images.numpy()], batch_size=3)
    actual = np.stack([np.asarray(result) for result in results])
    with torch.no_grad():
        expected = torch.cat([model(image[None]) for image in images]).numpy()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.ptp(expected))
