"""Decoders that read pictures in their prompt: a vision encoder gives embeddings in the place of placeholder ids.

The config names the placeholder (`image_token_id`). The processor describes how pictures become pixels, and the text
that stands for a picture in a prompt. Both are read by running them, so the class of the processor does not count.
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
from tformer_export.sources.hugging_face.grid_pictures import GridProcessor, check_grid, read_grid, reads_grid
from tformer_export.sources.hugging_face.images import draw_pictures, load_processor, read_picture_steps
from tformer_export.sources.pictures.grid import GridPicturesModule
from tformer_export.sources.pictures.one_size import IDS, PIXELS, PicturesModule
from tformer_export.sources.task_names import ANSWERS_PICTURES
from tformer_export.sources.tokenizer import read_prompt_tokenizer
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import Placeholder, SpecialTokens
from tformer_runtime.preprocess.images import ImagePreprocessor
from tformer_runtime.preprocess.tiles import NO_GRID, grid_name, reachable_grids

TEXT_TOKENS = 512  # of the default maximum length
DEFAULT_PICTURES = 4  # of the default maximum length
MAX_GRIDS = 256  # of tiles, in a file
IGNORED_OUTPUTS = {IDS, PIXELS, "attention_mask"}  # of a processor; rows run without padding of their own
FIXED = {"use_cache": False}


def reads_pictures(module: Any) -> bool:
    """Return whether a transformers model reads ids and pictures, and its config names a placeholder."""
    return {IDS, PIXELS} <= set(parameters_of(module)) and _placeholder_id(module.config) is not None


def load_prompt_processor(folder: Path) -> Any | None:
    """Load a folder's processor of texts and pictures, with Pillow and numpy; None if it has none.

    Raises SourceError if that fails.
    """
    images = load_processor(folder)
    if images is None:
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
    processor.image_processor = images
    return processor


def from_picture_prompt_model(
    module: Any,
    name: str,
    processor: Any | None,
    special: SpecialTokens,
    defaults: Callable[[int | None], Mapping[str, Any]],
    picture_size: tuple[int, int] | None = None,
) -> Source:
    """Read a model that continues a prompt with pictures.

    processor: transformers' own, of texts and pictures; without it the file takes ids and pixels.
    special: special tokens. defaults: from the greatest length to the generation options of its generation config.
    picture_size: height and width of all pictures, for a model that reads pictures at their own size.

    Raises SourceError for a model or a processor whose pictures do not all have one size and one number of positions.
    """
    single, text_config = as_float32(module), module.config.get_text_config()
    token = _placeholder_id(module.config)
    assert token is not None
    wrapped: PicturesModule | GridPicturesModule
    if reads_grid(single):
        grid = read_grid(single, picture_size)
        shape, positions = (3, grid.height, grid.width), grid.positions
        wrapped = GridPicturesModule(single, grid, token)
        processor = None if processor is None else GridProcessor(processor, grid)
        images = None if processor is None else processor.images
    else:
        if picture_size is not None:
            raise SourceError(f"{type(module).__name__} determines the size of its pictures: leave --picture-size out")
        images = None if processor is None else read_picture_steps(processor.image_processor, 3)
        shape = (3, *(_config_size(module.config) if images is None else images.shape or ()))
        positions, has_axis = _count_positions(single, _draw_pixels(shape))
        wrapped = PicturesModule(single, has_axis)
    placeholder = Placeholder(token, positions)
    if processor is not None:
        assert images is not None
        placeholder = _with_texts(placeholder, processor, images)
    example = {PIXELS: _draw_pixels(shape).expand(2, 1, *shape).clone(), IDS: _example_ids(placeholder)}
    _check_looks_back(wrapped, example)
    limits = [getattr(text_config, limit, None) for limit in ("max_position_embeddings", "n_positions")]
    limit = min((n for n in limits if isinstance(n, int) and n > 0), default=None)
    longest = positions if processor is None else _longest_picture(placeholder, processor.tokenizer)
    default_length = TEXT_TOKENS + DEFAULT_PICTURES * longest
    source = Source(
        made_example=True,
        module=Adapter(wrapped, list(example), fixed_arguments=FIXED),
        example=example,
        step_input=IDS,
        name=name,
        task=ANSWERS_PICTURES,
        axes={PIXELS: (0, 1)},
        special_tokens=special,
        generation_defaults=defaults(limit),
        max_length=min(limit, default_length) if limit else default_length,
        placeholders={PIXELS: placeholder},
        preprocessing={} if images is None else {PIXELS: images.manifest_entry},
        tokenizers={} if processor is None else {IDS: read_prompt_tokenizer(processor.tokenizer)},
        chat_template=_chat_template(processor),
        chat_tokens={} if processor is None else _chat_tokens(processor.tokenizer),
        prompt_pipeline=None if processor is None else make_prompt_pipeline(processor),
    )
    if isinstance(wrapped, GridPicturesModule) and processor is not None:
        check_grid(wrapped, single, processor)
    elif processor is not None:
        _check_inputs(source, single, processor)
    return source


def make_prompt_pipeline(processor: Any) -> PromptPipeline:
    """Make the processor's own way from a text and its pictures to the inputs of a row."""

    def inputs(text: str, pictures: Sequence[Any]) -> dict[str, np.ndarray]:
        read = _processed(processor, text, pictures)
        ids = np.asarray(read[IDS])[0]
        pixels = np.asarray(read[PIXELS], np.float32) if pictures else np.zeros((0,), np.float32)
        return {IDS: ids, PIXELS: pixels.reshape(-1, *pixels.shape[-3:]) if pictures else pixels}

    return inputs


