"""The files of a folder of sentence-transformers: its modules and their settings.

modules.json lists the modules in their order, each with its class and its folder. config_sentence_transformers.json has
the settings of the whole, such as the prompt before each text. A file next to the transformer has its settings, such as
the maximum length of a text. A setting without a counterpart in a file is named in a warning if vectors are the
same without it, and refused otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tformer_export.sources.task_names import CLASSIFIES, FEATURES
from tformer_export.sources.untrusted_files import inside, read_json, refuse_special_files
from tformer_runtime.base.errors import SourceError

logger = logging.getLogger(__name__)

MODULES = "modules.json"
OPTIONS = "config_sentence_transformers.json"
SENTENCE_ENCODER, CROSS_ENCODER = "SentenceTransformer", "CrossEncoder"
TRANSFORMER, STATIC = "Transformer", "StaticEmbedding"
_PACKAGE = "sentence_transformers."
_SETTINGS = "sentence_*_config.json"  # of the transformer; its name depends on the version
_TASKS = {SENTENCE_ENCODER: (FEATURES, "feature-extraction"), CROSS_ENCODER: (CLASSIFIES, "sequence-classification")}
_DEFAULT_OUTPUTS = {"feature-extraction": "last_hidden_state", "sequence-classification": "logits"}
_READ_OPTIONS = {"model_type", "prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "activation_fn"}
_OPTIONS_WITHOUT_EFFECT = {"__version__", "requirements", "keep_in_fp32_modules"}  # a file computes in float32
_READ_SETTINGS = {
    "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "processing_kwargs", "tokenizer_args",
    "processor_kwargs",
}  # fmt: skip
_SETTINGS_WITHOUT_EFFECT = {"unpad_inputs", "module_output_name"}
_LOADING = ("model_args", "model_kwargs", "config_args", "config_kwargs")  # arguments of from_pretrained
_LOADING_WITHOUT_EFFECT = {
    "dtype", "torch_dtype", "attn_implementation", "device_map", "low_cpu_mem_usage", "use_safetensors", "revision",
    "code_revision", "token", "use_auth_token", "cache_dir", "local_files_only", "trust_remote_code",
    "add_pooling_layer", "use_cache", "use_fast", "model_max_length", "padding_side",
}  # fmt: skip


@dataclass(frozen=True)
class SavedModule:
    """A module in its place. kind: the name of its class."""

    kind: str
    path: Path

    def config(self, read: Collection[str], fixed: Mapping[str, Any], missing: Any = None) -> dict[str, Any]:
        """Return its config.json. missing: that of a module without one; None to refuse it.

        read: the keys that the caller reads. fixed: key → the only value that is supported.
        Raises SourceError for other keys, and for other values.
        """
        config = read_json(self.path / "config.json", missing=missing)
        if not isinstance(config, dict):
            raise SourceError(f"{self.path / 'config.json'} holds no settings by name")
        for key, value in config.items():
            if key not in read and (key not in fixed or value not in (None, fixed[key])):
                raise SourceError(
                    f"{self.path / 'config.json'} sets {key} to {value!r}, which is not supported for a {self.kind}"
                )
        return config


@dataclass(frozen=True)
class SavedModel:
    """A folder with its modules.

    model_type: SENTENCE_ENCODER or CROSS_ENCODER.
    modules: those of modules.json, of which the first reads texts.
    options: of config_sentence_transformers.json.
    settings: of the transformer.
    """

    folder: Path
    model_type: str
    modules: tuple[SavedModule, ...]
    options: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def task(self) -> str:
        return _TASKS[self.model_type][0]

    @property
    def is_static(self) -> bool:
        return bool(self.modules) and self.modules[0].kind == STATIC

    @property
    def transformer_folder(self) -> Path:
        return self.modules[0].path if self.modules else self.folder

    @property
    def prompt(self) -> str:
        """The text before each text; empty for none."""
        prompts = self.options.get("prompts")
        name = self.options.get("default_prompt_name")
        prompt = prompts.get(name) if isinstance(prompts, dict) and name else None
        return str(prompt or "")

    @property
    def dimensions(self) -> int | None:
        """The numbers of a vector that are kept; None for all. Raises SourceError for anything but a number."""
        count = self.options.get("truncate_dim")
        if count is not None and (type(count) is not int or count < 1):
            raise SourceError(
                f"{self.folder / OPTIONS} sets truncate_dim to {count!r}, which is not a size of a vector"
            )
        return count

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens of a text; None if the folder does not state it."""
        limits = [self.settings.get("max_seq_length"), _text_settings(self.settings).get("max_length")]
        limits += [
            (self.settings.get(key) or {}).get("model_max_length") for key in ("tokenizer_args", "processor_kwargs")
        ]
        return min((n for n in limits if type(n) is int), default=None)

    @property
    def is_lower_case(self) -> bool:
        return bool(self.settings.get("do_lower_case"))

    def refused(self, kind: str, where: str) -> SourceError:
        """Return an error for a module."""
        return SourceError(
            f"{self.folder / MODULES} has a module {kind}, which is not supported {where}: supported are a transformer "
            "or a StaticEmbedding, its pooling, and dense layers and normalisations, in this order; otherwise export "
            "only the transformer (its own config.json)"
        )


