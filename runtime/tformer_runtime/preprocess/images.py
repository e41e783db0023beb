"""Images: from a picture in a file to the pixels that a model reads, as transformers' image processors make them.

resize (Pillow's filters) → crop at the centre → x · scale → (x - mean) / std, in that order, as far as asked for. A
file's picture is turned as its EXIF data say and converted to RGB first, as transformers' pipelines do: gray values,
palettes, CMYK, 16 bits and alpha become what Pillow's `convert("RGB")` makes of them.
"""

from __future__ import annotations

import io
import math
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tformer_runtime.base.errors import InputError, ModelFileError, OutOfMemoryError
from tformer_runtime.base.extras import library
from tformer_runtime.format.manifest import IMAGE, Preparation

if TYPE_CHECKING:
    from PIL.Image import Image

FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
SIZES = (  # the names that a size may have
    {"height", "width"},
    {"shortest_edge"},
    {"shortest_edge", "longest_edge"},
    {"max_height", "max_width"},
)
MOST_PIXELS = 89_478_485  # of a picture, Pillow's own limit: 256 MiB of RGB; beyond, a small file may fill the memory

_opening = threading.Lock()  # the filters of warnings are the process's


@dataclass(frozen=True)
class Images:
    """How pictures become pixels.

    size: what they are resized to, by the names of `SIZES`; none: as they are. resample: Pillow's filter, of `FILTERS`.
    crop: height and width that are cut out of the middle, with zeros around what is smaller; none: nothing is.
    scale: what numbers from 0 to 255 are multiplied with; None: nothing. mean, std: of each channel; none: neither.
    channels: 3 (RGB) or 1 (gray).
    """

    size: Mapping[str, int] = field(default_factory=dict)
    resample: str = "bilinear"
    crop: tuple[int, ...] = ()
    scale: float | None = 1 / 255
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    channels: int = 3

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width of what is made of any picture; None if they follow from the picture's."""
        if self.crop:
            return self.crop[0], self.crop[1]
        return (self.size["height"], self.size["width"]) if "height" in self.size else None

    def pixels(self, given: Any) -> npt.NDArray[Any]:
        """(channels, height, width) of a picture: the name of a file, its bytes, a Pillow image or an array of uint8,
        (height, width) or (height, width, channels). float32, but where there is neither scale nor mean: then uint8.

        Linear in the picture's pixels. InputError tells what is wrong with it, MissingExtraError if there is no Pillow.
        """
        name = str(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else "the image"
        if not name or "\0" in name:
            raise InputError(f"{name!r} is no name of a file: give that of an image")
        library("PIL.Image", "reading images needs Pillow", "image")
        with _in_sentences(name):
            picture = _opened(given, name).convert("RGB" if self.channels == 3 else "L")
        array = np.asarray(self._resized(picture, name))
        values = self._cropped(array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0))
        if self.scale is not None:
            values = (values.astype(np.float64) * self.scale).astype(np.float32)
        if self.mean:
            mean, std = (np.array(v, np.float32)[:, None, None] for v in (self.mean, self.std))
            values = (values.astype(np.float32) - mean) / std
        return np.ascontiguousarray(values)

    def _resized(self, picture: Image, name: str) -> Image:
        if not self.size:
            return picture
        height, width = target_size(self.size, picture.height, picture.width)
        if min(height, width) < 1 or height * width > MOST_PIXELS:
            raise InputError(
                f"{name} is {picture.width} × {picture.height} pixels and would be resized to {width} × {height}: cut "
                "it to a shape that is less long"
            )
        return picture.resize((width, height), resample=FILTERS.index(self.resample))

    def _cropped(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The middle of (channels, height, width); where it is smaller, zeros around it, the odd one in front."""
        if not self.crop:
            return values
        for axis, wanted in enumerate(self.crop, 1):
            held = values.shape[axis]
            if wanted > held:
                before, around = (wanted - held + 1) // 2, [(0, 0)] * 3
                around[axis] = (before, wanted - held - before)
                values = np.pad(values, around)
            else:
                begin = (held - wanted) // 2
                values = values.take(range(begin, begin + wanted), axis)
        return values

    @property
    def preparation(self) -> Preparation:
        """As the manifest holds it."""
        return Preparation(IMAGE, asdict(self))

    @classmethod
    def of(cls, held: Preparation) -> Images:
        """ModelFileError if the file's numbers are damaged."""
        try:
            lists = {name: tuple(value) for name, value in held.numbers.items() if isinstance(value, (list, tuple))}
            made = cls(**{**held.numbers, **lists})
            made.check()
        except (TypeError, ValueError) as error:
            raise ModelFileError(
                f"what the file says of its images is damaged ({error}): export the model again"
            ) from error
        return made

    def check(self) -> None:
        """ValueError, in words for whoever described them, for numbers that cannot be."""
        if self.size and set(self.size) not in SIZES:
            known = "; ".join(", ".join(sorted(names)) for names in SIZES)
            raise ValueError(f"a size has the names {known}, not {', '.join(self.size)}")
        if not all(_whole(n) for n in (*self.size.values(), *self.crop)) or len(self.crop) not in (0, 2):
            raise ValueError("sizes are whole numbers of 1 or more, two of them for a crop: height and width")
        if self.resample not in FILTERS:
            raise ValueError(f"resample is one of {', '.join(FILTERS)}, not {self.resample!r}")
        if self.channels not in (1, 3):
            raise ValueError(f"images have 3 channels or 1, not {self.channels}")
        numbers = (*self.mean, *self.std, *(() if self.scale is None else (self.scale,)))
        if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
            raise ValueError("scale, mean and std are finite numbers")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.channels) or not all(self.std):
            raise ValueError(f"mean and std have a number for each of {self.channels} channels, no std of them 0")