def _processed(processor: Any, text: str, pictures: Sequence[Any], **options: Any) -> Mapping[str, Any]:
    """Return the outputs of the processor. Raises SourceError if it fails."""
    try:
        read: Mapping[str, Any] = processor(text=[text], images=list(pictures) or None, return_tensors=None, **options)
    except Exception as error:  # a processor may raise anything
        raise SourceError(
            f"the processor {type(processor).__name__} does not read a text with {len(pictures)} pictures: {error}"
        ) from error
    return read


def _with_texts(placeholder: Placeholder, processor: Any, images: ImagePreprocessor) -> Placeholder:
    """Add the marker of a picture in a text, and the texts that replace it.

    images: of the file. Raises SourceError if the number of positions depends on the picture other than by its tiles.
    """
    marker = getattr(processor, "image_token", None)
    if not isinstance(marker, str) or not marker:
        raise SourceError(
            f"the processor {type(processor).__name__} names no image_token, the text that stands for a picture in a "
            "prompt"
        )
    placeholder = replace(placeholder, marker=marker)
    replacements = {_replacement(placeholder, processor, picture, 1) for picture in _one_tile_pictures(images)}
    if len(replacements) > 1:
        raise SourceError(
            f"the text by which the processor {type(processor).__name__} replaces a picture depends on the picture"
        )
    return replace(
        placeholder, replacement=next(iter(replacements), ""), grids=_texts_of_grids(placeholder, processor, images)
    )


def _one_tile_pictures(images: ImagePreprocessor) -> list[Any]:
    """Draw the pictures that are not cut into tiles."""
    pictures = [picture.convert("RGB") for picture in draw_pictures()]
    if not images.splits:
        return pictures
    size = reachable_grids(images.size, images.tile).get(NO_GRID)
    return [] if size is None else [pictures[0].resize(size[::-1])]


def _texts_of_grids(placeholder: Placeholder, processor: Any, images: ImagePreprocessor) -> dict[str, tuple[str, ...]]:
    """Return the texts around the tiles of each grid that a picture can have. Raises SourceError if they do not fit."""
    if not images.splits:
        return {}
    sizes = reachable_grids(images.size, images.tile)
    sizes.pop(NO_GRID, None)
    if len(sizes) > MAX_GRIDS:
        raise SourceError(f"pictures are cut into {len(sizes)} grids of tiles, and at most {MAX_GRIDS} are supported")
    picture = draw_pictures()[0].convert("RGB")
    texts = {}
    for grid, (height, width) in sizes.items():
        tiles = grid[0] * grid[1] + 1
        text = _replacement(placeholder, processor, picture.resize((width, height)), tiles)
        between = tuple(text.split(placeholder.marker * placeholder.positions))
        if len(between) != tiles + 1 or any(placeholder.marker in part for part in between):
            raise SourceError(
                f"the processor {type(processor).__name__} does not keep the placeholders of each tile together"
            )
        texts[grid_name(grid)] = between
    return texts


def _replacement(placeholder: Placeholder, processor: Any, picture: Any, tiles: int) -> str:
    """Return the text by which the processor replaces the marker of a picture of a number of tiles.

    Raises SourceError if the picture gets another number of placeholders.
    """
    kind = type(processor).__name__
    read = _processed(processor, placeholder.marker, [picture], return_text_replacement_offsets=True)
    ((offsets, *_), *others) = read.get("text_replacement_offsets") or [[None]]
    if offsets is None or others:
        raise SourceError(f"the processor {kind} does not say which text stands for a picture in a prompt")
    placeholders = int((np.asarray(read[IDS]) == placeholder.token_id).sum())
    if placeholders != tiles * placeholder.positions:
        raise SourceError(
            f"the processor {kind} gives a picture of {picture.width} × {picture.height} pixels {placeholders} "
            f"placeholders, and the model computes {tiles * placeholder.positions} embeddings for {tiles} tiles of the "
            "one size that is supported: pictures that keep their size, or whose tiles the file does not know, are "
            "not supported: switch that off in the processor's config if it has a setting for it (such as "
            "crop_to_patches)"
        )
    return str(offsets["replacement"])


def _longest_picture(placeholder: Placeholder, tokenizer: Any) -> int:
    """Return the greatest number of tokens of a picture."""
    texts = [(placeholder.marker * placeholder.positions).join(between) for between in placeholder.grids.values()]
    counts = [len(tokenizer(text)[IDS]) for text in (placeholder.replacement, *texts)]
    return max(placeholder.positions, *counts)


def _check_inputs(source: Source, module: Any, processor: Any) -> None:
    """Raise SourceError if the model gives other logits with an output of the processor that the file does not have."""
    placeholder = source.placeholders[PIXELS]
    text = f"{placeholder.marker} a"
    read = _processed(processor, text, [draw_pictures()[0].convert("RGB")])
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
            "positions, or give pictures positions of their own, are not supported"
        )


def _draw_pixels(shape: tuple[int, ...]) -> torch.Tensor:
    """Draw the pixels of one picture, (1, channels, height, width)."""
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
    """Return the embeddings that a picture gets, and whether the model takes an axis of the pictures of a row.

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
        f"{type(module).__name__} computes no embeddings of a picture from its pixels alone ({failures[0]}): models "
        "that need the sizes of pictures or of their tiles are not supported"
    )


def _example_ids(placeholder: Placeholder) -> torch.Tensor:
    """Return two rows of ids, each with the placeholders of one picture."""
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
