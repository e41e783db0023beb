"""From an image file to pixels, as transformers' image processors compute them.

resize (filters of Pillow) → center crop or tiles → x · scale → (x - mean) / std. Each step is optional. An image is
first rotated by its EXIF data and converted with Pillow's `convert("RGB")`, as in transformers' pipelines. Transparent
images are laid on white for processors that convert images themselves.
"""

from __future__ import annotations

import io
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from tformer_runtime.base.errors import InputError, ModelFileError, OutOfMemoryError
from tformer_runtime.base.extras import import_optional
from tformer_runtime.base.special_files import endless_reason
from tformer_runtime.base.validation import is_count
from tformer_runtime.format.manifest import IMAGE, Preprocessing
from tformer_runtime.format.typed_json import read_typed
from tformer_runtime.preprocess.tiles import MAX_EDGE, NO_GRID, Grid, cut, grid_of, rescaled_size, whole_tiles_size

if TYPE_CHECKING:
    from PIL.Image import Image

FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
SIZE_NAMES = (  # the sets of keys of a size
    {"height", "width"},
    {"shortest_edge"},
    {"shortest_edge", "longest_edge"},
    {"max_height", "max_width"},
    {"longest_edge"},  # with tiles
)
MAX_PIXELS = 61_000_000  # two copies of 4 bytes take 465 MiB; a small compressed file could fill the memory
MAX_IMAGE_EDGE = 1 << 20  # Pillow keeps an address for each row, and numbers for each column that it resizes
MAX_COPIED_PIXELS = 25_000_000  # of the formats whose decoders hold four copies
COPYING_FORMATS = {"WEBP", "AVIF", "HEIF", "JPEG2000"}
MAX_RESIZED_PIXELS = 1 << 25  # of an image before its crop. A long thin image grows by far with its shorter edge.
MAX_MODEL_PIXELS = 1 << 24  # of the pixels of a model, which take 12 bytes each
MAX_TILES = 1 << 14
CHUNK_PIXELS = 1 << 20  # that are float64 at one time
OTHER_PROGRAMS = {"EPS", "WMF"}  # formats that Pillow gives to Ghostscript and to Windows
MAX_TARGET_EDGE = 2**14  # of a resized or cropped image
Edge = Annotated[int, Meta(ge=1, le=MAX_TARGET_EDGE)]

_open_lock = threading.Lock()  # warning filters are global