def image_inputs(preparation: Mapping[str, Preparation]) -> dict[str, Images]:
    """The inputs that are made of pictures, by name. ModelFileError if what is said of them is damaged."""
    return {name: Images.of(how) for name, how in preparation.items() if how.kind == IMAGE}


def is_picture(given: Any) -> bool:
    """Whether a value is to be made pixels, and is not numbers that are: an array, or lists, of others than uint8."""
    if isinstance(given, np.ndarray):
        return bool(given.dtype == np.uint8)
    return not isinstance(given, (list, tuple)) or any(isinstance(part, (str, bytes, os.PathLike)) for part in given)


def target_size(size: Mapping[str, int], height: int, width: int) -> tuple[int, int]:
    """Height and width that a picture is resized to; transformers' formulas, their roundings included.

    https://github.com/huggingface/transformers, image_transforms.py, get_resize_output_image_size and
    get_size_with_aspect_ratio; image_utils.py, get_image_size_for_max_height_width
    """
    if "height" in size:
        return size["height"], size["width"]
    if "max_height" in size:
        ratio = min(size["max_height"] / height, size["max_width"] / width)
        return int(height * ratio), int(width * ratio)
    short, long = min(height, width), max(height, width)
    edge, exact = size["shortest_edge"], float(size["shortest_edge"])
    most = size.get("longest_edge")
    if most is not None and long / short * edge > most:
        exact = most * short / long
        edge = round(exact)
    if most is not None and short == edge:
        return height, width
    grown = int(exact * long / short)
    return (edge, grown) if height <= width else (grown, edge)


def _opened(given: Any, name: str) -> Image:
    """The picture, upright, decoded as far as Pillow wants to."""
    from PIL import Image, ImageOps

    if isinstance(given, Image.Image):
        picture = given
    elif isinstance(given, np.ndarray):
        if given.ndim not in (2, 3) or given.shape[2:] not in ((), (1,), (3,), (4,)):
            raise InputError(
                "an array of uint8 is an image of (height, width) or (height, width, channels), 1, 3 or 4 of them, and "
                f"this is {given.shape}"
            )
        picture = Image.fromarray(given[..., 0] if given.shape[2:] == (1,) else given)
    elif isinstance(given, (str, os.PathLike, bytes)):
        source = io.BytesIO(given) if isinstance(given, bytes) else Path(given)
        with _opening, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused below
            picture = Image.open(source)
    elif isinstance(given, (list, tuple)) and len(given) == 2:
        raise InputError("it is two images, and each is read by itself: give one, for pairs are of --similarity alone")
    else:
        raise InputError(
            "an image is the name of a file, its bytes, a Pillow image or an array of uint8, not "
            f"{type(given).__name__}"
        )
    if picture.width * picture.height > MOST_PIXELS:
        raise _too_large(f"{name} is {picture.width} × {picture.height} pixels")
    if not picture.width * picture.height:
        raise InputError(f"{name} has no pixels")
    upright = ImageOps.exif_transpose(picture)
    return picture if upright is None else upright


def _too_large(what: str) -> InputError:
    return InputError(f"{what}, and at most {MOST_PIXELS:,} are read: make it smaller first")


@contextmanager
def _in_sentences(name: str) -> Iterator[None]:
    """What Pillow raises, as one sentence that names the picture."""
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


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
