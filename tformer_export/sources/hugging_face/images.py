"""Preprocessing of images at export, for the user's own module or by a transformers image processor.

`export(…, preprocessor={"pixels": image(size=224, crop=…, mean=…, std=…)})` stores in the file how images become an
input: they are resized, cropped at the centre, scaled and normalised. The file then reads images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs

from tformer_export.sources.base import Source, as_float32
from tformer_export.sources.call.adapter import Adapter
from tformer_export.sources.hugging_face.single_pass import output_meaning_of
from tformer_export.sources.pooled_module import Pipeline
from tformer_export.sources.task_names import CLASSIFIES_IMAGES, FEATURES, IMAGE_FEATURES
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.base.extras import import_optional
from tformer_runtime.format.manifest import Preprocessing
from tformer_runtime.preprocess.images import FILTERS, ImagePreprocessor, image_inputs

IMAGE_SIZES = (
    (96, 128),
    (200, 61),
    (31, 33),
    (64, 64),
    (257, 640),
    (480, 99),
)  # (height, width) of the images that are drawn for the comparison
PILLOW_MODES = ("RGB", "L", "RGBA", "P", "CMYK", "1")  # of these images, in their order; 2 are transparent in part
ROUNDING_ERROR = 2.0**-22  # relative to the greatest pixel: of a product, a difference and a quotient in float32


def image(
    size: int | Sequence[int] | Mapping[str, int] | None = None,
    *,
    crop: int | Sequence[int] | None = None,
    resample: str = "bilinear",
    scale: float | None = 1 / 255,
    mean: float | Sequence[float] = (),
    std: float | Sequence[float] = (),
) -> Preprocessing:
    """Describe how images become an input (batch, channels, height, width).

    The example decides between 3 channels (RGB) and 1 channel (gray).

    size: height and width, one number for both, or transformers' names of a size, such as {"shortest_edge": 256}.
    crop: height and width of the centre crop, or one number for both.
    resample: Pillow's filter, "nearest", "lanczos", "bilinear", "bicubic", "box" or "hamming".
    scale: the factor of numbers from 0 to 255; None for no scaling.
    mean, std: one number for each channel or one for all: (x · scale - mean) / std.

    Raises OptionError for values that are not allowed.
    """
    try:
        mean, std = (tuple(map(float, np.ravel(value))) for value in (mean, std))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"mean and std are one number for all channels, or one for each, not {mean!r}, {std!r}"
        ) from error
    named = size if isinstance(size, Mapping) else zip(("height", "width"), _height_and_width(size), strict=False)
    preprocessor = ImagePreprocessor(
        dict(named), resample, _height_and_width(crop), scale, mean, std, channels=max(1, len(mean), len(std))
    )
    return _checked(preprocessor).manifest_entry


def with_preprocessing(source: Source, prepare: Any, classes: bool) -> Source:
    """Add preprocessing to a source.

    prepare: name of an input → `image(…)` or a transformers image processor; one of these alone is for the only input.
    classes: whether the caller describes the outputs as labels.

    Raises OptionError for preprocessing that does not fit the model, MissingExtraError without Pillow.
    """
    require_pillow()
    if not isinstance(prepare, Mapping):
        names = [name for name in source.caller_inputs if name != source.step_input]
        if len(names) != 1:
            raise OptionError(f"say which input is an image, preprocessor={{name: …}}: there are {', '.join(names)}")
        prepare = {names[0]: prepare}
    for name, preprocessor in prepare.items():
        if name not in source.example:
            raise OptionError(f"there is no input {name!r} to prepare: {', '.join(source.example)}")
        if isinstance(preprocessor, Preprocessing):
            source = _with_pixels(source, name, ImagePreprocessor.of(preprocessor))
        elif hasattr(preprocessor, "preprocess"):
            source = with_processor(source, preprocessor, name)
        else:
            raise OptionError(
                f"{name} is prepared by image(…) or an image processor, not {type(preprocessor).__name__}"
            )
    if source.step_input is None and source.task == FEATURES:
        source = replace(source, task=CLASSIFIES_IMAGES if classes else IMAGE_FEATURES)
    return source


def with_processor(source: Source, processor: Any, name: str | None = None) -> Source:
    """Add a transformers image processor to a source.

    The file gets the steps of the processor, and the processor itself is the reference for its verification.

    name: the input; by default the first.

    Raises SourceError for a processor with other steps than resizing, cropping, scaling and normalising. Its pixels are
    compared for images of several sizes and modes; its class does not count.
    """
    require_pillow()
    name = name or next(iter(source.example))
    channels = _channels(source, name)
    best = read_image_steps(processor, channels)
    source = _with_pixels(_with_example_size(source, name, best), name, best)
    return replace(
        source, own_pipeline=_make_pipeline(source, name, lambda sample: _processed_pixels(processor, sample, channels))
    )


def read_image_steps(processor: Any, channels: int) -> ImagePreprocessor:
    """Read the steps of a transformers image processor, and compare the pixels of both.

    Raises SourceError for a processor with other steps than resizing, cropping, scaling and normalising, or that fails.
    """
    require_pillow()
    images = draw_images()
    expected = [_processed_pixels(processor, sample, channels) for sample in images]
    measured = [
        (_pixel_error(preprocessor, images, expected), preprocessor) for preprocessor in _read(processor, channels)
    ]
    error, best = min(measured, key=lambda pair: pair[0])
    if not error <= 1:
        difference = f"its pixels are {error:.3g} times what rounding explains from that"
        difference = difference if np.isfinite(error) else "its pixels have another shape, or are not numbers"
        hint = "" if getattr(processor, "backend", "pil") == "pil" else "load it with Pillow (backend='pil'), "
        raise SourceError(
            f"the image processor {type(processor).__name__} does something else than resize, crop at the centre, "
            f"scale and normalise ({difference}): {hint}prepare the images yourself, or describe the preprocessing, "
            "preprocessor=image(…)"
        )
    return best


def from_image_model(module: Any, task: str, name: str | None = None) -> Source:
    """Read a single-pass transformers model on pixels, of the size in its config, by default 224 × 224.

    `with_processor` adds the preprocessing of images.
    """
    config = module.config
    size = getattr(config, "image_size", None) or 224
    shape = (2, int(getattr(config, "num_channels", None) or 3), *_height_and_width(size))
    return Source(
        made_example=True,
        module=Adapter(as_float32(module), [module.main_input_name]),
        example={module.main_input_name: torch.randn(shape, generator=torch.Generator().manual_seed(0))},
        step_input=None,
        name=name or type(module).__name__,
        task=IMAGE_FEATURES if task == FEATURES else task,
        axes={module.main_input_name: (0,)},
        output_meaning=output_meaning_of(config, task),
    )


def load_processor(folder: Path) -> Any | None:
    """Load a folder's image processor, with Pillow and numpy; None if it has none. Raises SourceError if that fails."""
    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    require_pillow()
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{folder}'s image processor cannot be loaded: {reason}") from error


