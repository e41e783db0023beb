"""What is said of images at export: how pictures become pixels, for one's own module and by a transformers processor.

`export(…, prepare={"pixels": image(size=224, crop=…, mean=…, std=…)})` puts into the file how an input is made, so that
it reads pictures: a size is resized to, a crop is cut out of the middle, and numbers are scaled and normalised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tformer_export.sources.adapter import Adapter
from tformer_export.sources.base import Source, as_float32
from tformer_export.sources.hf_single_pass import outcome_of
from tformer_export.sources.pooled_module import Answer
from tformer_export.sources.task_names import CLASSIFIES_IMAGES, FEATURES, IMAGE_FEATURES
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.base.extras import library
from tformer_runtime.format.manifest import Preparation
from tformer_runtime.preprocess.images import FILTERS, Images, image_inputs

SHAPES = ((96, 128), (200, 61), (31, 33), (64, 64), (257, 640), (480, 99))  # height and width of drawn pictures
MODES = ("RGB", "L", "RGBA", "P", "CMYK", "1")  # of Pillow, one after the other
ROUNDINGS = 2.0**-22  # of pixels, over the greatest: a product, a difference and a quotient, each in float32


def image(
    size: int | Sequence[int] | Mapping[str, int] | None = None,
    *,
    crop: int | Sequence[int] | None = None,
    resample: str = "bilinear",
    scale: float | None = 1 / 255,
    mean: float | Sequence[float] = (),
    std: float | Sequence[float] = (),
) -> Preparation:
    """How pictures become an input (batch, channels, height, width), with 3 channels (RGB) or 1 (gray) as the example.

    size: height and width, one number for both, or transformers' names of a size, such as {"shortest_edge": 256}. crop:
    height and width, or one number for both, that are cut out of the middle. resample: Pillow's filter, "nearest",
    "lanczos", "bilinear", "bicubic", "box" or "hamming". scale: what numbers from 0 to 255 are multiplied with; None:
    nothing. mean, std: of each channel, or of all: (x · scale - mean) / std. OptionError for what cannot be.
    """
    try:
        mean, std = (tuple(map(float, np.ravel(value))) for value in (mean, std))
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"mean and std are one number for all channels, or one for each, not {mean!r}, {std!r}"
        ) from error
    named = size if isinstance(size, Mapping) else zip(("height", "width"), _both(size), strict=False)
    made = Images(dict(named), resample, _both(crop), scale, mean, std, channels=max(1, len(mean), len(std)))
    return _checked(made).preparation


def with_preparation(source: Source, prepare: Any, classes: bool) -> Source:
    """The source with how its inputs are made, by name: `image(…)` or a transformers image processor; one that is not
    named is the only input's. classes: whether the outputs are said to be of labels. OptionError for what does not fit
    the model, MissingExtraError if there is no Pillow."""
    need_pillow()
    if not isinstance(prepare, Mapping):
        names = [name for name in source.given if name != source.step]
        if len(names) != 1:
            raise OptionError(f"say which input is prepared, prepare={{name: …}}: there are {', '.join(names)}")
        prepare = {names[0]: prepare}
    for name, how in prepare.items():
        if name not in source.example:
            raise OptionError(f"there is no input {name!r} to prepare: {', '.join(source.example)}")
        if isinstance(how, Preparation):
            source = _prepared(source, name, Images.of(how))
        elif hasattr(how, "preprocess"):
            source = with_processor(source, how, name)
        else:
            raise OptionError(f"{name} is prepared by image(…) or an image processor, not {type(how).__name__}")
    if source.step is None and source.task == FEATURES:
        source = replace(source, task=CLASSIFIES_IMAGES if classes else IMAGE_FEATURES)
    return source


def with_processor(source: Source, processor: Any, name: str | None = None) -> Source:
    """The source of a transformers model on images, with its image processor: what that does to pictures is put into
    the file, and its way from a picture to pixels is what the file is compared with. name: of the input; by default the
    first.

    SourceError for a processor that does something else than resize, crop, scale and normalise: its pixels of pictures
    of several sizes and kinds are compared, whatever its class is called.
    """
    need_pillow()
    name = name or next(iter(source.example))
    channels = _channels(source, name)
    pictures = draw_pictures()
    expected = [_theirs(processor, picture, channels) for picture in pictures]
    measured = [(_apart(made, pictures, expected), made) for made in _read(processor, channels)]
    apart, found = min(measured, key=lambda pair: pair[0])
    if not apart <= 1:
        hint = "" if getattr(processor, "backend", "pil") == "pil" else "load it with Pillow (backend='pil'), "
        raise SourceError(
            f"the image processor {type(processor).__name__} does something else than resize, crop at the centre, "
            f"scale and normalise (its pixels are {apart:.3g} times what rounding explains from that): {hint}prepare "
            "the images yourself, or describe what is done, prepare=image(…)"
        )
    source = _prepared(_of_size(source, name, found), name, found)
    return replace(source, answer=_of_pixels(source, name, lambda sample: _theirs(processor, sample, channels)))


def from_transformers_on_images(module: Any, task: str, name: str | None = None) -> Source:
    """A transformers model that is run once on pixels, of the size that its config says: 224 × 224 if it says none.
    What makes these of pictures is told by `with_processor`."""
    config = module.config
    size = getattr(config, "image_size", None) or 224
    shape = (2, int(getattr(config, "num_channels", None) or 3), *_both(size))
    return Source(
        module=Adapter(as_float32(module), [module.main_input_name]),
        example={module.main_input_name: torch.randn(shape, generator=torch.Generator().manual_seed(0))},
        step=None,
        name=name or type(module).__name__,
        task=IMAGE_FEATURES if task == FEATURES else task,
        dynamic={module.main_input_name: (0,)},
        outcome=outcome_of(config, task),
    )


def load_processor(folder: Path) -> Any | None:
    """A folder's image processor, of Pillow and numpy; None if it has none. SourceError if it cannot be loaded."""
    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    need_pillow()
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise SourceError(f"{folder}'s image processor cannot be loaded: {reason}") from error


