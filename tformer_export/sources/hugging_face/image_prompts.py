"""Decoders that read images in their prompt: a vision encoder gives embeddings in the place of placeholder ids.

The config names the placeholder (`image_token_id`). The processor describes how images become pixels, and the text
that stands for an image in a prompt. Both are read by running them, so the class of the processor does not count.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from tformer_export.sources.base import PromptPipeline, Source, as_float32, eval_mode, users_module
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.call.signature import parameters_of
from tformer_export.sources.hugging_face.grid_images import GridProcessor, check_grid, read_grid, reads_grid
from tformer_export.sources.hugging_face.images import draw_images, load_processor, read_image_steps
from tformer_export.sources.image_axes.grid import GridImagesModule
from tformer_export.sources.image_axes.one_size import IDS, PIXELS, ImagesModule
from tformer_export.sources.task_names import ANSWERS_IMAGES
from tformer_export.sources.tokenizer import read_prompt_tokenizer
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import Placeholder, SpecialTokens
from tformer_runtime.preprocess.images import ImagePreprocessor
from tformer_runtime.preprocess.tiles import NO_GRID, grid_name, reachable_grids

TEXT_TOKENS = 512  # of the default maximum length
DEFAULT_IMAGES = 4  # of the default maximum length
MAX_GRIDS = 256  # of tiles, in a file
IGNORED_OUTPUTS = {IDS, PIXELS, "attention_mask"}  # of a processor; rows run without padding of their own
FIXED = {"use_cache": False}


def reads_images(module: Any) -> bool:
    """Return whether a transformers model reads ids and images, and its config names a placeholder."""
    return {IDS, PIXELS} <= set(parameters_of(module)) and _placeholder_id(module.config) is not None


def load_prompt_processor(folder: Path) -> Any | None:
    """Load a folder's processor of texts and images, with Pillow and numpy; None if it has none.

    Raises SourceError if that fails.
    """
    image_processor = load_processor(folder)
    if image_processor is None:
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "" if importlib.util.find_spec("torchvision") else ". If it reads videos too: pip install torchvision"
        raise SourceError(f"{folder}'s processor cannot be loaded: {reason}{hint}") from error
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        return None
    processor.image_processor = image_processor
    return processor


def from_image_prompt_model(
    module: Any,
    name: str,
    processor: Any | None,
    special: SpecialTokens,
    defaults: Callable[[int | None], Mapping[str, Any]],
    image_size: tuple[int, int] | None = None,
) -> Source:
    """Read a model that continues a prompt with images.

    processor: transformers' own, of texts and images; without it the file takes ids and pixels.
    special: special tokens. defaults: from the greatest length to the generation options of its generation config.
    image_size: height and width of all images, for a model that reads images at their own size.

    Raises SourceError for a model or a processor whose images do not all have one size and one number of positions.
    """
    single, text_config = as_float32(module), module.config.get_text_config()
    token = _placeholder_id(module.config)
    assert token is not None
    wrapped: ImagesModule | GridImagesModule
    if reads_grid(single):
        grid = read_grid(single, image_size)
        shape, positions = (3, grid.height, grid.width), grid.positions
        wrapped = GridImagesModule(single, grid, token)
        processor = None if processor is None else GridProcessor(processor, grid)
        preprocessor = None if processor is None else processor.preprocessor
    else:
        if image_size is not None:
            raise SourceError(f"{type(module).__name__} determines the size of its images: leave --image-size out")
        preprocessor = None if processor is None else read_image_steps(processor.image_processor, 3)
        shape = (3, *(_config_size(module.config) if preprocessor is None else preprocessor.shape or ()))
        positions, has_axis = _count_positions(single, _draw_pixels(shape))
        wrapped = ImagesModule(single, has_axis)
    placeholder = Placeholder(token, positions)
    if processor is not None:
        assert preprocessor is not None
        placeholder = _with_texts(placeholder, processor, preprocessor)
    example = {PIXELS: _draw_pixels(shape).expand(2, 1, *shape).clone(), IDS: _example_ids(placeholder)}
    _check_looks_back(wrapped, example)
    limits = [getattr(text_config, limit, None) for limit in ("max_position_embeddings", "n_positions")]
    limit = min((n for n in limits if isinstance(n, int) and n > 0), default=None)
    longest = positions if processor is None else _longest_image(placeholder, processor.tokenizer)
    default_length = TEXT_TOKENS + DEFAULT_IMAGES * longest
    source = Source(
        made_example=True,
        module=Adapter(wrapped, list(example), fixed_arguments=FIXED),
        example=example,
        step_input=IDS,
        name=name,
        task=ANSWERS_IMAGES,
        axes={PIXELS: (0, 1)},
        special_tokens=special,
        generation_defaults=defaults(limit),
        max_length=min(limit, default_length) if limit else default_length,
        placeholders={PIXELS: placeholder},
        preprocessing={} if preprocessor is None else {PIXELS: preprocessor.manifest_entry},
        tokenizers={} if processor is None else {IDS: read_prompt_tokenizer(processor.tokenizer)},
        chat_template=_chat_template(processor),
        chat_tokens={} if processor is None else _chat_tokens(processor.tokenizer),
        prompt_pipeline=None if processor is None else make_prompt_pipeline(processor),
    )
    if isinstance(wrapped, GridImagesModule) and processor is not None:
        check_grid(wrapped, single, processor)
    elif processor is not None:
        _check_inputs(source, single, processor)
    return source


def make_prompt_pipeline(processor: Any) -> PromptPipeline:
    """Make the processor's own way from a text and its images to the inputs of a row."""

    def inputs(text: str, images: Sequence[Any]) -> dict[str, np.ndarray]:
        read = _processed(processor, text, images)
        ids = np.asarray(read[IDS])[0]
        pixels = np.asarray(read[PIXELS], np.float32) if images else np.zeros((0,), np.float32)
        return {IDS: ids, PIXELS: pixels.reshape(-1, *pixels.shape[-3:]) if images else pixels}

    return inputs