class ImagePreprocessor(Struct, frozen=True):
    """How images become pixels. The fields are those of the manifest.

    size: the target of resizing, with keys of `SIZE_NAMES`; empty for none.
    resample: the filter, one of `FILTERS`.
    crop: height and width of the center crop, which pads smaller images with zeros; empty for none.
    scale: the factor of values from 0 to 255; None for none.
    mean, std: of each channel; empty for none.
    channels: 3 (RGB) or 1 (gray).
    tile: the edge of square tiles into which the resized image is made; 0 for none.
    splits: whether an image is cut into tiles (`tiles.cut`). Otherwise it is resized to one.
    on_white: whether a transparent image is laid on white. Otherwise its colours are taken as they are.
    """

    size: Mapping[str, Edge] = field(default_factory=dict)
    resample: str = "bilinear"
    crop: tuple[Edge, ...] = ()
    scale: float | None = 1 / 255
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    channels: int = 3
    tile: Annotated[int, Meta(ge=0, le=MAX_TARGET_EDGE)] = 0
    splits: bool = False
    on_white: bool = False

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width of the pixels; None if they depend on the image."""
        if self.tile:
            return self.tile, self.tile
        if self.crop:
            return self.crop[0], self.crop[1]
        return (self.size["height"], self.size["width"]) if "height" in self.size else None

    def pixels(self, image: Any) -> npt.NDArray[Any]:
        """Return the pixels of an image, (channels, height, width), as float32; as uint8 without scale and mean.

        Arguments and errors: see `tiles`. An image in tiles must have one.
        """
        pixels: npt.NDArray[Any] = self.tiles(image)[0][0]
        return pixels

    def tiles(self, image: Any) -> tuple[npt.NDArray[Any], Grid]:
        """Return the pixels of an image's tiles, (tiles, channels, height, width), and its grid.

        An image without tiles is one. The type is float32; uint8 without scale and mean.

        image: the name or the bytes of a file, a Pillow image, or an array of uint8, (height, width) or (height, width,
            channels).
        Raise InputError for an image that cannot be read, MissingExtraError without Pillow. Cost: linear in the pixels.
        """
        name = str(os.fspath(image)) if isinstance(image, (str, os.PathLike)) else "the image"
        if not name or "\0" in name:
            raise InputError(f"{name!r} is not a name of a file: give that of an image")
        import_optional("PIL.Image", "reading images needs Pillow", "image")
        with _errors_as_input_errors(name):
            opened = _open(image, name)
            opened.load()
            _with_pixels(opened, name)  # an image in an .ico file has a size of its own
            converted = self.converted(opened)
        resized, grid = self._resize(converted, name), NO_GRID
        if not self.tile:
            return self._values(resized)[None], grid
        parts = [resized]
        if self.splits:
            resized = self._resize_to(resized, whole_tiles_size(self.tile, resized.height, resized.width), name)
            parts, grid = cut(resized, self.tile, FILTERS.index(self.resample)), grid_of(self.tile, *resized.size[::-1])
        whole = [self._resize_to(part, (self.tile, self.tile), name) for part in parts]
        return np.stack([self._values(part) for part in whole]), grid

    def converted(self, image: Image) -> Image:
        """Return a Pillow image in the channels of the model."""
        mode = "RGB" if self.channels == 3 else "L"
        if self.on_white and ("A" in image.getbands() or image.info.get("transparency") is not None):
            image = _on_white(image)
        return image if image.mode == mode else image.convert(mode)

    def _values(self, image: Image) -> npt.NDArray[Any]:
        """Return the numbers of a resized image, (channels, height, width)."""
        array = np.asarray(image)
        cropped = self._crop(array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0))
        if self.scale is None and not self.mean:
            return np.ascontiguousarray(cropped)
        values: npt.NDArray[Any] = np.empty(cropped.shape, np.float32)
        height, width = cropped.shape[1:]
        step = max(1, CHUNK_PIXELS // width)
        for row in range(0, height, step):
            values[:, row : row + step] = self._scaled(cropped[:, row : row + step])
        return values

    def _scaled(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the numbers of rows of pixels, (channels, rows, width)."""
        if self.scale is not None:
            values = (values.astype(np.float64) * self.scale).astype(np.float32)
        if self.mean:
            mean, std = (np.array(v, np.float32)[:, None, None] for v in (self.mean, self.std))
            values = (values.astype(np.float32) - mean) / std
        return values

    def _resize(self, image: Image, name: str) -> Image:
        if not self.size:
            if not self.crop and image.width * image.height > MAX_MODEL_PIXELS:
                size = f"{image.width} × {image.height} pixels"
                raise InputError(f"{name} is {size}, and the model reads at most {MAX_MODEL_PIXELS:,}: make it smaller")
            return image
        return self._resize_to(image, target_size(self.size, image.height, image.width), name)

    def _resize_to(self, image: Image, size: tuple[int, int], name: str) -> Image:
        """Resize an image to a height and a width."""
        height, width = size
        if image.size == (width, height) and self.tile:
            return image
        if min(height, width) < 1 or height * width > (MAX_RESIZED_PIXELS if self.crop else MAX_MODEL_PIXELS):
            raise InputError(
                f"{name} is {image.width} × {image.height} pixels and would be resized to {width} × {height}: cut "
                "it to a shape that is less long"
            )
        return image.resize((width, height), resample=FILTERS.index(self.resample))

    def _crop(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Crop (channels, height, width) at the center. Pad a smaller image with zeros, an odd one before it."""
        if not self.crop:
            return values
        for axis, target in enumerate(self.crop, 1):
            size = values.shape[axis]
            if target > size:
                before, padding = (target - size + 1) // 2, [(0, 0)] * 3
                padding[axis] = (before, target - size - before)
                values = np.pad(values, padding)
            else:
                begin = (size - target) // 2
                values = values.take(range(begin, begin + target), axis)
        return values

    @property
    def manifest_entry(self) -> Preprocessing:
        """The entry of the manifest."""
        return Preprocessing(IMAGE, asdict(self))

    @classmethod
    def of(cls, entry: Preprocessing) -> ImagePreprocessor:
        """Return the preprocessor of an entry of the manifest. Raise ModelFileError for a damaged entry."""
        damaged = "the image settings of the file are damaged"
        images = read_typed(cls, entry.numbers, damaged)
        try:
            images.check()
        except (TypeError, ValueError) as error:
            raise ModelFileError(f"{damaged} ({error}): export the model again") from error
        return images

    def check(self) -> None:
        """Raise ValueError for impossible values. Its text is for the author of the values."""
        if self.size and set(self.size) not in SIZE_NAMES:
            known = "; ".join(", ".join(sorted(names)) for names in SIZE_NAMES)
            raise ValueError(f"a size has the names {known}, not {', '.join(self.size)}")
        if not all(is_count(n) for n in (*self.size.values(), *self.crop)) or len(self.crop) not in (0, 2):
            raise ValueError("sizes are whole numbers of 1 or more, two of them for a crop: height and width")
        if self.tile and (not is_count(self.tile) or self.crop or set(self.size) != {"longest_edge"}):
            raise ValueError("tiles have a whole edge of 1 or more, follow a longest edge and are not cropped")
        areas = [self.crop, [self.size[name] for name in ("height", "width") if name in self.size]]
        if any(len(edges) == 2 and edges[0] * edges[1] > MAX_MODEL_PIXELS for edges in areas):
            raise ValueError(f"the pixels of a model are at most {MAX_MODEL_PIXELS:,}")
        if self.tile and (min(self.size["longest_edge"], MAX_EDGE) // self.tile) ** 2 > MAX_TILES:
            raise ValueError(f"an image has at most {MAX_TILES:,} tiles")
        if self.tile == 0 and set(self.size) == {"longest_edge"}:
            raise ValueError("a longest edge alone is for tiles")
        if self.resample not in FILTERS:
            raise ValueError(f"resample is one of {', '.join(FILTERS)}, not {self.resample!r}")
        if self.channels not in (1, 3):
            raise ValueError(f"images have 3 channels or 1, not {self.channels}")
        numbers = (*self.mean, *self.std, *(() if self.scale is None else (self.scale,)))
        if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
            raise ValueError("scale, mean and std are finite numbers")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.channels) or not all(self.std):
            raise ValueError(f"mean and std have a number for each of {self.channels} channels, no std of them 0")


def _on_white(image: Image) -> Image:
    """Return a transparent image on white, in RGB. Some rows are converted at a time, which need 12 bytes a pixel."""
    from PIL import Image as Pillow

    result = Pillow.new("RGB", image.size)
    step = max(1, CHUNK_PIXELS // image.width)
    for top in range(0, image.height, step):
        box = (0, top, image.width, min(image.height, top + step))
        rows = image.crop(box).convert("RGBA")
        result.paste(Pillow.alpha_composite(Pillow.new("RGBA", rows.size, "white"), rows).convert("RGB"), box)
    return result


def image_inputs(preprocessing: Mapping[str, Preprocessing]) -> dict[str, ImagePreprocessor]:
    """Return the preprocessors of the inputs that read images, by name. Raise ModelFileError for a damaged entry."""
    return {name: ImagePreprocessor.of(entry) for name, entry in preprocessing.items() if entry.kind == IMAGE}


def is_image(value: Any) -> bool:
    """Return whether a value is an image. Arrays of other types than uint8, and lists of numbers, are pixels."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype == np.uint8)
    return not isinstance(value, (list, tuple)) or any(isinstance(part, (str, bytes, os.PathLike)) for part in value)


def target_size(size: Mapping[str, int], height: int, width: int) -> tuple[int, int]:
    """Return the height and width after resizing, by the formulas of transformers with their roundings.

    https://github.com/huggingface/transformers, image_transforms.py, get_resize_output_image_size and
    get_size_with_aspect_ratio; image_utils.py, get_image_size_for_max_height_width
    """
    if "height" in size:
        return size["height"], size["width"]
    if "max_height" in size:
        ratio = min(size["max_height"] / height, size["max_width"] / width)
        return int(height * ratio), int(width * ratio)
    if "shortest_edge" not in size:
        return rescaled_size(size["longest_edge"], height, width)
    short, long = min(height, width), max(height, width)
    edge, exact = size["shortest_edge"], float(size["shortest_edge"])
    max_edge = size.get("longest_edge")
    if max_edge is not None and long / short * edge > max_edge:
        exact = max_edge * short / long
        edge = round(exact)
    if max_edge is not None and short == edge:
        return height, width
    other_edge = int(exact * long / short)
    return (edge, other_edge) if height <= width else (other_edge, edge)


def _open(source: Any, name: str) -> Image:
    """Open an image and rotate it by its EXIF data. Pillow may decode it later."""
    from PIL import Image, ImageOps

    if isinstance(source, Image.Image):
        image = source
    elif isinstance(source, np.ndarray):
        if source.ndim not in (2, 3) or source.shape[2:] not in ((), (1,), (3,), (4,)):
            raise InputError(
                "an array of uint8 is an image of (height, width) or (height, width, channels), 1, 3 or 4 of them, and "
                f"this is {source.shape}"
            )
        image = Image.fromarray(source[..., 0] if source.shape[2:] == (1,) else source)
    elif isinstance(source, (str, os.PathLike, bytes)):
        file = io.BytesIO(source) if isinstance(source, bytes) else Path(source)
        if isinstance(file, Path) and (reason := endless_reason(file, name)) is not None:
            raise InputError(reason)
        with _open_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the check below refuses such an image
            Image.init()
            image = Image.open(file, formats=[kind for kind in Image.ID if kind not in OTHER_PROGRAMS])
        ImageOps.exif_transpose(_with_pixels(image, name), in_place=True)  # which copies no image that is upright
        return image
    elif isinstance(source, (list, tuple)) and len(source) == 2:
        raise InputError("the input is two images: give one; only --similarity takes pairs")
    else:
        raise InputError(
            "an image is the name of a file, its bytes, a Pillow image or an array of uint8, not "
            f"{type(source).__name__}"
        )
    upright = ImageOps.exif_transpose(_with_pixels(image, name))
    return image if upright is None else upright


def _with_pixels(image: Image, name: str) -> Image:
    """Return an image. Raise InputError for one with too many pixels, or with none."""
    limit = MAX_COPIED_PIXELS if image.format in COPYING_FORMATS else MAX_PIXELS
    if image.width * image.height > limit:
        raise _too_large(f"{name} is {image.width} × {image.height} pixels", limit)
    if not image.width * image.height:
        raise InputError(f"{name} has no pixels")
    if max(image.size) > MAX_IMAGE_EDGE:
        raise InputError(
            f"{name} is {image.width} × {image.height} pixels, and an edge has at most {MAX_IMAGE_EDGE:,} of them: "
            "cut the image"
        )
    return image


def _too_large(fact: str, limit: int = MAX_PIXELS) -> InputError:
    return InputError(f"{fact}, and at most {limit:,} are read: make it smaller first")


@contextmanager
def _errors_as_input_errors(name: str) -> Iterator[None]:
    """Replace the errors of Pillow by an InputError that names the image."""
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"{name} is too large for the memory there is: make it smaller") from error
    except Exception as error:  # decoders raise many types
        from PIL import Image, UnidentifiedImageError

        if isinstance(error, Image.DecompressionBombError):
            raise _too_large(f"{name} has too many pixels") from error
        if isinstance(error, UnidentifiedImageError):
            raise InputError(f"{name} is not an image that Pillow can read") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise InputError(f"{name} cannot be read: {error.strerror or error}") from error
        raise InputError(f"{name} is a damaged image: {error}") from error