def need_pillow() -> None:
    library("PIL.Image", "a model on images is compared on pictures, which needs Pillow", "image")


def draw_pictures(seed: int = 0) -> list[Any]:
    """Pillow images of several sizes and modes: coarse patches of colour with noise on them, so that a filter, a crop
    or a turned axis shows."""
    from PIL import Image

    random = np.random.default_rng(seed)
    made = []
    for (height, width), mode in zip(SHAPES, MODES, strict=True):
        coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), np.uint8)).resize((width, height))
        noise = random.integers(-40, 41, (height, width, 3))
        values = np.clip(np.asarray(coarse).astype(int) + noise, 0, 255).astype(np.uint8)
        made.append(Image.fromarray(values).convert(mode))
    return made


def _read(processor: Any, channels: int) -> list[Images]:
    """What a processor's settings say, in the ways that they may be meant: which one is, its pixels tell. SourceError
    for settings that no `Images` has."""

    def setting(name: str) -> Any:
        return getattr(processor, name, None)

    def numbers(name: str) -> tuple[float, ...]:
        value = setting(name) if setting("do_normalize") else None
        return () if value is None else tuple(value) if isinstance(value, Sequence) else (float(value),) * channels

    def named(name: str) -> dict[str, int]:
        value = setting(name) or {}
        given = dict(value) if not isinstance(value, int) else {"height": value, "width": value}
        return {n: int(v) for n, v in given.items() if v is not None}

    resample = setting("resample")
    crop = named("crop_size") if setting("do_center_crop") else {}
    made = Images(
        size=named("size") if setting("do_resize") else {},
        resample="bilinear" if resample is None else dict(enumerate(FILTERS)).get(int(resample), str(resample)),
        crop=(crop.get("height", 0), crop.get("width", 0)) if crop else (),
        scale=float(setting("rescale_factor")) if setting("do_rescale") else None,
        mean=numbers("image_mean"),
        std=numbers("image_std"),
        channels=channels,
    )
    ways = [made]
    edge, share = made.size.get("shortest_edge"), setting("crop_pct")
    if edge is not None and share:  # the share of the resized picture that is cut out, if any is
        ways.append(replace(made, size={"shortest_edge": int(edge / share)}, crop=(edge, edge)))
        ways.append(replace(made, size={"height": edge, "width": edge}))
    try:
        for way in ways:
            way.check()
    except ValueError as error:
        raise SourceError(f"the image processor {type(processor).__name__} cannot be taken over: {error}") from error
    return ways


