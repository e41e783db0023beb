"""Decoders of public repositories, without a source."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

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


def palm() -> nn.Module:
    from palm_pytorch import PaLM

    return PaLM(dim=32, num_tokens=V, depth=2, dim_head=8, heads=4)


def transformer_xl() -> nn.Module:
    with patch.object(torch.version, "cuda", "12.0"):  # the repository reads it, also where there is no GPU
        from mem_transformer import MemTransformerLM

    torch.Tensor.byte = torch.Tensor.bool  # PyTorch 1.1 masked with bytes, this one does not
    model = MemTransformerLM(V, 2, 4, 32, 8, 48, 0.0, 0.0, tgt_len=64, ext_len=0, mem_len=0)
    for weight in (model.r_w_bias, model.r_r_bias):  # the repository leaves them empty, for its training script
        nn.init.normal_(weight, std=0.2)
    return model


def xl_logits(module: nn.Module, data: torch.Tensor) -> torch.Tensor:
    hidden, _ = module._forward(data.T)
    softmax = module.crit
    return softmax._compute_logit(hidden[:, 0], softmax.out_layers[0].weight, softmax.out_layers[0].bias, None)[None]


def llama_3() -> nn.Module:
    from fairscale.nn.model_parallel.initialize import initialize_model_parallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        initialize_model_parallel(1)
    from llama.model import ModelArgs, Transformer

    sizes = ModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=V, multiple_of=16, max_batch_size=8, max_seq_len=64
    )
    with patch.object(torch.Tensor, "cuda", lambda tensor: tensor):  # its caches lie on a GPU only
        model = Transformer(sizes)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def gpt_2() -> nn.Module:
    from GPT2.config import GPT2Config
    from GPT2.model import GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(V, n_positions=64, n_ctx=64, n_embd=32, n_layer=2, n_head=4))


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
    one("lucidrains/PaLM-pytorch", "PaLM", palm, "input", "7164d13d5a831647edb5838544017f387130f987", gain=8.0, seed=1),
    Entry(
        "kimiyoung/transformer-xl", "MemTransformerLM", transformer_xl, {"data": ids(V)}, "data",
        wrap=lambda rows: dict.fromkeys(("data", "target"), rows["data"].T.contiguous()), reads=xl_logits,
        commit="44781ed21dbaec88b280f74d9ae2877f52b492a5", folder="pytorch pytorch/utils",
        refusal="forward runs on the example but not at other sizes", why="returns the loss of each position",
    ),
    one(
        "meta-llama/llama3", "Transformer", llama_3, "tokens", "a0940f9cf7065d45bb6675660f80d305c041a754",
        told={"fixed_arguments": {"start_pos": 0}}, unused=("tiktoken", "tiktoken.load"),
    ),
    one(
        "graykode/gpt-2-Pytorch", "GPT2LMHeadModel", gpt_2, "input_ids", "401078fde5e85475590dc04c9ed11b79332b8717",
        gain=8.0,
    ),
]  # fmt: skip
