"""Decoders of public repositories, without a source."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wild_packages.entry import VOCABULARY, Entry, Input, ids, numbers

V = VOCABULARY


def nano_chat() -> nn.Module:
    from nanochat.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(sequence_len=64, vocab_size=V, n_layer=2, n_head=4, n_kv_head=2, n_embd=32))
    model.init_weights()
    return model


def longer(module: nn.Module, idx: torch.Tensor) -> torch.Tensor:
    """The module refuses a single id. It is causal, so an id behind the row changes nothing."""
    return module(nn.functional.pad(idx, (0, 1), value=5))[:, :-1]


def llama_c() -> nn.Module:
    from model import ModelArgs, Transformer

    return Transformer(
        ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=V, multiple_of=16, max_seq_len=64)
    )


def bark() -> nn.Module:
    from bark.model import GPT, GPTConfig

    return GPT(GPTConfig(block_size=64, input_vocab_size=V, output_vocab_size=V, n_layer=2, n_head=4, n_embd=32))


def taming() -> nn.Module:
    from taming.modules.transformer.mingpt import GPT

    return GPT(V, 64, n_layer=2, n_head=4, n_embd=32)


def olmo() -> nn.Module:
    from olmo.config import ModelConfig
    from olmo.model import OLMo

    return OLMo(
        ModelConfig(
            d_model=32, n_heads=4, n_kv_heads=2, n_layers=2, rope=True, max_sequence_length=64, vocab_size=V,
            embedding_size=V, eos_token_id=2, pad_token_id=0, attention_layer_norm=True, init_device="cpu",
            init_std=0.2,
        )
    )  # fmt: skip


def decision() -> nn.Module:
    from mingpt.model_atari import GPT, GPTConfig

    return GPT(GPTConfig(6, 64, n_layer=2, n_head=4, n_embd=32, model_type="naive", max_timestep=30))


def molecules(properties: int = 0) -> nn.Module:
    from model import GPT, GPTConfig

    config = GPTConfig(
        V, 64, n_layer=2, n_head=4, n_embd=32, num_props=properties, scaffold=False, scaffold_maxlen=0, lstm=False,
        lstm_layers=0,
    )  # fmt: skip
    return GPT(config)


def mini_mind() -> nn.Module:
    from model.model_minimind import MiniMindConfig, MiniMindForCausalLM

    return MiniMindForCausalLM(
        MiniMindConfig(
            hidden_size=32, num_hidden_layers=2, vocab_size=V, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def one(package: str, model: str, build: Any, name: str, commit: str, **more: Any) -> Entry:
    return Entry(package, model, build, {name: ids(V)}, name, commit=commit, **more)


MOLGPT = {"commit": "72ff33ae747c0a4908b822732019a66e965a595a", "folder": "train", "gain": 8.0}

ENTRIES = [
    one(
        "karpathy/nanochat", "GPT", nano_chat, "idx", "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
        reads=longer, gain=8.0, seed=1,
    ),
    one("karpathy/llama2.c", "Transformer", llama_c, "tokens", "350e04fe35433e6d2941dce5a1f53308f87058eb", gain=8.0),
    one("suno-ai/bark", "GPT", bark, "idx", "f4f32d4cd480dfec1c245d258174bc9bde3c2148", unused=("funcy",)),
    one(
        "CompVis/taming-transformers", "GPT", taming, "idx", "3ba01b241669f5ade541ce990f7650a3b8f65318",
        gain=8.0, unused=("transformers",),
    ),
    one(
        "allenai/OLMo", "OLMo", olmo, "input_ids", "59a53e3f68e546330ca5a99ec626e58f9ab96494",
        reads=lambda module, input_ids: module(input_ids).logits, seed=1,
        unused=(
            "boto3", "botocore", "botocore.exceptions", "botocore.config", "cached_path", "cached_path.schemes",
            "google", "google.api_core", "google.api_core.retry", "requests", "importlib_resources",
            "importlib_resources.abc",
        ),
    ),
    Entry(
        "kzl/decision-transformer", "GPT, Atari", decision,
        {
            "states": numbers(None, 4 * 84 * 84), "actions": Input((None, 1), 6, 0), "targets": Input((None, 1), 6, 0),
            "timesteps": Input((1, 1), 30, 0),
        },
        told={"axes": {"timesteps": (0,)}}, commit="e2d82e68f330c00f763507b3b01d774740bee53f", folder="atari", gain=2.0,
    ),
    one("devalab/molgpt", "GPT", molecules, "idx", **MOLGPT),
    Entry(
        "devalab/molgpt", "GPT, properties", lambda: molecules(3), {"idx": ids(V), "prop": numbers(3)}, "idx",
        **MOLGPT,
    ),
    one(
        "jingyaogong/minimind", "MiniMindForCausalLM", mini_mind, "input_ids",
        "d65ef2c00ebc6082f9df11541e1b191655eddb00", gain=8.0,
    ),
]  # fmt: skip
