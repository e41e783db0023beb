"""Images as patches of a grid, whose size a model reads from its input `image_grid_thw`, at one size for a file.

transformers' processors keep the size of an image, rounded to whole patches, so that each image has another grid. A
file has one grid. It resizes each image to the size of the grid, with the processor's filter. For images that the
processor itself would bring to this size, both compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tformer_export.sources.base import eval_mode
from tformer_export.sources.call.signature import parameters_of
from tformer_export.sources.hugging_face.images import converts_itself, draw_images
from tformer_export.sources.image_axes.grid import GridImagesModule, PatchGrid
from tformer_export.sources.image_axes.one_size import IDS, PIXELS
from tformer_runtime.base.errors import SourceError
from tformer_runtime.preprocess.images import FILTERS, MAX_PIXELS, ImagePreprocessor

GRID = "image_grid_thw"


def reads_grid(module: Any) -> bool:
    """Return whether a transformers model needs the grids of its images."""
    return GRID in parameters_of(module)


def read_grid(module: Any, image_size: tuple[int, int] | None) -> PatchGrid:
    """Return the grid of images of one size, height and width in pixels.

    Raises SourceError without a size, for one that is not a multiple of the patches, and for a config that names no
    patches.
    """
    vision = module.config.vision_config
    names = ("patch_size", "spatial_merge_size", "temporal_patch_size")
    numbers: list[Any] = [getattr(vision, name, None) for name in names]
    if not all(isinstance(number, int) for number in numbers):
        raise SourceError(f"the vision config of {type(module).__name__} does not name {', '.join(names)}")
    patch, merge, frames = map(int, numbers)
    window = int(getattr(vision, "window_size", None) or 0) // (patch * merge)
    unit = patch * merge * max(1, window)
    if image_size is None:
        raise SourceError(
            f"{type(module).__name__} reads images at their own size, and a file reads them at one size, to which it "
            "resizes them: give it with --image-size HEIGHTxWIDTH (image_size=(height, width)), in multiples of "
            f"{unit} pixels"
        )
    height, width = image_size
    if min(height, width) < unit or height % unit or width % unit:
        raise SourceError(f"an image size has multiples of {unit} pixels, not {height}x{width}")
    if height * width > MAX_PIXELS:
        raise SourceError(f"an image size has at most {MAX_PIXELS:,} pixels, not {height}x{width}")
    return PatchGrid(patch, merge, frames, height // patch, width // patch, window)


class GridProcessor:
    """A processor of transformers, of texts and images, that resizes images to the size of a grid first."""

    def __init__(self, processor: Any, grid: PatchGrid) -> None:
        """Raises SourceError if the processor changes the size, or does something else than the file."""
        self._processor, self._grid = processor, grid
        self.tokenizer, self.chat_template = processor.tokenizer, getattr(processor, "chat_template", None)
        self.image_token = getattr(processor, "image_token", None)
        settings = processor.image_processor
        if getattr(settings, "resample", None) not in range(len(FILTERS)):
            raise SourceError(f"the image processor {type(settings).__name__} names no filter of Pillow (resample)")
        self.preprocessor = ImagePreprocessor(
            size={"height": grid.height, "width": grid.width},
            resample=FILTERS[int(settings.resample)],
            scale=float(settings.rescale_factor) if settings.do_rescale else None,
            mean=tuple(settings.image_mean) if settings.do_normalize else (),
            std=tuple(settings.image_std) if settings.do_normalize else (),
            on_white=converts_itself(settings, 3) and _is_on_white(settings, (grid.width, grid.height)),
        )

    def __call__(self, text: Sequence[str], images: Sequence[Any] | None, **options: Any) -> Mapping[str, Any]:
        """Return the ids and, for images, the pixels (images, channels, height, width)."""
        read = dict(self.raw(text, images, **options))
        if images:
            grids, expected = np.asarray(read[GRID]), (1, self._grid.rows, self._grid.columns)
            if any(tuple(grid) != expected for grid in grids):
                raise SourceError(
                    f"the processor brings an image of {self._grid.height}x{self._grid.width} pixels to another size, "
                    "by its limits on the number of pixels: choose an image size within these"
                )
            patches = np.asarray(read[PIXELS], np.float32)
            patches = patches.reshape(len(images), -1, patches.shape[-1])
            read[PIXELS] = self._grid.pixels(torch.as_tensor(patches)).numpy()
        return {name: value for name, value in read.items() if name in (IDS, PIXELS, "text_replacement_offsets")}

    def raw(self, text: Sequence[str], images: Sequence[Any] | None, **options: Any) -> Mapping[str, Any]:
        """Return the processor's own outputs for images of the size."""
        size, resample = (self._grid.width, self._grid.height), FILTERS.index(self.preprocessor.resample)
        resized = [self.preprocessor.converted(image).resize(size, resample) for image in images or ()]
        read: Mapping[str, Any] = self._processor(text=list(text), images=resized or None, **options)
        return read


def _is_on_white(processor: Any, size: tuple[int, int]) -> bool:
    """Return whether an image processor lays transparent images on white. Versions of transformers differ."""
    from PIL import Image

    clear, white = Image.new("RGBA", size, (0, 0, 0, 0)), Image.new("RGB", size, "white")
    laid, expected = (np.asarray(processor(images=image)[PIXELS]) for image in (clear, white))
    return np.array_equal(laid, expected)


def check_grid(wrapped: GridImagesModule, module: Any, processor: GridProcessor) -> None:
    """Raise SourceError if the model gives other logits with all outputs of its processor."""
    text, images = f"a{processor.image_token}b{processor.image_token}c", draw_images()[:2]
    raw = processor.raw([text], images, return_tensors="pt")
    inputs = {name: value for name, value in raw.items() if name in parameters_of(module)}
    pixels = torch.as_tensor(processor([text], images)[PIXELS])
    with eval_mode(wrapped), torch.no_grad():
        try:
            expected = module(**inputs, use_cache=False).logits
        except Exception as error:  # the module may raise anything
            raise SourceError(f"{type(module).__name__} fails on the inputs of its processor: {error}") from error
        logits = wrapped(pixels[None], inputs[IDS], use_cache=False).logits
    if not torch.allclose(expected, logits, rtol=1e-3, atol=1e-3):
        raise SourceError(
            f"{type(module).__name__} gives the tokens of a prompt with images other positions than those of a grid "
            "of one frame: it is not supported"
        )
