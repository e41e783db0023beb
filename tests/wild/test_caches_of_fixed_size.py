"""Models with caches of a fixed number of rows and positions, of which attention reads the whole, mask included."""

from __future__ import annotations

import math
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from support.handwritten_case import BLOCK, VOCABULARY
from tiny import WIDTH, TinyDecoder

from tformer_export import causal, export, positions
from tformer_runtime import InputError, Model, UnsupportedModelError

HEADS, KV_HEADS, SIZE = 4, 2, 8


class Cache(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.register_buffer("k", torch.zeros(rows, KV_HEADS, BLOCK, SIZE))
        self.register_buffer("v", torch.zeros(rows, KV_HEADS, BLOCK, SIZE))

    def update(self, where, k, v):
        k_out, v_out = self.k, self.v
        k_out[:, :, where] = k
        v_out[:, :, where] = v
        return k_out, v_out


class Decoder(TinyDecoder):
    def __init__(self, rows):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, 2 * KV_HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.register_buffer("causal_mask", torch.tril(torch.ones(BLOCK, BLOCK, dtype=torch.bool)))
        self.set_caches(rows)

    def parts(self, x):
        k, v = self.kv(x).split(KV_HEADS * SIZE, -1)
        return (part.view(*x.shape[:2], -1, SIZE) for part in (self.q(x), k, v))

    def rest(self, x, mixed):
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(*x.shape[:2], -1))
        return self.head(self.final_norm(x + self.feed_forward(self.norm(x))))


class WithBuffers(Decoder):
    """PyTorch's own fast Llama: a buffer that is written by position and read whole, and rows of a square mask."""

    masks = MappingProxyType({"input_pos": positions("idx", shape=("time",))})

    def set_caches(self, rows):
        self.cache = Cache(rows)

    @property
    def caches(self):
        return [self.cache.k, self.cache.v]

    def forward(self, idx, input_pos):
        x = self.tokens(idx) + self.positions(input_pos)
        q, k, v = (part.transpose(1, 2) for part in self.parts(self.norm(x)))
        k, v = self.cache.update(input_pos, k, v)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        mask = self.causal_mask[None, None, input_pos]
        return self.rest(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0))

    def call(self, idx):
        return self(idx, torch.arange(idx.shape[1]))


class AsArguments(Decoder):
    """Caches, positions to write and a mask over the whole cache as arguments of forward."""

    masks = MappingProxyType(
        {
            "input_positions": positions("idx", shape=("time",)),
            "kv_write_indices": positions("idx", shape=("time",)),
            "mask": causal("idx", keep="additive", shape=(1, 1, "time", BLOCK)),
        }
    )

    def set_caches(self, rows):
        self.caches = tuple(torch.zeros(rows, BLOCK, KV_HEADS, SIZE) for _ in range(2))

    def forward(self, idx, input_positions, kv_write_indices, kv_caches, mask):
        x = self.tokens(idx) + self.positions(input_positions)
        q, k, v = self.parts(self.norm(x))
        k_cache, v_cache = kv_caches[0]
        key = k_cache.index_copy_(1, kv_write_indices, k)
        value = v_cache.index_copy_(1, kv_write_indices, v)
        key, value = (torch.repeat_interleave(part, HEADS // KV_HEADS, dim=2) for part in (key, value))
        q, key, value = (part.transpose(1, 2) for part in (q, key, value))
        scores = torch.matmul(q, key.transpose(2, 3)) / math.sqrt(SIZE) + mask
        return self.rest(x, torch.softmax(scores.float(), -1) @ value)

    def call(self, idx):
        mask = torch.full((BLOCK, BLOCK), float("-inf")).triu(1)[: idx.shape[1]]
        where = torch.arange(idx.shape[1])
        return self(idx, where, where, [self.caches], mask[None, None])


@pytest.fixture(params=[WithBuffers, AsArguments])
def module(request):
    torch.manual_seed(3)
    module = request.param(2).eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.4)
    return module


def exported(module, path):
    fixed = {"kv_caches": [module.caches]} if isinstance(module, AsArguments) else {}
    example = {"idx": torch.tensor([[3, 4, 5], [6, 7, 8]])}
    return export(module, path, example=example, step_input="idx", masks=module.masks, fixed_arguments=fixed)


def test_each_request_decodes_as_the_module_does_alone(module, tmp_path):
    report = exported(module, tmp_path / "model.onnx")
    assert report.counts["fused"] == 1
    assert report.max_length == BLOCK
    assert not any(cache.any() for cache in module.caches), "the export has written into the caches"
    rows = [np.random.default_rng(seed).integers(3, VOCABULARY, n) for seed, n in enumerate((7, 1, 4))]
    results = Model.load(tmp_path / "model.onnx", "cpu").generate_batch(rows, max_new_tokens=12)
    module.set_caches(1)
    expected = []
    for row in rows:
        tokens = [*row]
        with torch.no_grad():
            for _ in range(12):
                tokens.append(int(module.call(torch.tensor([tokens]))[0, -1].argmax()))
        expected.append(tokens[len(row) :])
    assert [[*map(int, result.token_ids)] for result in results] == expected
    assert len({token for row in expected for token in row}) > 6


def test_room_of_the_caches_is_the_longest_sequence(module, tmp_path):
    exported(module, tmp_path / "model.onnx")
    model = Model.load(tmp_path / "model.onnx", "cpu")
    model.generate(np.full(BLOCK - 1, 5), max_new_tokens=1)
    with pytest.raises(InputError, match=str(BLOCK)):
        model.generate(np.full(BLOCK + 1, 5), max_new_tokens=1)


class WithoutMask(WithBuffers):
    """Attends to the zeros of the room that nothing was written to."""

    def forward(self, idx, input_pos):
        x = self.tokens(idx) + self.positions(input_pos)
        q, k, v = (part.transpose(1, 2) for part in self.parts(self.norm(x)))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in self.cache.update(input_pos, k, v))
        return self.rest(x, F.scaled_dot_product_attention(q, k, v))


def test_room_that_attention_sees_is_not_left_out(tmp_path):
    with pytest.raises(UnsupportedModelError):
        exported(WithoutMask(2).eval(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