def _apart(made: Images, pictures: Sequence[Any], expected: Sequence[np.ndarray]) -> float:
    """How far the runtime's pixels are from the processor's, over what rounding explains; infinite for other sizes."""
    worst = 0.0
    for picture, theirs in zip(pictures, expected, strict=True):
        own = made.pixels(picture)
        if own.shape != theirs.shape:
            return float("inf")
        allowed = ROUNDINGS * max(1.0, float(np.abs(theirs).max()))
        worst = max(worst, float(np.abs(own.astype(np.float64) - theirs).max()) / allowed)
    return worst


def _theirs(processor: Any, picture: Any, channels: int) -> np.ndarray:
    """(channels, height, width) float32 of the processor: of an RGB image, as transformers' pipelines give it, or a
    gray one. SourceError for a processor that gives none."""
    given = picture.convert("RGB" if channels == 3 else "L")
    try:
        pixels: np.ndarray = np.asarray(processor(images=given, return_tensors="np")["pixel_values"])[0]
    except Exception as error:  # whatever it makes of its settings
        raise SourceError(
            f"the image processor {type(processor).__name__} makes no pixels of an image of {channels} channels: "
            f"{error}"
        ) from error
    return pixels.astype(np.float32)


def _channels(source: Source, name: str) -> int:
    """How many an input of images has. OptionError for an input that is none of images."""
    held = source.example[name]
    if held.dim() != 4 or not held.is_floating_point() or held.shape[1] not in (1, 3):
        raise OptionError(
            f"an image is an input of floats (batch, channels, height, width), 3 or 1 of them, and {name} is "
            f"{held.dtype} {tuple(held.shape)}"
        )
    return held.shape[1]


def _of_size(source: Source, name: str, made: Images) -> Source:
    """The source with an example as large as pictures are made, if the module runs on that."""
    held = source.example[name]
    if made.shape in (None, tuple(held.shape[2:])):
        return source
    other = torch.randn((*held.shape[:2], *(made.shape or ())), generator=torch.Generator().manual_seed(0))
    try:
        with source.ready(), torch.no_grad():
            source.module(other)
    except Exception:  # whatever forward makes of it: the size is refused in its turn
        return source
    return replace(source, example={**source.example, name: other})


def through_pixels(source: Source, name: str) -> Answer:
    """The way of a source that has no image processor: pictures as they were described, and the module on one."""
    return _of_pixels(source, name, image_inputs(source.preparation)[name].pixels)


def _of_pixels(source: Source, name: str, pixels: Callable[[Any], np.ndarray]) -> Answer:
    """From a picture through these pixels and the source's module to its output, of one row."""
    module, dtype = source.module, source.example[name].dtype

    def answer(sample: Any, most: int | None) -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = module(torch.from_numpy(pixels(sample))[None].to(dtype))[0]
        return output.float()

    return answer


def _prepared(source: Source, name: str, made: Images) -> Source:
    """The source whose input is made so. OptionError for what does not fit the input."""
    held, channels = source.example[name], _channels(source, name)
    mean, std = (value * channels if len(value) == 1 else value for value in (made.mean, made.std))
    made = _checked(replace(made, channels=channels, mean=mean, std=std))
    if made.shape is None:
        raise OptionError(
            "pictures must all get one size, which the file has: give a height and a width, or a crop at the centre"
        )
    if made.shape != tuple(held.shape[2:]):
        raise OptionError(
            f"images are made {made.shape[0]} × {made.shape[1]}, height by width, and {name} is "
            f"{held.shape[2]} × {held.shape[3]}: give the size that the model reads"
        )
    return replace(
        source,
        preparation={**source.preparation, name: made.preparation},
        dynamic={**source.dynamic, name: (0,)},
    )


def _checked(made: Images) -> Images:
    try:
        made.check()
    except ValueError as error:
        raise OptionError(f"what is said of images cannot be: {error}") from error
    return made


def _both(size: Any) -> tuple[int, ...]:
    """Height and width, of one number for both or of two; none of None."""
    if size is None:
        return ()
    both = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(both) != 2:
        raise OptionError(f"a size is one number, or a height and a width, not {size!r}")
    return both
