"""Recipes for text files of one's own: `[data]` names the files, and the rest has defaults.

    [data]                           [training]
    train = "pairs.tsv"              steps = 5000

`expand` turns such a recipe into one with factories.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tformer_models.text_files import CLASSIFIER, FIELDS, LANGUAGE_MODEL, TRANSLATION
from tformer_runtime.base.errors import InputError, OptionError

_LAYERS = {"width": 256, "heads": 4, "feedforward": 1024}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    TRANSLATION: (
        "tformer_models.seq2seq:Seq2SeqTransformer",
        _LAYERS | {"encoder_layers": 4, "decoder_layers": 4, "dropout": 0.1, "norm": "pre", "tie_output": True},
    ),
    LANGUAGE_MODEL: ("tformer_models.language_model:LanguageModel", _LAYERS | {"layers": 6, "dropout": 0.1}),
    CLASSIFIER: ("tformer_models.encoder:SentenceClassifier", _LAYERS | {"layers": 2, "dropout": 0.3, "pool": "mean"}),
}  # task → factory and arguments of its model


@dataclass(frozen=True)
class TextData:
    """The section [data] of a recipe for text files. Raises OptionError for wrong types and values.

    train             file with one example a line (`tformer_models.text_files`); paths are relative to the recipe
    validation        file of the same form; "" holds examples of `train` out
    validation_share  share of examples that are held out
    task              "text2text-generation", "text-generation" or "text-classification"
    vocabulary        greatest number of ids of the byte pair tokenizer that is trained on the file
    max_tokens        most tokens of a text, which is the maximum length of the model
    seed              seed of the split
    """

    train: str
    validation: str = ""
    validation_share: float = 0.05
    task: str = TRANSLATION
    vocabulary: int = 4000
    max_tokens: int = 128
    seed: int = 1

    def __post_init__(self) -> None:
        for f in fields(self):
            expected = str if f.default is MISSING else type(f.default)
            if type(getattr(self, f.name)) is not expected:
                raise OptionError(f"{f.name} must be of type {expected.__name__}, not {getattr(self, f.name)!r}")
        if self.task not in FIELDS:
            raise OptionError(f"task must be one of {', '.join(FIELDS)}, not {self.task!r}")
        if not 0 < self.validation_share < 1:
            raise OptionError(f"validation_share must be between 0 and 1, not {self.validation_share}")
        if self.max_tokens < 4:
            raise OptionError(f"max_tokens must be at least 4, not {self.max_tokens}")


def is_text_recipe(content: Mapping[str, Any]) -> bool:
    """Return whether the section [data] of a recipe names text files."""
    data = content.get("data")
    return isinstance(data, Mapping) and "train" in data


def expand(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the sections of a recipe with the factories of its task.

    folder: of the recipe. Raises InputError for files that cannot be read, OptionError for wrong values.
    """
    data = TextData(**content["data"])
    paths = {name: str(folder / path) for name in ("train", "validation") if (path := getattr(data, name))}
    factory, arguments = _MODELS[data.task]
    model, checkpoint = content.get("model", {}), content.get("checkpoint", {})
    if "task" in checkpoint or "max_length" in checkpoint:
        raise OptionError("task and max_length of [checkpoint] follow from [data]: set task and max_tokens there")
    if "factory" in model:
        factory, arguments = model["factory"], {}
    defaults = {} if data.task == CLASSIFIER else {"generation_defaults": {"max_new_tokens": data.max_tokens - 1}}
    monitor = {"monitor": "accuracy"} if data.task == CLASSIFIER else {}
    return {
        "data": {"factory": "tformer_models.text_files:dataset", "arguments": asdict(data) | paths},
        "model": {
            "factory": factory,
            "arguments": arguments | {"max_length": data.max_tokens} | model.get("arguments", {}),
        },
        "training": monitor | content["training"],
        "checkpoint": {"task": data.task, "max_length": data.max_tokens} | defaults | checkpoint,
        "files": {path: _digest(path) for path in paths.values()},
    }


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