def _processed(processor: Any, text: str, images: Sequence[Any], **options: Any) -> Mapping[str, Any]:
    """Return the outputs of the processor. Raises SourceError if it fails."""
    try:
        read: Mapping[str, Any] = processor(text=[text], images=list(images) or None, return_tensors=None, **options)
    except Exception as error:  # a processor may raise anything
        raise SourceError(
            f"the processor {type(processor).__name__} does not read a text with {len(images)} images: {error}"
        ) from error
    return read


def _with_texts(placeholder: Placeholder, processor: Any, preprocessor: ImagePreprocessor) -> Placeholder:
    """Add the marker of an image in a text, and the texts that replace it.

    preprocessor: of the file. Raises SourceError if the number of positions depends on the image, and not on its tiles
        alone.
    """
    marker = getattr(processor, "image_token", None)
    if not isinstance(marker, str) or not marker:
        raise SourceError(
            f"the processor {type(processor).__name__} names no image_token, the text that stands for an image in a "
            "prompt"
        )
    placeholder = replace(placeholder, marker=marker)
    replacements = {_replacement(placeholder, processor, image, 1) for image in _one_tile_images(preprocessor)}
    if len(replacements) > 1:
        raise SourceError(
            f"the text by which the processor {type(processor).__name__} replaces an image depends on the image"
        )
    return replace(
        placeholder,
        replacement=next(iter(replacements), ""),
        grids=_texts_of_grids(placeholder, processor, preprocessor),
    )


def _one_tile_images(preprocessor: ImagePreprocessor) -> list[Any]:
    """Draw the images that are not cut into tiles."""
    images = [image.convert("RGB") for image in draw_images()]
    if not preprocessor.splits:
        return images
    size = reachable_grids(preprocessor.size, preprocessor.tile).get(NO_GRID)
    return [] if size is None else [images[0].resize(size[::-1])]


def _texts_of_grids(
    placeholder: Placeholder, processor: Any, preprocessor: ImagePreprocessor
) -> dict[str, tuple[str, ...]]:
    """Return the texts around the tiles of each grid that an image can have. Raises SourceError if they do not fit."""
    if not preprocessor.splits:
        return {}
    sizes = reachable_grids(preprocessor.size, preprocessor.tile)
    sizes.pop(NO_GRID, None)
    if len(sizes) > MAX_GRIDS:
        raise SourceError(f"images are cut into {len(sizes)} grids of tiles, and at most {MAX_GRIDS} are supported")
    image = draw_images()[0].convert("RGB")
    texts = {}
    for grid, (height, width) in sizes.items():
        tiles = grid[0] * grid[1] + 1
        text = _replacement(placeholder, processor, image.resize((width, height)), tiles)
        between = tuple(text.split(placeholder.marker * placeholder.positions))
        if len(between) != tiles + 1 or any(placeholder.marker in part for part in between):
            raise SourceError(
                f"the processor {type(processor).__name__} does not keep the placeholders of each tile together"
            )
        texts[grid_name(grid)] = between
    return texts


def _replacement(placeholder: Placeholder, processor: Any, image: Any, tiles: int) -> str:
    """Return the text by which the processor replaces the marker of an image of a number of tiles.

    Raises SourceError if the image gets another number of placeholders.
    """
    kind = type(processor).__name__
    read = _processed(processor, placeholder.marker, [image], return_text_replacement_offsets=True)
    ((offsets, *_), *others) = read.get("text_replacement_offsets") or [[None]]
    if offsets is None or others:
        raise SourceError(f"the processor {kind} does not say which text stands for an image in a prompt")
    placeholders = int((np.asarray(read[IDS]) == placeholder.token_id).sum())
    if placeholders != tiles * placeholder.positions:
        raise SourceError(
            f"the processor {kind} gives an image of {image.width} × {image.height} pixels {placeholders} "
            f"placeholders, and the model computes {tiles * placeholder.positions} embeddings for {tiles} tiles of the "
            "one size that is supported: images that keep their size, or whose tiles the file does not know, are "
            "not supported: switch that off in the processor's config if it has a setting for it (such as "
            "crop_to_patches)"
        )
    return str(offsets["replacement"])


