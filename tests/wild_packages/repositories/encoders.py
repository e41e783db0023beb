"""Encoders of public repositories: sound, proteins, text, genes."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import nn

from tformer_export import lengths, padding
from wild_packages.entry import VOCABULARY, Entry, Input, ids, numbers

V = VOCABULARY


def ast() -> nn.Module:
    import timm
    from models.ast_models import ASTModel

    # timm 0.4.5, which the repository asks for, does not run with this PyTorch.
    with patch.object(timm, "__version__", "0.4.5"):
        model = ASTModel(
            label_dim=10, input_fdim=32, input_tdim=64, imagenet_pretrain=False, model_size="tiny224", verbose=False
        )
    model.v.patch_embed.img_size = None  # the patches of timm 0.4.5, which the repository replaces, check no size
    return model


def tape() -> nn.Module:
    from tape.models.modeling_bert import ProteinBertConfig, ProteinBertForMaskedLM

    return ProteinBertForMaskedLM(
        ProteinBertConfig(
            vocab_size=V, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            max_position_embeddings=64,
        )
    )  # fmt: skip


def wenet() -> nn.Module:
    from wenet.models.transformer.encoder import ConformerEncoder

    return ConformerEncoder(16, output_size=32, attention_heads=4, linear_units=48, num_blocks=2, cnn_module_kernel=7)


def enformer() -> nn.Module:
    from enformer_pytorch.modeling_enformer import Enformer

    return Enformer.from_hparams(
        dim=48, depth=2, heads=4, output_heads={"human": 5}, target_length=4, attn_dim_key=8, num_downsamples=3,
        dim_divisible_by=24,
    )  # fmt: skip


def pytorchic_bert() -> nn.Module:
    from models import Config, Transformer

    return Transformer(Config(vocab_size=V, dim=32, n_layers=2, n_heads=4, dim_ff=48, max_len=64))



ENTRIES = [
    Entry(
        "YuanGongND/ast", "ASTModel", ast, {"x": numbers(64, 32)}, told={"axes": {"x": (0,)}}, folder="src",
        unused=("wget",), commit="31088be8a3f6ef96416145c4b8d43c81f99eba7a",
    ),
    Entry(
        "songlab-cal/tape", "ProteinBertForMaskedLM", tape, {"input_ids": ids()},
        masks={
            "input_mask": (
                padding("input_ids", dtype=torch.int64),
                lambda input_ids: torch.ones_like(input_ids),
            )
        },
        unused=("boto3", "botocore", "botocore.exceptions", "requests", "lmdb"),
        commit="6d345c2b2bbf52cd32cf179325c222afd92aec7e",
    ),
    Entry(
        "wenet-e2e/wenet", "ConformerEncoder", wenet, {"xs": numbers(None, 16)}, unit=4,
        masks={"xs_lens": (lengths("xs"), lambda xs: torch.tensor([xs.shape[1]]))},
        unused=("wenet.cli", "wenet.cli.model"), commit="015469960db73eb19c49a48c020d5ac9db69bae5",
    ),
    Entry(
        "lucidrains/enformer-pytorch", "Enformer", enformer, {"x": numbers(64, 4)},
        told={"axes": {"x": (0,)}, "fixed_arguments": {"head": "human"}}, unused=("polars", "pyfaidx"),
        commit="5a5974d2821c728f93294731c50b55f1f55fd86d",
    ),
    Entry(
        "dhlee347/pytorchic-bert", "Transformer", pytorchic_bert, {"x": ids(), "seg": Input((None,), 2, 0)},
        masks={"mask": (padding("x", dtype=torch.int64), lambda x, seg: torch.ones_like(x))},
        commit="fefcbd988bc3bcdd2cd67072101a3d94ef362f7e",
    ),
]  # fmt: skip
