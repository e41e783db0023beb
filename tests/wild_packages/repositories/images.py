"""Models of images and films of public repositories."""

from __future__ import annotations

import collections.abc
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from wild_packages.entry import Entry, Input, numbers


def detr() -> nn.Module:
    from models.backbone import BackboneBase, FrozenBatchNorm2d, Joiner
    from models.detr import DETR
    from models.position_encoding import PositionEmbeddingSine
    from models.transformer import Transformer
    from torchvision.models import resnet18

    # Backbone(…) of the repository is the same with pretrained weights.
    convolutions = BackboneBase(resnet18(norm_layer=FrozenBatchNorm2d), True, 512, False)
    backbone = Joiner(convolutions, PositionEmbeddingSine(16, normalize=True))
    backbone.num_channels = 512
    transformer = Transformer(
        32, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=48, return_intermediate_dec=True
    )
    return DETR(backbone, transformer, num_classes=7, num_queries=5)


def dino() -> nn.Module:
    from vision_transformer import VisionTransformer

    return VisionTransformer(img_size=[32], patch_size=8, embed_dim=32, depth=2, num_heads=4, qkv_bias=True)


def dino_2() -> nn.Module:
    from dinov2.models.vision_transformer import DinoVisionTransformer

    return DinoVisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, init_values=1.0, block_chunks=0,
        num_register_tokens=2,
    )  # fmt: skip


def swin() -> nn.Module:
    from models.swin_transformer_v2 import SwinTransformerV2

    return SwinTransformerV2(
        img_size=32, patch_size=2, num_classes=10, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )


def mae() -> nn.Module:
    from models_vit import VisionTransformer

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """The forward of timm 0.3.2, which the repository inherits. It does not run with this PyTorch."""
        return self.head(self.forward_features(x))  # type: ignore[no-any-return]

    VisionTransformer.forward = forward
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10, qkv_bias=True,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )  # fmt: skip


def segmenter() -> nn.Module:
    from segm.model.decoder import MaskTransformer
    from segm.model.segmenter import Segmenter
    from segm.model.vit import VisionTransformer

    encoder = VisionTransformer((32, 32), 8, n_layers=2, d_model=32, d_ff=48, n_heads=4, n_cls=6)
    decoder = MaskTransformer(
        6, 8, d_encoder=32, n_layers=2, n_heads=4, d_model=32, d_ff=48, drop_path_rate=0.0, dropout=0.0
    )
    return Segmenter(encoder, decoder, n_cls=6)


def swin_ir() -> nn.Module:
    from models.network_swinir import SwinIR

    return SwinIR(
        img_size=16, embed_dim=16, depths=[2, 2], num_heads=[4, 4], window_size=4, mlp_ratio=2.0, upscale=2,
        upsampler="pixelshuffledirect",
    )  # fmt: skip


def rt_detr() -> nn.Module:
    from src.nn.backbone.presnet import PResNet
    from src.zoo.rtdetr.hybrid_encoder import HybridEncoder
    from src.zoo.rtdetr.rtdetr import RTDETR
    from src.zoo.rtdetr.rtdetr_decoder import RTDETRTransformer

    size = [64, 64]
    encoder = HybridEncoder(
        in_channels=[128, 256, 512], hidden_dim=32, nhead=4, dim_feedforward=48, expansion=0.5, depth_mult=0.34,
        eval_spatial_size=size,
    )  # fmt: skip
    decoder = RTDETRTransformer(
        num_classes=7, hidden_dim=32, num_queries=9, feat_channels=[32, 32, 32], nhead=4, num_decoder_layers=2,
        dim_feedforward=48, num_denoising=0, eval_spatial_size=size,
    )  # fmt: skip
    return RTDETR(PResNet(18, return_idx=[1, 2, 3]), encoder, decoder)


def time_sformer() -> nn.Module:
    # PyTorch had this module until 2.0.
    sys.modules["torch._six"] = SimpleNamespace(container_abcs=collections.abc)  # type: ignore[assignment]
    from timesformer.models.vit import VisionTransformer

    return VisionTransformer(
        img_size=32, patch_size=8, num_classes=10, embed_dim=32, depth=2, num_heads=4, qkv_bias=True, num_frames=4
    )


def dit() -> nn.Module:
    from models import DiT

    return DiT(input_size=8, patch_size=2, in_channels=4, hidden_size=32, depth=2, num_heads=4, num_classes=10)


def u_vit() -> nn.Module:
    from libs.uvit import UViT

    return UViT(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=4, num_classes=10, mlp_time_embed=True)


def clip() -> nn.Module:
    from clip.model import CLIP

    return CLIP(
        embed_dim=24, image_resolution=32, vision_layers=2, vision_width=64, vision_patch_size=8, context_length=16,
        vocab_size=61, transformer_width=32, transformer_heads=4, transformer_layers=2,
    ).visual  # fmt: skip


def vit() -> nn.Module:
    from models.modeling import VisionTransformer

    config = SimpleNamespace(
        patches={"size": (8, 8)}, hidden_size=32, classifier="token",
        transformer={
            "mlp_dim": 48, "num_heads": 4, "num_layers": 2, "attention_dropout_rate": 0.0, "dropout_rate": 0.0,
        },
    )  # fmt: skip
    return VisionTransformer(config, img_size=32, num_classes=10, vis=True)


