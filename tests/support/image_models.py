"""Tiny seeded transformers models that read images in their prompt, with a processor made of nothing but code."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models

SIZE, PATCH = 16, 8
TILE = 32  # of a model that reads images in tiles
MARKER, MARKER_ID = "<image>", 5
LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyz:.?! \n"))
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<other>", MARKER]
TILE_TOKENS = [
    "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]  # fmt: skip
VOCABULARY = len(SPECIAL) + len(LETTERS) + len(TILE_TOKENS)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEXT_CONFIG = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCABULARY, max_position_embeddings=128, pad_token_id=0,
)  # fmt: skip
VISION_CONFIG = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=SIZE, patch_size=PATCH,
    projection_dim=32,
)  # fmt: skip


@functools.cache
def llava(seed: int = 0) -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION_CONFIG),
        text_config=transformers.LlamaConfig(**TEXT_CONFIG),
        image_token_id=MARKER_ID, vision_feature_layer=-2, vision_feature_select_strategy="default",
    )  # fmt: skip
    return seeded(transformers.LlavaForConditionalGeneration, config, seed)


def seeded(kind: Any, config: Any, seed: int = 0) -> Any:
    """Return a model with random weights, large enough that images change its results."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model


def tokenizer() -> Any:
    """Return a tokenizer with a token for each letter."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS, *TILE_TOKENS])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens={"image_token": MARKER},
    )  # fmt: skip
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ["<other>", *TILE_TOKENS]], special_tokens=True
    )
    return tokenizer


def llava_processor() -> Any:
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    return transformers.LlavaProcessor(
        image_processor=images, tokenizer=tokenizer(), patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    )  # fmt: skip


@functools.cache
def smolvlm(seed: int = 0) -> Any:
    return _tiles_model(transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration, seed)


@functools.cache
def idefics3(seed: int = 0) -> Any:
    return _tiles_model(transformers.Idefics3Config, transformers.Idefics3ForConditionalGeneration, seed)


@functools.cache
def paligemma(seed: int = 0) -> Any:
    vision = {**VISION_CONFIG, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = {**TEXT_CONFIG, "model_type": "gemma", "head_dim": 8}
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_id=MARKER_ID, projection_dim=32, hidden_size=32
    )
    return seeded(transformers.PaliGemmaForConditionalGeneration, config, seed)


@functools.cache
def qwen2_vl(seed: int = 0) -> Any:
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2)
    return _grid_model(transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration, vision, seed)


@functools.cache
def qwen2_5_vl(seed: int = 0) -> Any:
    vision = dict(
        depth=2, hidden_size=32, intermediate_size=48, out_hidden_size=32, num_heads=4, window_size=16,
        fullatt_block_indexes=[1],
    )  # fmt: skip
    return _grid_model(transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration, vision, seed)


def _grid_model(config: Any, kind: Any, vision: dict[str, Any], seed: int) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    settings = config(
        vision_config={**vision, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        text_config={**TEXT_CONFIG, "bos_token_id": 1, "eos_token_id": 2, "rope_parameters": rope},
        image_token_id=MARKER_ID, vision_start_token_id=VOCABULARY - 1, vision_end_token_id=VOCABULARY - 2,
        video_token_id=4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return seeded(kind, settings, seed)


def grid_processor() -> Any:
    """Return a processor that keeps the size of images, in patches of 4 pixels."""
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    return _GridProcessor(image_processor=images, tokenizer=tokenizer(), chat_template=TEMPLATE)


class _GridProcessor(transformers.Qwen2VLProcessor):
    """transformers' processor without videos, for which it needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.image_token_id = MARKER, MARKER_ID
        self.video_token, self.video_token_id = "<other>", 4
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def _tiles_model(config: Any, kind: Any, seed: int) -> Any:
    vision = {**VISION_CONFIG, "image_size": TILE}
    del vision["projection_dim"]
    text = transformers.LlamaConfig(**{**TEXT_CONFIG, "max_position_embeddings": 1024})
    settings = config(
        vision_config=vision, text_config=text, image_token_id=MARKER_ID, scale_factor=2, pad_token_id=0
    )  # fmt: skip
    return seeded(kind, settings, seed)


def tiles_processor(**options: Any) -> Any:
    """Return a processor that cuts images into tiles, at most three in a row or a column."""
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 3 * TILE - 8}, max_image_size={"longest_edge": TILE}, **options
    )
    positions = (TILE // PATCH // 2) ** 2
    return transformers.Idefics3Processor(
        image_processor=images, tokenizer=tokenizer(), image_seq_len=positions, chat_template=TEMPLATE
    )
