"""Encoders of images of one size, with attention over all of the image or in windows."""

from __future__ import annotations

from typing import Any

from torch import nn

from wild_packages.entry import Entry, numbers


def timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10)


def timm_swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=32, patch_size=2, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=10
    )


def timm_eva() -> nn.Module:
    from timm.models.eva import Eva

    return Eva(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10, use_rot_pos_emb=True,
        swiglu_mlp=True, head_init_scale=1.0,
    )  # fmt: skip


def vision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=10)


def vision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10)


def vit() -> nn.Module:
    from vit_pytorch import ViT

    return ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=2, heads=4, dim_head=16, mlp_dim=48)


def cross_former() -> nn.Module:
    from vit_pytorch.crossformer import CrossFormer

    return CrossFormer(
        dim=(32, 32, 64, 64), depth=(1, 1, 1, 1), global_window_size=(4, 2, 2, 1), local_window_size=2,
        cross_embed_kernel_sizes=((4, 8), (2, 4), (2, 4), (2, 4)), cross_embed_strides=(2, 2, 2, 2), num_classes=10,
    )  # fmt: skip


def segment() -> nn.Module:
    from segment_anything.modeling import ImageEncoderViT

    return ImageEncoderViT(
        img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, out_chans=16, use_rel_pos=True, window_size=3,
        global_attn_indexes=(1,),
    )  # fmt: skip


def clip() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(image_size=32, patch_size=8, width=32, layers=2, heads=4, mlp_ratio=2.0, output_dim=16)


def perceiver() -> nn.Module:
    from perceiver_pytorch import Perceiver

    return Perceiver(
        input_channels=3, input_axis=2, num_freq_bands=4, max_freq=8.0, depth=2, num_latents=8, latent_dim=32,
        latent_heads=4, latent_dim_head=16, cross_dim_head=16, num_classes=10,
    )  # fmt: skip


def one(package: str, model: str, build: Any, name: str, *shape: int, **more: Any) -> Entry:
    return Entry(package, model, build, {name: numbers(*(shape or (3, 32, 32)))}, **more)


ENTRIES = [
    one("timm", "VisionTransformer", timm_vit, "x"),
    one("timm", "SwinTransformer, shifted windows", timm_swin, "x"),
    one("timm", "Eva, rotary positions", timm_eva, "x"),
    one("torchvision", "VisionTransformer", vision_vit, "x"),
    one("torchvision", "SwinTransformer, shifted windows", vision_swin, "x", told={"axes": {"x": (0,)}}),
    one("vit-pytorch", "ViT", vit, "img"),
    one("vit-pytorch", "CrossFormer, windows", cross_former, "x", told={"axes": {"x": (0,)}}),
    one("segment-anything", "ImageEncoderViT, windows", segment, "x"),
    one("open-clip-torch", "VisionTransformer", clip, "x"),
    one("perceiver-pytorch", "Perceiver", perceiver, "data", 32, 32, 3, told={"axes": {"data": (0,)}}),
]