def tokens_to_token() -> nn.Module:
    from models.t2t_vit import T2T_ViT

    return T2T_ViT(
        img_size=64, tokens_type="performer", num_classes=10, embed_dim=32, depth=2, num_heads=4, token_dim=16
    )


def pyramid() -> nn.Module:
    from pvt import PyramidVisionTransformer

    return PyramidVisionTransformer(
        img_size=64, patch_size=4, num_classes=10, embed_dims=[16, 16, 32, 32], num_heads=[1, 2, 4, 4],
        mlp_ratios=[2, 2, 2, 2], qkv_bias=True, depths=[1, 1, 1, 1],
    )  # fmt: skip


def levit() -> nn.Module:
    from levit import model_factory

    return model_factory("32_48_64", 8, "1_1_1", "2_3_4", 0, None, 10, True, False, False)


def one(package: str, model: str, build: Any, commit: str, *shape: int, name: str = "x", **more: Any) -> Entry:
    """Return the entry of a model whose only input is an image of one size."""
    told = {"axes": {name: (0,)}, **more.pop("told", {})}
    return Entry(package, model, build, {name: numbers(*(shape or (3, 32, 32)))}, told=told, commit=commit, **more)


STEP, LABEL = Input((), 1000, 0), Input((), 10, 0)
DETR_AT = "29901c51d7fe8712168b8d0d64351170bc0f83e0"

ENTRIES = [
    one(
        "facebookresearch/detr", "DETR, classes", detr, DETR_AT, 3, 64, 64, name="samples",
        told={"output": "pred_logits"},
    ),
    one(
        "facebookresearch/detr", "DETR, boxes", detr, DETR_AT, 3, 64, 64, name="samples", told={"output": "pred_boxes"}
    ),
    one("facebookresearch/dino", "VisionTransformer", dino, "7c446df5b9f45747937fb0d72314eb9f7b66930a"),
    one("facebookresearch/dinov2", "DinoVisionTransformer", dino_2, "b8931f7bf91576930313be2c6d6af376033b35f0"),
    one("microsoft/Swin-Transformer", "SwinTransformerV2", swin, "f82860bfb5225915aca09c3227159ee9e1df874d"),
    one("facebookresearch/mae", "VisionTransformer", mae, "efb2a8062c206524e35e47d04501ed4f544c0ae8"),
    one("rstrudel/segmenter", "Segmenter", segmenter, "20d1bfad354165ee45c3f65972a4d9c131f58d53", name="im"),
    one("JingyunLiang/SwinIR", "SwinIR", swin_ir, "6545850fbf8df298df73d81f3e8cba638787c8bd", 3, 16, 16),
    one(
        "lyuwenyu/RT-DETR", "RTDETR, classes", rt_detr, "068dfde65f2667ad6555883c69d73de886518cad", 3, 64, 64,
        told={"output": "pred_logits"}, folder="rtdetr_pytorch",
        unused=("pycocotools", "src.data", "src.optim"),
    ),
    one(
        "facebookresearch/TimeSformer", "VisionTransformer, divided space and time", time_sformer,
        "a5ef29a7b7264baff199a30b3306ac27de901133", 3, 4, 32, 32,
        unused=(
            "fvcore", "fvcore.common", "fvcore.common.registry", "fvcore.common.file_io", "simplejson",
            "timesformer.models.video_model_builder", "timesformer.models.custom_video_model_builder",
        ),
    ),
    Entry(
        "facebookresearch/DiT", "DiT", dit, {"x": numbers(4, 8, 8), "t": STEP, "y": LABEL},
        told={"axes": {"x": (0,), "t": (0,), "y": (0,)}}, commit="ed81ce2229091fd4ecc9a223645f95cf379d582b",
    ),
    Entry(
        "baofff/U-ViT", "UViT", u_vit, {"x": numbers(3, 16, 16), "timesteps": STEP, "y": LABEL},
        told={"axes": {"x": (0,), "timesteps": (0,), "y": (0,)}}, commit="ce551708dc9cde9818d2af7d84dfadfeb7bd9034",
    ),
    one("openai/CLIP", "VisionTransformer", clip, "d05afc436d78f1c48dc0dbf8e5980a9d471f35f6", unused=("clip.clip",)),
    one(
        "jeonsworld/ViT-pytorch", "VisionTransformer", vit, "460a162767de1722a014ed2261463dbbc01196b6",
        unused=("ml_collections",),
    ),
    one(
        "yitu-opensource/T2T-ViT", "T2T_ViT", tokens_to_token, "0f63dc9558f4d192de926504dbddfa1b3f5db6ca", 3, 64, 64,
        gain=4.0,
    ),
    one("whai362/PVT", "PyramidVisionTransformer", pyramid, "57e2dfaa5a46f9050d76f306a4fcd9a7c061f520", 3, 64, 64,
        folder="classification"),
    one("facebookresearch/LeViT", "LeViT", levit, "3772b8e7517b900330ee1f46e11b0ae917dae323", 3, 224, 224, gain=2.0),
]  # fmt: skip
