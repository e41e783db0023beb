"""Images in a prompt: the text with a marker for each image, and the pixels of all.

A prompt is a text, ids, or a mapping from the names of the inputs: {"input_ids": "… <image> …", "pixel_values":
[image, …]}. The images take the places of the markers in their order. Ids hold the placeholders of each image
already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tformer_runtime.base.arrays import Array, Ints
from tformer_runtime.base.errors import InputError, ModelFileError
from tformer_runtime.format.manifest import Manifest, Placeholder, RequestInput
from tformer_runtime.preprocess.images import ImagePreprocessor, is_image
from tformer_runtime.preprocess.tiles import NO_GRID, Grid, grid_name


class PromptItems(Struct, frozen=True):
    """The input that holds the images of prompts.

    preprocessor: from an image to pixels; None in a file that takes pixels alone.
    max_length: tokens that the model holds.
    """

    spec: RequestInput
    placeholder: Placeholder
    preprocessor: ImagePreprocessor | None
    max_length: int

    @classmethod
    def of(cls, manifest: Manifest, preprocessors: Mapping[str, ImagePreprocessor]) -> PromptItems | None:
        """Return the input of a file; None if it reads none. Raise ModelFileError if it is damaged."""
        if not manifest.placeholders:
            return None
        specs = {spec.name: spec for spec in manifest.encode.inputs} if manifest.encode else {}
        ((name, placeholder), *others) = manifest.placeholders.items()
        if others or list(specs) != [name] or placeholder.positions < 1 or manifest.decode is None:
            raise ModelFileError("the file's placeholders do not fit its inputs: export the model again")
        return cls(specs[name], placeholder, preprocessors.get(name), manifest.max_length)

    def read(self, input: Any, step: str) -> tuple[Any, dict[str, Array]]:
        """Return the text or the ids of an input, with the placeholders of its images, and the pixels.

        step: the name of the input for the text or the ids.
        Raise InputError for an impossible input.
        """
        if isinstance(input, Mapping):
            if step not in input or not set(input) <= {step, self.spec.name}:
                raise InputError(
                    f"the model reads {step} and, if there are images, {self.spec.name}, not "
                    f"{', '.join(map(str, input)) or 'nothing'}"
                )
            prompt, images = input[step], input.get(self.spec.name)
        else:
            prompt, images = input, None
        values = self._listed(images)
        self._check_positions(len(values), len(values))  # before any image is decoded
        tiles, grids = self._tiles(values)
        if isinstance(prompt, str):
            prompt = self._expanded(prompt, grids)
        return prompt, {self.spec.name: tiles}

    def _check_positions(self, images: int, tiles: int) -> None:
        """Raise InputError for images that the model does not hold."""
        positions = tiles * self.placeholder.positions
        if positions >= self.max_length:
            raise InputError(
                f"{images} images take {positions} tokens and the model holds {self.max_length}: give fewer"
            )

    def check(self, ids: Ints, sources: Mapping[str, Array]) -> None:
        """Raise InputError unless the ids hold the placeholders of the images."""
        count, images = int((ids == self.placeholder.token_id).sum()), len(sources[self.spec.name])
        if count != images * self.placeholder.positions:
            raise InputError(
                f"the ids hold {count} placeholders (id {self.placeholder.token_id}), and {images} images need "
                f"{images * self.placeholder.positions}, {self.placeholder.positions} each"
            )

    def _listed(self, images: Any) -> Sequence[Any]:
        """Return a sequence of images."""
        if images is None:
            return ()
        is_one = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim < 4
        if isinstance(images, (str, bytes, Mapping)) or is_one or not hasattr(images, "__len__"):
            raise InputError(f"{self.spec.name} takes a list of images; a single image is a list of one: [image]")
        return images  # type: ignore[no-any-return]

    def _expanded(self, text: str, grids: Sequence[Grid]) -> str:
        """Return a text with the placeholders of each image in the place of its marker."""
        marker = self.placeholder.marker
        parts = text.split(marker) if marker else [text]
        if len(parts) - 1 != len(grids):
            raise InputError(
                f"the text names {len(parts) - 1} images ({marker}), and {len(grids)} are given: write {marker} "
                "where each image belongs, or use the chat template of the file"
            )
        replacements = [self._replacement(grid) for grid in grids]
        return parts[0] + "".join(text + part for text, part in zip(replacements, parts[1:], strict=True))

    def _replacement(self, grid: Grid) -> str:
        """Return the text that stands for an image of a grid."""
        if grid == NO_GRID:
            return self.placeholder.replacement
        between = self.placeholder.grids.get(grid_name(grid))
        if between is None:
            raise InputError(
                f"an image becomes {grid[0]} × {grid[1]} tiles, which the model does not read: change its shape"
            )
        return (self.placeholder.marker * self.placeholder.positions).join(between)

    def _tiles(self, images: Sequence[Any]) -> tuple[Array, list[Grid]]:
        """Return the pixels of the tiles of all images, (tiles, …), and the grid of each image.

        Raise InputError with the number of a bad image.
        """
        shape = tuple(self.spec.shape[2:])
        tiles, grids = [np.zeros((0, *map(int, shape)), self.spec.dtype)], []
        for number, image in enumerate(images, 1):
            try:
                pixels, grid = self._pixels_of(image, shape)
            except InputError as error:
                raise InputError(f"image {number}: {error}" if len(images) > 1 else str(error)) from error
            tiles.append(pixels)
            grids.append(grid)
            self._check_positions(len(images), sum(map(len, tiles)))
        return np.concatenate(tiles).astype(self.spec.dtype, copy=False), grids

    def _pixels_of(self, image: Any, shape: tuple[int | str, ...]) -> tuple[Array, Grid]:
        """Return the tiles of an image, and its grid. Pixels of the caller are one tile."""
        if is_image(image):
            if self.preprocessor is None:
                raise InputError(f"the file does not say how images become {self.spec.name}: give pixels {shape}")
            return self.preprocessor.tiles(image)
        try:
            pixels = np.asarray(image, self.spec.dtype)
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.spec.name} takes images or arrays of {self.spec.dtype}: {error}") from error
        if pixels.shape != shape or not np.isfinite(pixels).all():
            raise InputError(f"{self.spec.name} takes finite numbers {shape}, and this is {pixels.shape}")
        return pixels[None], NO_GRID