def read_saved(folder: Path, task: str | None = None) -> SavedModel | None:
    """Read the files of a folder; None for one without modules.

    task: the caller's task. For another than that of the folder its transformer is exported alone, and the result is
        None.

    Raises SourceError for modules and settings that are not supported.
    """
    if not (folder / MODULES).exists():
        return None
    options = _mapping(folder / OPTIONS)
    model_type = options.get("model_type") or SENTENCE_ENCODER
    if task is not None and (model_type not in _TASKS or task != _TASKS[model_type][0]):
        return None
    modules = tuple(_modules(folder))
    if model_type not in _TASKS:
        raise SourceError(
            f"{folder} holds a {model_type} of sentence-transformers, which is not supported, but its "
            f"{' and '.join(_TASKS)} are: choose the task of its transformer to export that alone (--task)"
        )
    if not modules:
        return SavedModel(folder, model_type, (), {}, {})
    root = modules[0].path
    place = next(iter(sorted(root.glob(_SETTINGS))), root / _SETTINGS)
    saved = SavedModel(folder, model_type, modules, options, _mapping(place))
    first = modules[0].kind
    if first not in (TRANSFORMER, STATIC) or (model_type == CROSS_ENCODER and first == STATIC):
        raise saved.refused(first, "as the first")
    if model_type == CROSS_ENCODER and (saved.prompt or len(modules) > 1):
        fault = "a default prompt" if saved.prompt else f"a module {modules[1].kind}"
        raise SourceError(f"{folder} holds a CrossEncoder with {fault}, which is not supported")
    _check_options(saved)
    _check_settings(saved, place)
    return saved


def _modules(folder: Path) -> Iterator[SavedModule]:
    """Yield the modules of modules.json. Raises SourceError for code of the folder's own."""
    for entry in read_json(folder / MODULES):
        try:
            type_, path = str(entry["type"]), inside(folder, entry["path"], MODULES)
        except (TypeError, KeyError, IndexError) as error:
            raise SourceError(f"{folder / MODULES} is not a list of modules with a type and a path") from error
        if not type_.startswith(_PACKAGE):
            raise SourceError(
                f"{folder / MODULES} has a module {type_}, which is not of sentence-transformers: load the model in "
                "Python and give an example of its inputs"
            )
        unknown = [key for key in entry if key not in ("idx", "name", "path", "type") and entry[key]]
        if unknown:
            raise SourceError(
                f"{folder / MODULES} sets {', '.join(unknown)} of a module {type_}, which is not supported"
            )
        if path.is_dir():
            refuse_special_files(path)
        yield SavedModule(type_.rsplit(".", 1)[-1], path)


def _check_options(saved: SavedModel) -> None:
    """Warn of the options of the whole that a file does not carry over."""
    prompts = saved.options.get("prompts")
    default = saved.options.get("default_prompt_name")
    lost = [f"the prompt {name!r}" for name, text in (prompts or {}).items() if text and name != default]
    similarity = saved.options.get("similarity_fn_name")
    if similarity not in (None, "cosine"):
        lost.append(f"similarity_fn_name {similarity} (the similarity of a file is the cosine)")
    lost += [key for key in saved.options if key not in _READ_OPTIONS | _OPTIONS_WITHOUT_EFFECT]
    _warn(saved.folder / OPTIONS, lost)


def _check_settings(saved: SavedModel, place: Path) -> None:
    """Warn of settings of the transformer that a file does not carry over. Raises SourceError if vectors need them."""
    settings = saved.settings
    task = settings.get("transformer_task") or _TASKS[saved.model_type][1]
    if task != _TASKS[saved.model_type][1]:
        raise SourceError(f"{place} sets transformer_task to {task}, which is not supported for a {saved.model_type}")
    modalities = settings.get("modality_config") or {}
    usual = {"method": "forward", "method_output_name": _DEFAULT_OUTPUTS[task]}
    if modalities and modalities.get("text") != usual:
        raise SourceError(
            f"{place} reads texts by {modalities.get('text')}: only {usual} is supported (modality_config)"
        )
    processing = {**(settings.get("processing_kwargs") or {})}
    refused = [
        f"processing_kwargs.text.{key}" for key in _text_settings(settings) if key not in ("max_length", "padding")
    ]
    refused += [
        f"processing_kwargs.{key}" for key in processing if key not in ("text", "chat_template") and processing[key]
    ]
    for group in (*_LOADING, "tokenizer_args", "processor_kwargs"):
        refused += [f"{group}.{key}" for key in settings.get(group) or {} if key not in _LOADING_WITHOUT_EFFECT]
    if refused:
        raise SourceError(f"{place} sets {', '.join(refused)}, which is not supported: remove it if it has no effect")
    known = _READ_SETTINGS | _SETTINGS_WITHOUT_EFFECT | set(_LOADING)
    lost = [f"the modality {name}" for name in modalities if name != "text"]
    lost += [key for key in settings if key not in known and settings[key] is not None]
    _warn(place, lost)


def _text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return (settings.get("processing_kwargs") or {}).get("text") or {}


def _warn(place: Path, lost: list[str]) -> None:
    if lost:
        logger.warning("%s sets %s, which the file does not carry over", place, ", ".join(lost))


def _mapping(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty for a file that does not exist. Raises SourceError for other JSON."""
    value = read_json(path, missing={})
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds no settings by name")
    return value
