"""A recipe: everything that decides how a model is trained, as one TOML file.

    [data]                                    [model]
    factory = "package.module:callable"       factory = "package.module:callable"
    arguments = {}                            arguments = {width = 128, ...}

    [training]                                [checkpoint]
    see Training below                        task, defaults, max_length of the model.pt that is written

The data factory returns a `tformer_models.data.Dataset`, or for a forecaster a `tformer_models.windows.SeriesDataset`.
The model factory is called with what that decides, such as the sizes of vocabularies, and with its own arguments.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tformer_export.common.checkpoint import OptionError, SourceError

CHOICES = {
    "optimizer": ("adam", "adamw"),
    "schedule": ("inverse-sqrt", "cosine"),
    "precision": ("32", "bf16"),
    "monitor": ("loss", "token_accuracy", "sequence_accuracy", "accuracy", "forecast_error"),
}


@dataclass(frozen=True)
class Part:
    """Something that is made by calling `factory` with `arguments`."""

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """How long, how fast, how large.

    batch_tokens     a batch holds as many pairs as fit, padded, on either side
    validate_every   steps between validations; a checkpoint is written at each, so this is what a kill can cost
    schedule         the rate rises linearly to `learning_rate` over `warmup` steps, then falls as 1/√step or as half
                     a cosine that reaches zero at the last step
    label_smoothing  this much of the probability is spread over the vocabulary in the loss
    clip             gradients longer than this are shortened to it; 0 leaves them alone
    average          decay of the moving average of the weights, which is what is validated and kept; 0 keeps the last
    monitor          validation metric that chooses the best weights and stops a run that no longer improves
    patience         validations without improvement after which a run stops; 0 never stops
    noise            of a forecaster: deviation of what is added to the numbers that it reads
    rollout          of a forecaster: the share that whole forecasts, fed back, have in the loss; the rest is of single
                     steps after true ones
    precision        "32", or "bf16" for matrix products in bfloat16 with float32 weights
    start            a model.pt whose weights to begin with, such as that of an earlier recipe; "" begins at random
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
            wanted = int if f.default is MISSING else type(f.default)
            accepted = {float: (float, int), tuple: (tuple, list)}.get(wanted, (wanted,))
            if not isinstance(getattr(self, f.name), accepted):
                raise OptionError(f"{f.name} must be of type {wanted.__name__}, not {getattr(self, f.name)!r}")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise OptionError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        for name in ("steps", "batch_tokens", "validate_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class Output:
    """What the finished model.pt says of itself beside its weights."""

    task: str = "text2text-generation"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_length: int | None = None


@dataclass(frozen=True)
class Recipe:
    data: Part
    model: Part
    training: Training
    checkpoint: Output = Output()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


SECTIONS: dict[str, type] = {"data": Part, "model": Part, "training": Training, "checkpoint": Output}


def load_recipe(path: Path) -> Recipe:
    """Raises SourceError for a file that is not TOML, OptionError for names and values that no recipe has."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"the recipe {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"the recipe {path} is not TOML: {error}") from error
    problems = _problems(content)
    if problems:
        raise OptionError(f"the recipe {path} cannot be used: {'; '.join(problems)}")
    try:
        return Recipe(**{name: SECTIONS[name](**values) for name, values in content.items()})
    except (OptionError, TypeError) as error:
        raise OptionError(f"the recipe {path} cannot be used: {error}") from error


def _problems(content: dict[str, Any]) -> list[str]:
    """Every unknown and every missing name, in words."""
    problems = [f"there is no section [{name}]" for name in content if name not in SECTIONS]
    for section, kind in SECTIONS.items():
        values = content.get(section)
        if values is None:
            if section != "checkpoint":
                problems.append(f"the section [{section}] is missing")
            continue
        if not isinstance(values, dict):
            problems.append(f"{section} must be a section")
            continue
        known = {f.name: f for f in fields(kind)}
        problems += [f"[{section}] has no {name}" for name in values if name not in known]
        problems += [
            f"[{section}] lacks {name}"
            for name, f in known.items()
            if name not in values and f.default is MISSING and f.default_factory is MISSING
        ]
    return problems