def _longest_image(placeholder: Placeholder, tokenizer: Any) -> int:
    """Return the greatest number of tokens of an image."""
    texts = [(placeholder.marker * placeholder.positions).join(between) for between in placeholder.grids.values()]
    counts = [len(tokenizer(text)[IDS]) for text in (placeholder.replacement, *texts)]
    return max(placeholder.positions, *counts)


def _check_inputs(source: Source, module: Any, processor: Any) -> None:
    """Raise SourceError if the model gives other logits with an output of the processor that the file does not have."""
    placeholder = source.placeholders[PIXELS]
    text = f"{placeholder.marker} a"
    read = _processed(processor, text, [draw_images()[0].convert("RGB")])
    names = [name for name in read if name not in IGNORED_OUTPUTS and name in parameters_of(module)]
    if not names:
        return
    inputs = {name: torch.as_tensor(np.asarray(read[name])) for name in (IDS, PIXELS, *names)}
    with eval_mode(module), torch.no_grad():
        whole = module(**inputs, **FIXED).logits
        alone = module(**{name: inputs[name] for name in (IDS, PIXELS)}, **FIXED).logits
    if not torch.allclose(whole, alone, rtol=1e-4, atol=1e-4):
        raise SourceError(
            f"the model's results depend on {', '.join(names)}, which the processor {type(processor).__name__} gives "
            "besides ids and pixels, and which a file cannot compute: models that let the prompt attend to later "
            "positions, or give images positions of their own, are not supported"
        )


def _draw_pixels(shape: tuple[int, ...]) -> torch.Tensor:
    """Draw the pixels of one image, (1, channels, height, width)."""
    return torch.randn((1, *shape), generator=torch.Generator().manual_seed(0))


def _check_looks_back(module: torch.nn.Module, example: Mapping[str, torch.Tensor]) -> None:
    """Raise SourceError if tokens of a prompt attend to later ones: logits change when a token is appended."""
    longer = torch.cat([example[IDS], example[IDS][:, -1:]], 1)
    with eval_mode(module), torch.no_grad():
        before = module(**example, **FIXED).logits
        after = module(**{**example, IDS: longer}, **FIXED).logits[:, :-1]
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-3):
        raise SourceError(
            f"{type(users_module(module)).__name__} lets the tokens of a prompt attend to later tokens of the prompt, "
            "so that it cannot be decoded step by step: models whose prompt is read in both directions are not "
            "supported"
        )


def _count_positions(module: Any, pixels: torch.Tensor) -> tuple[int, bool]:
    """Return the embeddings that an image gets, and whether the model takes an axis of the images of a row.

    Raises SourceError for a model that computes none from pixels alone.
    """
    width = module.get_input_embeddings().weight.shape[1]
    failures = []
    for has_axis in (False, True):
        try:
            with eval_mode(module), torch.no_grad():
                features = module.get_image_features(pixel_values=pixels[None] if has_axis else pixels)
            features = getattr(features, "pooler_output", features)
            numbers = (
                sum(part.numel() for part in features) if isinstance(features, (list, tuple)) else features.numel()
            )
        except Exception as error:  # the module may raise anything
            failures.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
            continue
        return numbers // width, has_axis
    raise SourceError(
        f"{type(module).__name__} computes no embeddings of an image from its pixels alone ({failures[0]}): models "
        "that need the sizes of images or of their tiles are not supported"
    )


def _example_ids(placeholder: Placeholder) -> torch.Tensor:
    """Return two rows of ids, each with the placeholders of one image."""
    other = [0, 1, 2, 3][placeholder.token_id <= 2]
    ids = [other, *[placeholder.token_id] * placeholder.positions, other]
    return torch.tensor([ids, ids])


def _placeholder_id(config: Any) -> int | None:
    named = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in named if isinstance(token, int)), None)


def _config_size(config: Any) -> tuple[int, int]:
    size = getattr(getattr(config, "vision_config", config), "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


def _chat_template(processor: Any) -> str | None:
    for owner in (processor, getattr(processor, "tokenizer", None)):
        template = getattr(owner, "chat_template", None)
        if isinstance(template, Mapping):
            template = template.get("default")
        if isinstance(template, str):
            return template
    return None


def _chat_tokens(tokenizer: Any) -> dict[str, str]:
    return {str(name): str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