def require_pillow() -> None:
    """Raise MissingExtraError if Pillow is not installed."""
    import_optional("PIL.Image", "the comparison of a model on images needs Pillow", "image")


def draw_images(seed: int = 0) -> list[Any]:
    """Draw Pillow images of several sizes and modes.

    They are coarse patches of colour with noise, so that another filter, crop or order of axes changes the pixels.
    """
    from PIL import Image

    random = np.random.default_rng(seed)
    images = []
    for (height, width), mode in zip(IMAGE_SIZES, PILLOW_MODES, strict=True):
        coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), np.uint8)).resize((width, height))
        noise = random.integers(-40, 41, (height, width, 3))
        values = np.clip(np.asarray(coarse).astype(int) + noise, 0, 255).astype(np.uint8)
        drawn = Image.fromarray(values).convert(mode)
        if mode == "RGBA":
            drawn.putalpha(Image.fromarray(values[..., 0]))
        elif mode == "P":
            drawn.info["transparency"] = drawn.getpixel((width // 2, height // 2))
        images.append(drawn)
    return images


def _read(processor: Any, channels: int) -> list[ImagePreprocessor]:
    """Read the settings of a processor, in all their interpretations. A comparison of pixels decides among these.

    Raises SourceError for settings that `ImagePreprocessor` does not support.
    """

    def setting(name: str) -> Any:
        return getattr(processor, name, None)

    def numbers(name: str) -> tuple[float, ...]:
        value = setting(name) if setting("do_normalize") else None
        return () if value is None else tuple(value) if isinstance(value, Sequence) else (float(value),) * channels

    def named(name: str) -> dict[str, int]:
        value = setting(name) or {}
        sizes = dict(value) if not isinstance(value, int) else {"height": value, "width": value}
        return {n: int(v) for n, v in sizes.items() if v is not None}

    resample = setting("resample")
    crop = named("crop_size") if setting("do_center_crop") else {}
    preprocessor = ImagePreprocessor(
        size=named("size") if setting("do_resize") else {},
        resample="bilinear" if resample is None else dict(enumerate(FILTERS)).get(int(resample), str(resample)),
        crop=(crop.get("height", 0), crop.get("width", 0)) if crop else (),
        scale=float(setting("rescale_factor")) if setting("do_rescale") else None,
        mean=numbers("image_mean"),
        std=numbers("image_std"),
        channels=channels,
    )
    if set(preprocessor.size) == {"longest_edge"}:  # tiles of the size that the encoder reads
        tile, splits = named("max_image_size").get("longest_edge", 0), bool(setting("do_image_splitting"))
        preprocessor = structs.replace(preprocessor, tile=tile, splits=splits)
    backgrounds = [preprocessor]
    if converts_itself(processor, channels):  # versions of transformers differ in the background
        backgrounds.insert(0, structs.replace(preprocessor, on_white=True))
    candidates = list(backgrounds)
    edge, share = preprocessor.size.get("shortest_edge"), setting("crop_pct")
    if edge is not None and share:  # the crop as a share of the resized image
        for shape in (
            {"size": {"shortest_edge": int(edge / share)}, "crop": (edge, edge)},
            {"size": {"height": edge, "width": edge}},
        ):
            candidates += [structs.replace(candidate, **shape) for candidate in backgrounds]
    try:
        for candidate in candidates:
            candidate.check()
    except ValueError as error:
        raise SourceError(f"the image processor {type(processor).__name__} cannot be taken over: {error}") from error
    return candidates


def _pixel_error(preprocessor: ImagePreprocessor, images: Sequence[Any], expected: Sequence[np.ndarray]) -> float:
    """Return the greatest difference of the runtime's pixels over that of rounding; infinite for other sizes."""
    worst = 0.0
    for sample, pixels in zip(images, expected, strict=True):
        ours, _ = preprocessor.tiles(sample)
        ours = ours if preprocessor.tile else ours[0]
        if ours.shape != pixels.shape:
            return float("inf")
        allowed = ROUNDING_ERROR * max(1.0, float(np.abs(pixels).max()))
        worst = max(worst, float(np.abs(ours.astype(np.float64) - pixels).max()) / allowed)
    return worst


def _processed_pixels(processor: Any, sample: Any, channels: int) -> np.ndarray:
    """Return the pixels of the processor, (channels, height, width) float32.

    Tiles have an axis before these.

    A processor that does not convert images itself gets them in RGB, as in transformers' pipelines, or gray. Raises
    SourceError for a processor that fails.
    """
    converted = sample if converts_itself(processor, channels) else sample.convert("RGB" if channels == 3 else "L")
    try:
        pixels: np.ndarray = np.asarray(processor(images=converted, return_tensors="np")["pixel_values"])[0]
    except Exception as error:  # a processor may raise anything
        raise SourceError(
            f"the image processor {type(processor).__name__} makes no pixels of an image of {channels} channels: "
            f"{error}"
        ) from error
    return pixels.astype(np.float32)


def converts_itself(processor: Any, channels: int) -> bool:
    """Return whether an image processor converts images of any mode to RGB."""
    return channels == 3 and bool(getattr(processor, "do_convert_rgb", False))


def _channels(source: Source, name: str) -> int:
    """Return the number of channels of an input. Raises OptionError for an input that does not hold images."""
    example = source.example[name]
    if example.dim() != 4 or not example.is_floating_point() or example.shape[1] not in (1, 3):
        raise OptionError(
            f"an image is an input of floats (batch, channels, height, width), 3 or 1 of them, and {name} is "
            f"{example.dtype} {tuple(example.shape)}"
        )
    return example.shape[1]


def _with_example_size(source: Source, name: str, preprocessor: ImagePreprocessor) -> Source:
    """Resize the example to the size of preprocessed images, if the module runs on that size."""
    example = source.example[name]
    if preprocessor.shape in (None, tuple(example.shape[2:])):
        return source
    other = torch.randn((*example.shape[:2], *(preprocessor.shape or ())), generator=torch.Generator().manual_seed(0))
    try:
        with source.eval_mode(), torch.no_grad():
            source.module(other)
    except Exception:  # forward may raise anything; the size is refused later
        return source
    return replace(source, example={**source.example, name: other})


def make_pixel_pipeline(source: Source, name: str) -> Pipeline:
    """Make the pipeline of a source without an image processor: its described preprocessing, then its module."""
    return _make_pipeline(source, name, image_inputs(source.preprocessing)[name].pixels)


def _make_pipeline(source: Source, name: str, pixels: Callable[[Any], np.ndarray]) -> Pipeline:
    """Make the pipeline from an image to the output of the source's module, for one row. pixels: image → pixels."""
    module, dtype = source.module, source.example[name].dtype

    def answer(sample: Any, max_tokens: int | None) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = module(torch.from_numpy(pixels(sample))[None].to(dtype))[0]
        return output.float()

    return answer


def _with_pixels(source: Source, name: str, preprocessor: ImagePreprocessor) -> Source:
    """Add the preprocessing of an input. Raises OptionError if it does not fit the input."""
    example, channels = source.example[name], _channels(source, name)
    mean, std = (value * channels if len(value) == 1 else value for value in (preprocessor.mean, preprocessor.std))
    preprocessor = _checked(structs.replace(preprocessor, channels=channels, mean=mean, std=std))
    if preprocessor.shape is None:
        raise OptionError(
            "images must all get one size, which the file has: give a height and a width, or a crop at the centre"
        )
    if preprocessor.shape != tuple(example.shape[2:]):
        raise OptionError(
            f"images are made {preprocessor.shape[0]} × {preprocessor.shape[1]}, height by width, and {name} is "
            f"{example.shape[2]} × {example.shape[3]}: give the size that the model reads"
        )
    return replace(
        source,
        preprocessing={**source.preprocessing, name: preprocessor.manifest_entry},
        axes={**source.axes, name: (0,)},
    )


def _checked(preprocessor: ImagePreprocessor) -> ImagePreprocessor:
    try:
        preprocessor.check()
    except ValueError as error:
        raise OptionError(f"the image preprocessing is invalid: {error}") from error
    return preprocessor


def _height_and_width(size: Any) -> tuple[int, ...]:
    """Return height and width from one number for both or from two; () for None."""
    if size is None:
        return ()
    both = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(both) != 2:
        raise OptionError(f"a size is one number, or a height and a width, not {size!r}")
    return both
