"""Decoders whose state is attention, over all positions or in windows."""

from __future__ import annotations

from typing import Any

from torch import nn

from wild_packages.entry import VOCABULARY, Entry, ids

V = VOCABULARY


def x_transformer() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, attn_kv_heads=2, rotary_pos_emb=True, ff_glu=True)
    return TransformerWrapper(num_tokens=V, max_seq_len=64, attn_layers=layers)


def x_alibi() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=16, alibi_pos_bias=True, shift_tokens=1)
    return TransformerWrapper(num_tokens=V, max_seq_len=64, use_abs_pos_emb=False, attn_layers=layers)


def tune_llama() -> nn.Module:
    from torchtune.models.llama3 import llama3

    return llama3(V, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=64, intermediate_dim=48)


def tune_gemma() -> nn.Module:
    from torchtune.models.gemma2 import gemma2

    return gemma2(
        V, num_layers=2, num_heads=4, head_dim=16, num_kv_heads=2, embed_dim=64, intermediate_dim=48, max_seq_len=64,
        sliding_window_size=6,
    )  # fmt: skip


def lit(**fields: Any) -> nn.Module:
    from litgpt import GPT, Config

    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": 64, "padded_vocab_size": V, "vocab_size": V}
    return GPT(Config(name="tiny", **sizes | fields))


def lit_llama() -> nn.Module:
    return lit(
        n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=48,
    )  # fmt: skip


def lit_gemma() -> nn.Module:
    return lit(
        n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="GemmaMLP", gelu_approximate="tanh", intermediate_size=48, sliding_window_size=6,
        sliding_window_indices=[0, 1], attention_logit_softcapping=50.0, final_logit_softcapping=30.0,
        post_attention_norm=True, post_mlp_norm=True, scale_embeddings=True, attention_scores_scalar=16,
    )  # fmt: skip


def lit_experts() -> nn.Module:
    return lit(
        n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMoE", intermediate_size=48, n_expert=4, n_expert_per_token=2,
    )  # fmt: skip


def palm() -> nn.Module:
    from palm_rlhf_pytorch import PaLM

    return PaLM(num_tokens=V, dim=32, depth=2, heads=4, dim_head=16)


def local() -> nn.Module:
    from local_attention import LocalTransformer

    return LocalTransformer(
        num_tokens=V, dim=32, depth=2, heads=4, dim_head=16, max_seq_len=64, local_attn_window_size=4
    )


def local_bias() -> nn.Module:
    from local_attention import LocalTransformer

    return LocalTransformer(
        num_tokens=V, dim=32, depth=2, heads=4, dim_head=16, max_seq_len=64, local_attn_window_size=4,
        use_dynamic_pos_bias=True, num_residual_streams=1,
    )  # fmt: skip


def gate_loop() -> nn.Module:
    from gateloop_transformer import Transformer

    return Transformer(num_tokens=V, dim=32, depth=2, heads=4, dim_head=16, use_gate_looped_attn=False)


def speech_brain() -> nn.Module:
    from speechbrain.lobes.models.transformer.TransformerLM import TransformerLM

    return TransformerLM(V, d_model=32, nhead=4, num_encoder_layers=2, d_ffn=48, causal=True, max_length=64)


def megabyte() -> nn.Module:
    from MEGABYTE_pytorch import MEGABYTE

    return MEGABYTE(num_tokens=V, dim=(32, 16), depth=(1, 1), max_seq_len=(16, 4), dim_head=8, heads=4)


def efficient() -> nn.Module:
    from memory_efficient_attention_pytorch.transformer import Transformer

    return Transformer(num_tokens=V, max_seq_len=64, dim=32, depth=2, heads=4, dim_head=16, causal=True)


def routing() -> nn.Module:
    from routing_transformer import RoutingTransformerLM

    return RoutingTransformerLM(num_tokens=V, dim=32, depth=2, max_seq_len=64, heads=4, window_size=8, causal=True)


def torchscale_decoder() -> nn.Module:
    from torchscale.architecture.config import DecoderConfig
    from torchscale.architecture.decoder import Decoder

    config = DecoderConfig(
        vocab_size=V,
        decoder_embed_dim=32,
        decoder_attention_heads=4,
        decoder_ffn_embed_dim=48,
        decoder_layers=2,
        xpos_rel_pos=True,
    )
    return Decoder(config, embed_tokens=nn.Embedding(V, 32))


def g_mlp() -> nn.Module:
    from g_mlp_pytorch import gMLP

    return gMLP(num_tokens=V, dim=32, depth=2, seq_len=64, causal=True, attn_dim=16)


def one(package: str, model: str, build: Any, name: str = "x", **more: Any) -> Entry:
    return Entry(package, model, build, {name: ids(V)}, name, **more)


ENTRIES = [
    one("x-transformers", "TransformerWrapper, grouped queries", x_transformer),
    one("x-transformers", "TransformerWrapper, ALiBi, shifted tokens", x_alibi),
    one("torchtune", "llama3", tune_llama, "tokens"),
    one("torchtune", "gemma2, window, soft-capping", tune_gemma, "tokens", seed=5),
    one("litgpt", "GPT, as Llama", lit_llama, "idx"),
    one("litgpt", "GPT, as Gemma 2", lit_gemma, "idx"),
    one("litgpt", "GPT, as Mixtral", lit_experts, "idx"),
    one("palm-rlhf-pytorch", "PaLM", palm),
    one("local-attention", "LocalTransformer", local, seed=3),
    one("local-attention", "LocalTransformer, dynamic bias", local_bias, seed=1),
    one("gateloop-transformer", "Transformer, attention", gate_loop, seed=3),
    one("speechbrain", "TransformerLM", speech_brain, "src"),
    one("MEGABYTE-pytorch", "MEGABYTE", megabyte, "ids", seed=1),
    one("memory-efficient-attention-pytorch", "Transformer", efficient),
    one(
        "routing-transformer",
        "RoutingTransformerLM",
        routing,
        refusal="takes another execution path if 'x' has 2 positions",
        why="clusters all positions, later ones too",
    ),
    one("torchscale", "Decoder, xPos", torchscale_decoder, "prev_output_tokens"),
    one("g-mlp-pytorch", "gMLP", g_mlp, seed=2),
]
