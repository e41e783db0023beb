"""Recipes: one TOML file with every choice that decides how a model is trained.

    [data]                                    [model]
    factory = "package.module:callable"       factory = "package.module:callable"
    arguments = {}                            arguments = {width = 128, ...}

    [training]                                [checkpoint]
    see TrainingOptions                       task, generation_defaults, max_length of the model.pt

The data factory returns a `tformer_models.data.Dataset` or, for a forecaster, a
`tformer_models.windows.SeriesDataset`. The model factory is called with that dataset's `model_arguments`, such as
vocabulary sizes, and with its own arguments, which take precedence.

For text files of one's own, [data] has `train` in the place of a factory: see `tformer_models.text_recipe`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tformer_models.text_recipe import TextData, expand, is_text_recipe
from tformer_runtime.base.errors import OptionError, SourceError
from tformer_runtime.base.factory_arguments import nearest

TRAINING_CHOICES = {
    "optimizer": ("adam", "adamw"),
    "schedule": ("inverse-sqrt", "cosine"),
    "precision": ("32", "bf16"),
    "monitor": ("loss", "token_accuracy", "sequence_accuracy", "accuracy", "forecast_error"),
}

NOT_NEGATIVE = ("seed", "learning_rate", "weight_decay", "warmup", "clip", "patience", "noise")
SHARES = ("label_smoothing", "average", "rollout")


def _check_types(section: Any, types: Mapping[str, Any]) -> None:
    """Raise OptionError for a value of another type."""
    for name, expected in types.items():
        value = getattr(section, name)
        if not isinstance(value, expected) or isinstance(value, bool):
            kind = {dict: "a table", str: "a text"}.get(expected, "a whole number")
            raise OptionError(f"{name} must be {kind}, not {value!r}")


@dataclass(frozen=True)
class FactoryCall:
    """An object that is made by calling `factory`, an import path, with `arguments`."""

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_types(self, {"factory": str, "arguments": dict})


@dataclass(frozen=True)
class TrainingOptions:
    """The options of the training loop. Raises OptionError for wrong types and values.

    steps            optimizer steps
    batch_tokens     maximum ids in a batch, padding included, in each of source and target; steps for a forecaster
    validate_every   steps between validations; a checkpoint is written at each, so a kill loses at most these steps
    seed             seed of weights, batches, dropout and noise
    optimizer        "adam" or "adamw"
    learning_rate    peak learning rate
    betas            coefficients of the optimizer's running averages
    weight_decay     weight decay of matrices; biases and norms have none
    schedule         decay of the learning rate after the warm-up: 1/√step or half a cosine down to zero
    warmup           steps in which the learning rate rises linearly to its peak
    label_smoothing  share of the target probability that is spread over the vocabulary in the loss
    clip             maximum norm of the gradient; 0 disables clipping
    average          decay of the moving average of the weights, which is validated and saved; 0 uses the weights as is
    monitor          validation metric that selects the saved weights and stops the run
    patience         validations without improvement after which the run stops; 0 never stops
    noise            forecasters only: standard deviation of the noise that is added to the inputs
    rollout          forecasters only: weight in the loss of forecasts that feed predictions back; single steps have
                     the rest
    precision        "32", or "bf16" for matrix products in bfloat16 with float32 weights
    start            path of a model.pt with the initial weights; "" begins with random weights
    """

    steps: int
    batch_tokens: int = 4096
    validate_every: int = 500
    seed: int = 1
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    schedule: str = "inverse-sqrt"
    warmup: int = 400
    label_smoothing: float = 0.1
    clip: float = 1.0
    average: float = 0.999
    monitor: str = "loss"
    patience: int = 0
    noise: float = 0.0
    rollout: float = 0.0
    precision: str = "32"
    start: str = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            expected = int if f.default is MISSING else type(f.default)
            accepted = {float: (float, int), tuple: (tuple, list)}.get(expected, (expected,))
            value = getattr(self, f.name)
            if not isinstance(value, accepted) or isinstance(value, bool):
                raise OptionError(f"{f.name} must be of type {expected.__name__}, not {value!r}")
        for name, choices in TRAINING_CHOICES.items():
            if getattr(self, name) not in choices:
                raise OptionError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("steps", "batch_tokens", "validate_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(f"{name} must be a number that is not negative, not {getattr(self, name)}")
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        if len(self.betas) != 2 or not all(type(n) in (int, float) and 0 <= n < 1 for n in self.betas):
            raise OptionError(f"betas must be two numbers from 0 to below 1, such as [0.9, 0.98], not {self.betas!r}")


@dataclass(frozen=True)
class CheckpointOptions:
    """The fields of model.pt that neither the data nor the model decides; `tformer_export.common.checkpoint` has all.

    max_length is the maximum length of a sequence; training data with longer sequences is refused.
    """

    task: str = "text2text-generation"
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None

    def __post_init__(self) -> None:
        _check_types(self, {"task": str, "generation_defaults": dict, "max_length": int | None})
        if self.max_length is not None and self.max_length < 1:
            raise OptionError(f"max_length must be at least 1, not {self.max_length}")


@dataclass(frozen=True)
class Recipe:
    """A recipe file; the fields are its sections. files: path → SHA-256 of text files that it is trained on."""

    data: FactoryCall
    model: FactoryCall
    training: TrainingOptions
    checkpoint: CheckpointOptions = CheckpointOptions()
    files: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the recipe as nested dictionaries."""
        content = asdict(self)
        if not self.files:
            del content["files"]
        return content


@dataclass(frozen=True)
class _OwnModel:
    """The section [model] of a recipe for text files: a factory or arguments in the place of the task's."""

    factory: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


SECTIONS: dict[str, type] = {
    "data": FactoryCall,
    "model": FactoryCall,
    "training": TrainingOptions,
    "checkpoint": CheckpointOptions,
}


def load_recipe(path: Path) -> Recipe:
    """Read the recipe file at `path`.

    Raises SourceError for a file that cannot be read or is not TOML, OptionError for unknown names and wrong values.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"the recipe {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"the recipe {path} is not TOML: {error}") from error
    problems = _find_problems(content)
    if problems:
        raise OptionError(f"the recipe {path} cannot be used: {'; '.join(problems)}")
    try:
        files = {}
        if is_text_recipe(content):
            content = expand(content, path.parent)
            files = content.pop("files")
        return Recipe(**{name: SECTIONS[name](**values) for name, values in content.items()}, files=files)
    except (OptionError, TypeError) as error:
        raise OptionError(f"the recipe {path} cannot be used: {error}") from error


def _find_problems(content: dict[str, Any]) -> list[str]:
    """Return one message per unknown or missing name."""
    problems = [f"there is no section [{name}]{nearest(name, SECTIONS)}" for name in content if name not in SECTIONS]
    for_texts = is_text_recipe(content)
    sections = SECTIONS | ({"data": TextData, "model": _OwnModel} if for_texts else {})
    for section, section_class in sections.items():
        values = content.get(section)
        if values is None:
            if section != "checkpoint" and not (for_texts and section == "model"):
                problems.append(f"the section [{section}] is missing")
            continue
        if not isinstance(values, dict):
            problems.append(f"{section} must be a section")
            continue
        is_data = section == "data"
        section_fields = {f.name: f for f in fields(section_class)}
        problems += [
            f"[{section}] has no {name}{nearest(name, section_fields)}" for name in values if name not in section_fields
        ]
        problems += [
            f"[{section}] lacks {name}" + (", or train, the name of a text file" if name == "factory" else "") * is_data
            for name, f in section_fields.items()
            if name not in values and f.default is MISSING and f.default_factory is MISSING
        ]
    return problems
