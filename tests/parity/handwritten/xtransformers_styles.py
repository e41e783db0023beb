"""Cases of a third-party library: lucidrains' x-transformers with many of its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from loguru import logger
from support.handwritten_case import BLOCK, PAD, VOCABULARY, Case
from torch import nn
from x_transformers import Decoder, Encoder, TransformerWrapper, XTransformer

logger.disable("x_transformers")  # it logs advice on head sizes
LAYERS: dict[str, Any] = {"dim": 24, "heads": 3, "attn_dim_head": 8}
WRAPPER: dict[str, Any] = {"num_tokens": VOCABULARY, "max_seq_len": BLOCK}


class Pair(nn.Module):
    """XTransformer's encoder and the network of its decoder, without the loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_tokens": VOCABULARY, "depth": 1, "heads": 3, "attn_dim_head": 8, "max_seq_len": BLOCK}
        sizes = {f"{side}_{name}": size for side in ("enc", "dec") for name, size in sizes.items()}
        self.model = XTransformer(dim=24, tie_token_emb=True, **sizes)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        mask = src != PAD
        memory = self.model.encoder(src, mask=mask, return_embeddings=True)
        return self.model.decoder.net(tgt, context=memory, context_mask=mask)


class EncoderAndDecoder(nn.Module):
    """Two TransformerWrappers, the second with cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        layers = {**LAYERS, "depth": 1, "rotary_pos_emb": True, "use_rmsnorm": True}
        self.enc = TransformerWrapper(**WRAPPER, attn_layers=Encoder(**layers))
        self.dec = TransformerWrapper(**WRAPPER, attn_layers=Decoder(**layers, cross_attend=True, ff_glu=True))

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        mask = src.ne(PAD)
        return self.dec(tgt, context=self.enc(src, mask=mask, return_embeddings=True), context_mask=mask)


def decoder(options: dict[str, Any], wrapping: Mapping[str, Any] | None = None, depth: int = 1) -> nn.Module:
    """Return a decoder. options: of the attention layers. wrapping: options of TransformerWrapper."""
    layers = Decoder(**{**LAYERS, "depth": depth, **options})
    return TransformerWrapper(**{**WRAPPER, **(wrapping or {})}, attn_layers=layers)


def x(name: str, wrapping: Mapping[str, Any] | None = None, depth: int = 1, **options: Any) -> Case:
    case = {field: options.pop(field) for field in ("exports_file", "known_failure", "refusal") if field in options}
    return Case(f"x-{name}", lambda: decoder(options, wrapping, depth), ("x",), **case)


CASES = [
    x("default", depth=2),
    x("rotary-glu-kv-heads-flash", depth=2, exports_file=True, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True,
      ff_swish=True, attn_kv_heads=1, attn_flash=True),
    x("rotary", rotary_pos_emb=True, attn_one_kv_head=True),
    x("polar", polar_pos_emb=True),
    x("qk-norm", attn_qk_norm=True, attn_qk_norm_dim_scale=True, attn_softclamp_logits=True),
    x("qk-norm-flash", attn_qk_norm=True, attn_flash=True, sandwich_norm=True),
    x("talking-heads", attn_pre_talking_heads=True, attn_post_talking_heads=True, attn_gate_values=True),
    x("macaron", macaron=True, use_scalenorm=True, ff_relu_squared=True),
    x("residual-attn", depth=2, residual_attn=True, scale_residual=True),
    x("post-norm-gates", pre_norm=False, gate_residual=True, attn_on_attn=True, attn_laser=True),
    x("sinusoidal-tied", {"scaled_sinu_pos_emb": True, "tie_embedding": True, "emb_frac_gradient": 0.1}),
    x("no-positions", {"use_abs_pos_emb": False, "post_emb_norm": True, "emb_dim": 12}),
    x("alibi", alibi_pos_bias=True, alibi_num_heads=2),
    x("t5", rel_pos_bias=True),
    x("dynamic-pos-bias", dynamic_pos_bias=True),
    x("mem-kv", attn_num_mem_kv=2),
    x("memory-tokens", {"num_memory_tokens": 2}),
    x("shift-tokens", shift_tokens=1),
    # Positions are counted from the middle of the sequence.
    x("xpos", rotary_xpos=True),
    Case("x-XTransformer", Pair, ("src", "tgt")),
    Case("x-encoder-and-decoder", EncoderAndDecoder, ("src", "tgt")),
]  # fmt: skip
