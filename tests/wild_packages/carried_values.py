"""Decoders that carry a value from position to position, alone or beside attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wild_packages.entry import VOCABULARY, Entry, ids

V = VOCABULARY


def mamba(pscan: bool) -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    mixer = Mamba(MambaConfig(d_model=32, n_layers=2, d_state=8, pscan=pscan))
    return nn.Sequential(nn.Embedding(V, 32), mixer, nn.Linear(32, V))


def jamba(experts: int) -> nn.Module:
    from mambapy.jamba import JambaLM, JambaLMConfig

    return JambaLM(
        JambaLMConfig(
            d_model=32, n_layers=4, mlp_size=48, vocab_size=V, d_state=8, num_attention_heads=4, num_key_value_heads=2,
            num_experts=experts, num_experts_per_tok=min(experts, 2), attn_layer_offset=1, attn_layer_period=2,
            pscan=False,
        )
    )  # fmt: skip


def performer() -> nn.Module:
    from performer_pytorch import PerformerLM

    return PerformerLM(num_tokens=V, max_seq_len=64, dim=32, depth=2, heads=4, dim_head=16, causal=True)


def gate_loop() -> nn.Module:
    from gateloop_transformer import Transformer

    return Transformer(num_tokens=V, dim=32, depth=2, heads=4, dim_head=16, use_gate_looped_attn=True)


def simple_gate_loop() -> nn.Module:
    from gateloop_transformer import SimpleGateLoopLayer

    return nn.Sequential(nn.Embedding(V, 32), SimpleGateLoopLayer(32), nn.Linear(32, V))


def min_gru() -> nn.Module:
    from minGRU_pytorch import minGRU

    return nn.Sequential(nn.Embedding(V, 32), minGRU(32), nn.Linear(32, V))


def recurrent_memory() -> nn.Module:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    return RecurrentMemoryTransformer(
        num_tokens=V,
        dim=32,
        depth=2,
        num_memory_tokens=2,
        seq_len=64,
        causal=True,
        heads=4,
        dim_head=16,
        use_xl_memories=False,
    )


def block_recurrent() -> nn.Module:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    return BlockRecurrentTransformer(num_tokens=V, dim=32, depth=2, dim_head=16, heads=4, max_seq_len=64, block_width=8)


def ret_net() -> nn.Module:
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    config = RetNetConfig(
        vocab_size=V,
        decoder_embed_dim=32,
        decoder_value_embed_dim=64,
        decoder_retention_heads=4,
        decoder_ffn_embed_dim=48,
        decoder_layers=2,
    )
    return RetNetDecoder(config, embed_tokens=nn.Embedding(V, 32))


def x_lstm(*scalar: int) -> nn.Module:
    from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, sLSTMBlockConfig, sLSTMLayerConfig, xLSTMLMModel
    from xlstm.xlstm_lm_model import xLSTMLMModelConfig

    return xLSTMLMModel(
        xLSTMLMModelConfig(
            vocab_size=V, embedding_dim=32, num_blocks=2, context_length=128, slstm_at=[*scalar],
            mlstm_block=mLSTMBlockConfig(mLSTMLayerConfig(num_heads=4, conv1d_kernel_size=4, qkv_proj_blocksize=4)),
            slstm_block=sLSTMBlockConfig(sLSTMLayerConfig(backend="vanilla", num_heads=4, conv1d_kernel_size=4)),
        )
    )  # fmt: skip


def mega() -> nn.Module:
    from mega_pytorch import Mega

    return Mega(num_tokens=V, dim=32, depth=2, ema_heads=4, attn_dim_qk=16, attn_dim_value=32, laplacian_attn_fn=False)


def flash() -> nn.Module:
    from flash_pytorch import FLASHTransformer

    return FLASHTransformer(num_tokens=V, dim=32, depth=2, causal=True, group_size=8, query_key_dim=16)


def feedback() -> nn.Module:
    from labml_nn.transformers.feed_forward import FeedForward
    from labml_nn.transformers.feedback import FeedbackAttention, FeedbackTransformer, FeedbackTransformerLayer

    layer = FeedbackTransformerLayer(
        d_model=32, attn=FeedbackAttention(4, 32, 0.0), feed_forward=FeedForward(32, 48), dropout_prob=0.0
    )
    return nn.Sequential(nn.Embedding(V, 32), FeedbackTransformer(layer, 2), nn.Linear(32, V))


def time_first(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    return module(input.T).transpose(0, 1)


def one(package: str, model: str, build: Any, name: str = "x", **more: Any) -> Entry:
    return Entry(package, model, build, {name: ids(V)}, name, **more)


ENTRIES = [
    one("mambapy", "Mamba, sequential scan", lambda: mamba(False), "input", seed=1),
    one("mambapy", "Mamba, parallel scan", lambda: mamba(True), "input"),
    one("mambapy", "JambaLM", lambda: jamba(1), "tokens", seed=1),
    one(
        "mambapy",
        "JambaLM, experts",
        lambda: jamba(4),
        "tokens",
        seed=6,
        refusal="lets the values of its data decide",
        why="skips experts without tokens with `if`, and indexes by lists",
    ),
    one(
        "performer-pytorch",
        "PerformerLM",
        performer,
        refusal="a number differs from run to run",
        why="carries sums from chunk to chunk",
    ),
    one(
        "gateloop-transformer",
        "Transformer, gated loops",
        gate_loop,
        seed=1,
        refusal="mixes different positions",
        why="a recursive associative scan",
    ),
    one("gateloop-transformer", "SimpleGateLoopLayer", simple_gate_loop, "input"),
    one("minGRU-pytorch", "minGRU", min_gru, "input", gain=4.0),
    one("recurrent-memory-transformer-pytorch", "RecurrentMemoryTransformer", recurrent_memory),
    one(
        "block-recurrent-transformer-pytorch",
        "BlockRecurrentTransformer",
        block_recurrent,
        refusal="at most 8 is possible",
        why="computes block after block",
    ),
    one("torchscale", "RetNetDecoder", ret_net, "prev_output_tokens"),
    one("xlstm", "xLSTMLMModel, mLSTM", x_lstm, "idx"),
    one(
        "xlstm",
        "xLSTMLMModel, sLSTM",
        lambda: x_lstm(1),
        "idx",
        refusal="cannot be exported: it reads a value",
        why="the first run of its loop does other operations",
    ),
    one("mega-pytorch", "Mega", mega),
    one(
        "FLASH-pytorch",
        "FLASHTransformer",
        flash,
        refusal="differs from its source",
        why="the file would differ: attention in groups",
    ),
    one(
        "labml-nn",
        "FeedbackTransformer",
        feedback,
        "input",
        told={"axes": {"input": (1, 0)}},
        reads=time_first,
        seed=1,
        refusal="a value has another shape in each run",
        why="a memory that grows in a loop",
    ),
]
