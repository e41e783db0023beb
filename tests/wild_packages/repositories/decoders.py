"""Decoders and encoder-decoders of public repositories."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tformer_export.sources import lengths
from wild_packages.entry import END, PAD, VOCABULARY, Entry, Input, ids

V = VOCABULARY


def one_row(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a forward without a batch axis."""
    return {name: row[0] for name, row in rows.items()}


def time_first(rows: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: row.transpose(0, 1) for name, row in rows.items()}


def gpt_oss() -> nn.Module:
    from gpt_oss.torch.model import ModelConfig, Transformer

    config = ModelConfig(
        num_hidden_layers=2, num_experts=4, experts_per_token=2, vocab_size=V, hidden_size=32, intermediate_size=32,
        head_dim=16, num_attention_heads=4, num_key_value_heads=2, sliding_window=6,
    )  # fmt: skip
    model = Transformer(config, torch.device("cpu")).float()
    for weight in model.parameters():  # the repository leaves them empty, to be loaded
        nn.init.normal_(weight, std=0.2)
    return model


def xlm() -> nn.Module:
    from xlm.model.transformer import TransformerModel

    params = SimpleNamespace(
        n_langs=1, n_words=V, eos_index=END, pad_index=PAD, id2lang={0: "en"}, lang2id={"en": 0}, emb_dim=32, n_heads=4,
        n_layers=2, dropout=0.0, attention_dropout=0.0, sinusoidal_embeddings=False, gelu_activation=True, asm=False,
        share_inout_emb=False,
    )  # fmt: skip
    return TransformerModel(params, range(V), is_encoder=True, with_output=True)


def xlm_logits(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    hidden = module("fwd", x=x.T, lengths=torch.tensor([x.shape[1]]), causal=True)
    return module.pred_layer.get_scores(hidden[:, 0])[None]


def dalle() -> nn.Module:
    from dalle_pytorch import DALLE, DiscreteVAE

    vae = DiscreteVAE(image_size=32, num_layers=2, num_tokens=V, codebook_dim=16, hidden_dim=8)
    return DALLE(dim=32, vae=vae, num_text_tokens=V, text_seq_len=6, depth=2, heads=4, dim_head=8)


def sasrec() -> nn.Module:
    from recbole.model.sequential_recommender.sasrec import SASRec

    config = {
        "n_layers": 2, "n_heads": 4, "hidden_size": 32, "inner_size": 48, "hidden_dropout_prob": 0.0,
        "attn_dropout_prob": 0.0, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "initializer_range": 0.2,
        "loss_type": "CE", "MAX_ITEM_LIST_LENGTH": 50, "USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item",
        "LIST_SUFFIX": "_list", "ITEM_LIST_LENGTH_FIELD": "length", "NEG_PREFIX": "neg_", "device": "cpu",
    }  # fmt: skip
    return SASRec(config, SimpleNamespace(num=lambda field: V))


ENTRIES = [
    Entry(
        "facebookresearch/XLM",
        "TransformerModel",
        xlm,
        step="x",
        told={"axes": {"x": (1, 0)}, "fixed_arguments": {"mode": "fwd", "causal": True}, "head": "pred_layer.proj"},
        wrap=time_first,
        masks={"lengths": (lengths("x"), lambda x: torch.tensor([x.shape[1]]))},
        reads=xlm_logits,
        commit="cd281d32612d145c6742b4d3f048f80df8669c30",
    ),
    Entry(
        "lucidrains/DALLE-pytorch",
        "DALLE",
        dalle,
        {"text": Input((6,), V), "image": ids()},
        step="image",
        commit="58c1e1a4fef10725a79bd45cdb5581c03e3e59e7",
        unused=("requests", "omegaconf", "taming", "taming.models.vqgan", "taming.models", "pkg_resources"),
    ),
    Entry(
        "RUCAIBox/RecBole",
        "SASRec",
        sasrec,
        {"item_seq": ids()},
        masks={"item_seq_len": (lengths("item_seq"), lambda item_seq: torch.tensor([item_seq.shape[1]]))},
        commit="7b02be5ec80a88310f2d04a27a82adfcbb5dc211",
        unused=("colorlog", "colorama", "texttable", "thop", "torch.utils.tensorboard"),
    ),
    Entry(
        "openai/gpt-oss",
        "Transformer",
        gpt_oss,
        step="x",
        wrap=one_row,
        reads=lambda module, x: module(x[0])[None],
        gain=2.0,
        commit="7b583341fe16729127f6d5b94a7b09ccae97e1a1",
    ),
]
