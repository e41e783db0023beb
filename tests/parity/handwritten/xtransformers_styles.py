"""Code that no one here wrote: lucidrains' x-transformers, over its options."""

from __future__ import annotations

from typing import Any

import torch
from catalogue import BLOCK, PAD, VOCABULARY, Case
from torch import nn
from x_transformers import Decoder, Encoder, TransformerWrapper, XTransformer

INPUTS = ("x",)


def wrapper(wrapping: dict[str, Any] | None = None, **options: Any):
    """A decoder of two layers: `wrapping` goes to TransformerWrapper, the rest to its attention layers."""
    layers = {"dim": 24, "depth": 2, "heads": 3, "attn_dim_head": 8, **options}
    outside = {"num_tokens": VOCABULARY, "max_seq_len": BLOCK, **(wrapping or {})}
    return lambda: TransformerWrapper(**outside, attn_layers=Decoder(**layers))


class Pair(nn.Module):
    """XTransformer's encoder and decoder without its loss: the decoder's own network, called with the context."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = XTransformer(
            dim=24, tie_token_emb=True, enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=3, enc_attn_dim_head=8,
            enc_max_seq_len=BLOCK, dec_num_tokens=VOCABULARY, dec_depth=2, dec_heads=3, dec_attn_dim_head=8,
            dec_max_seq_len=BLOCK, **options,
        )  # fmt: skip

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        mask = src != PAD
        memory = self.model.encoder(src, mask=mask, return_embeddings=True)
        return self.model.decoder.net(tgt, context=memory, context_mask=mask)


class EncoderAndDecoder(nn.Module):
    """Two TransformerWrappers, the second with cross-attention and rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        layers = {"dim": 24, "depth": 1, "heads": 3, "attn_dim_head": 8, "rotary_pos_emb": True, "use_rmsnorm": True}
        self.enc = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=BLOCK, attn_layers=Encoder(**layers))
        self.dec = TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=BLOCK, attn_layers=Decoder(**layers, cross_attend=True, ff_glu=True)
        )

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        mask = src.ne(PAD)
        return self.dec(tgt, context=self.enc(src, mask=mask, return_embeddings=True), context_mask=mask)


def x(name: str, *wrapping: dict[str, Any], **options: Any) -> Case:
    return Case(f"x-{name}", wrapper(*wrapping, **options), INPUTS)


CASES = [
    x("default"),
    x("flash", attn_flash=True),
    x("rotary", rotary_pos_emb=True),
    x("rotary-xpos", rotary_xpos=True),
    x("alibi", alibi_pos_bias=True, alibi_num_heads=2),
    x("alibi-flash", alibi_pos_bias=True, attn_flash=True),
    x("t5", rel_pos_bias=True),
    x("dynamic-pos-bias", dynamic_pos_bias=True),
    x("kv-heads", attn_kv_heads=1),
    x("one-kv-head-flash", attn_one_kv_head=True, attn_flash=True),
    x("rmsnorm-glu", use_rmsnorm=True, ff_glu=True, ff_swish=True),
    x("scalenorm-relu-squared", use_scalenorm=True, ff_relu_squared=True),
    x("sandwich-norm", sandwich_norm=True),
    x("macaron", macaron=True),
    x("residual-attn", residual_attn=True),
    x("resi-dual", resi_dual=True),
    x("pre-norm-off", pre_norm=False),
    x("qk-norm", attn_qk_norm=True),
    x("qk-norm-dim-scale", attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    x("talking-heads", attn_pre_talking_heads=True, attn_post_talking_heads=True),
    x("sparse-topk", attn_sparse_topk=3),
    x("mem-kv", attn_num_mem_kv=2),
    x("memory-tokens", {"num_memory_tokens": 2}),
    x("shift-tokens", shift_tokens=1),
    x("gate-values", attn_gate_values=True),
    x("on-attn", attn_on_attn=True),
    x("softclamp", attn_softclamp_logits=True),
    x("selective", attn_selective=True),
    x("zero-start", attn_add_zero_kv=True),
    x("value-residual", attn_add_value_residual=True),
    x("hyper", num_residual_streams=2),
    x("sinusoidal-tied", {"scaled_sinu_pos_emb": True, "tie_embedding": True, "emb_frac_gradient": 0.1}),
    x("no-positions", {"use_abs_pos_emb": False}),
    x("post-emb-norm", {"post_emb_norm": True, "emb_dim": 12}),
    x("gate-residual", gate_residual=True),
    x("scale-residual", scale_residual=True),
    x("laser", attn_laser=True),
    x("differential", attn_qkv_receive_diff_residuals=False, attn_value_dim_head=12),
    x("polar", polar_pos_emb=True),
    x("sigsoftmax", attn_sigsoftmax=True),
    Case("x-XTransformer", Pair, ("src", "tgt")),
    Case("x-XTransformer-flash-t5", lambda: Pair(enc_attn_flash=True, dec_attn_flash=True), ("src", "tgt")),
    Case("x-encoder-and-decoder", EncoderAndDecoder, ("src", "tgt")),
]
