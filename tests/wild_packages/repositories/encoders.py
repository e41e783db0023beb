"""Encoders of public repositories: audio, proteins, text, genes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tformer_export import lengths, padding
from wild_packages.entry import VOCABULARY, Entry, Input, ids, numbers

V = VOCABULARY


def ast() -> nn.Module:
    import timm
    from models.ast_models import ASTModel
    from timm.models.deit import VisionTransformerDistilled

    def vit_deit_tiny_distilled_patch16_224(**_: Any) -> nn.Module:
        return VisionTransformerDistilled(embed_dim=32, depth=2, num_heads=4)

    timm.models.register_model(vit_deit_tiny_distilled_patch16_224)
    # timm 0.4.5, which the repository asks for, does not run with this PyTorch.
    with patch.object(timm, "__version__", "0.4.5"):
        model = ASTModel(
            label_dim=10, input_fdim=32, input_tdim=64, imagenet_pretrain=False, model_size="tiny224", verbose=False
        )
    model.v.patch_embed.img_size = None  # timm 0.4.5 has the repository's patches here, which check no size
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


def graphormer() -> nn.Module:
    # What fairseq, which does not run with this Python, gives the module in eval mode.
    utils = SimpleNamespace(
        get_activation_fn=lambda name: getattr(nn.functional, name),
        softmax=lambda x, dim, onnx_trace: nn.functional.softmax(x, dim, dtype=torch.float32),
    )
    parts = SimpleNamespace(
        FairseqDropout=lambda p, module_name: nn.Dropout(p),
        LayerNorm=lambda width, export: nn.LayerNorm(width),
        LayerDropModuleList=nn.ModuleList,
        quant_noise=lambda module, p, block_size: module,
    )
    for name in ("", ".modules", ".modules.fairseq_dropout", ".modules.quant_noise"):
        sys.modules[f"fairseq{name}"] = SimpleNamespace(utils=utils, **vars(parts))  # type: ignore[assignment]
    from modules import GraphormerGraphEncoder

    return GraphormerGraphEncoder(
        num_atoms=20, num_in_degree=8, num_out_degree=8, num_edges=9, num_spatial=7, num_edge_dis=6,
        edge_type="multi_hop", multi_hop_max_dist=3, num_encoder_layers=2, embedding_dim=32, ffn_embedding_dim=48,
        num_attention_heads=4, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip


def pytorchic_bert() -> nn.Module:
    from models import Config, Transformer

    return Transformer(Config(vocab_size=V, dim=32, n_layers=2, n_heads=4, dim_ff=48, max_len=64))


def esm() -> nn.Module:
    from esm import ESM2

    return ESM2(num_layers=2, embed_dim=32, attention_heads=4)


GRAPH = {
    "x": Input((6, 2), 20, 0), "in_degree": Input((6,), 8, 0), "out_degree": Input((6,), 8, 0),
    "attn_bias": numbers(7, 7), "spatial_pos": Input((6, 6), 7, 0), "edge_input": Input((6, 6, 4, 2), 9, 0),
    "attn_edge_type": Input((6, 6, 2), 9, 0),
}  # fmt: skip

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
        unused=("wenet.cli", "wenet.cli.model", "wenet.models.squeezeformer.subsampling"),
        commit="015469960db73eb19c49a48c020d5ac9db69bae5",
    ),
    Entry(
        "lucidrains/enformer-pytorch", "Enformer", enformer, {"x": numbers(64, 4)},
        told={"axes": {"x": (0,)}, "fixed_arguments": {"head": "human"}}, unused=("polars", "pyfaidx"),
        commit="5a5974d2821c728f93294731c50b55f1f55fd86d",
    ),
    Entry(
        "microsoft/Graphormer", "GraphormerGraphEncoder", graphormer, GRAPH, wrap=lambda rows: {"batched_data": rows},
        told={"axes": dict.fromkeys(GRAPH, (0,)), "output": 1}, folder="graphormer",
        commit="ac154fe4253d076a1c294f14be20dad0351cff3c",
    ),
    Entry(
        "dhlee347/pytorchic-bert", "Transformer", pytorchic_bert, {"x": ids(), "seg": Input((None,), 2, 0)},
        masks={"mask": (padding("x", dtype=torch.int64), lambda x, seg: torch.ones_like(x))},
        commit="fefcbd988bc3bcdd2cd67072101a3d94ef362f7e",
    ),
    Entry(
        "facebookresearch/esm", "ESM2", esm, {"tokens": Input((None,), 33, 4)}, told={"output": "logits"},
        commit="2b369911bb5b4b0dda914521b9475cad1656b2ac",
    ),
]  # fmt: skip
