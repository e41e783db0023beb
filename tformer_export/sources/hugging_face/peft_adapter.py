"""Adapters of PEFT: a folder with adapter_config.json and adapter_model.safetensors, and the base model that it names.

Both files are untrusted. The settings are checked here before PEFT reads them: those with which PEFT would import
modules, unpickle files or compute for ever are refused, and weights are read in safetensors only.

https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tformer_export.common.example_sizes import distinct_sizes
from tformer_export.sources.base import Source
from tformer_export.sources.hugging_face.hub import download, is_hub_id
from tformer_export.sources.task_names import ANSWERS, CLASSIFIES, FEATURES, GENERATES, LABELS_TOKENS, TRANSLATES
from tformer_export.sources.untrusted_files import read_json, refuse_special_files
from tformer_runtime.base.child_process import ChildEndedError, ChildProcess
from tformer_runtime.base.errors import MissingExtraError, SourceError
from tformer_runtime.base.extras import install_command

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
TASKS = {  # task_type of PEFT → task
    "CAUSAL_LM": GENERATES,
    "SEQ_2_SEQ_LM": TRANSLATES,
    "SEQ_CLS": CLASSIFIES,
    "TOKEN_CLS": LABELS_TOKENS,
    "QUESTION_ANS": ANSWERS,
    "FEATURE_EXTRACTION": FEATURES,
}
LORA = "LORA"
_PREFIX = "base_model.model."  # of all names in a file of PEFT
_BASE_LAYER = ".base_layer."  # in the name of a parameter of an adapted layer
_LORA_PARTS = (".lora_A.", ".lora_B.", ".lora_embedding_")
MAX_DIFFERENCE = 1e-4  # of the range of the outputs, between PEFT and the merged model, which round differently
_REFUSED_SETTINGS = {  # settings with which PEFT imports a module or unpickles a file
    "megatron_config",
    "corda_config",
    "lora_ga_config",
    "loftq_config",
    "eva_config",
}
OVERWRITTEN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # the loaded weights replace all of them
_BASE_CHANGING_INITS = ("pissa", "olora")  # computed from the base model, without reading files
MAX_CONFIG_BYTES = 4 << 20  # of adapter_config.json; the ranks of a model of 70 B take some hundred kilobytes
MAX_MATCH_SECONDS = 10.0  # of processor time, for all expressions of an adapter; published ones take milliseconds
MAX_REPLY_SECONDS = 60.0  # of any time, on a system without a limit of processor time or with other load
MAX_LAYERS = 1000  # of layer_replication
_NAMES = ("target_modules", "exclude_modules")  # whose lists PEFT compares with ends of names
_LITERAL = re.compile(r"[\w.-]*")  # a text that is matched in linear time
_NOT_MERGED = ("ADAPTION_PROMPT", "XLORA", "POLY", "SHADOW")  # XLORA and SHADOW load models that they name
_PEFT_OWN = ("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode")


@dataclass(frozen=True)
class PeftAdapter:
    """A folder of an adapter.

    settings: the content of adapter_config.json.
    tensors: name in adapter_model.safetensors, as the base model has it if it is one of its parameters → stored name.
    """

    folder: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, str]

    @property
    def kind(self) -> str:
        """PEFT's name of the method, such as LORA."""
        return str(self.settings.get("peft_type"))

    @property
    def task(self) -> str | None:
        """The task that the adapter was trained for; None if it states none."""
        return TASKS.get(str(self.settings.get("task_type")))

    def error(self, reason: str) -> SourceError:
        return SourceError(f"the adapter {self.folder} {reason}")

    def find_base(self) -> Path:
        """Return the folder of the base model: relative to the adapter, to the working directory, or of the hub.

        Raises SourceError if the adapter names none, or if there is no such model.
        """
        name = self.settings.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise self.error(
                f"names no base model: set base_model_name_or_path in its {CONFIG} to its folder or hub id"
            )
        places = (self.folder / name, Path(name))
        folder = next((place for place in places if (place / "config.json").is_file()), None)
        if folder is None and not any(place.exists() for place in places) and is_hub_id(name):
            revision = self.settings.get("revision")
            logger.warning("the adapter %s names %s as its base model, which is loaded from the hub", self.folder, name)
            folder = download(name, revision if isinstance(revision, str) else None)
        if folder is None:
            raise self.error(
                f"names the base model {name}, which is neither a Hugging Face folder nor a hub id: set "
                f"base_model_name_or_path in its {CONFIG} to its folder or hub id"
            )
        if is_adapter_folder(folder):
            raise self.error(f"names {name} as its base model, which is an adapter too: merge that one first")
        return folder

    def supplies(self, parameter: str) -> bool:
        """Return whether the adapter holds a whole parameter of the base model, such as a classifier's weight."""
        return parameter in self.tensors

    def apply(self, module: nn.Module, name: str = "default", generic: bool = False) -> Any:
        """Put the adapter on a module, in place, and return PEFT's model of it.

        name: of the adapter in PEFT's model.
        generic: whether PEFT adds no parts for the task, such as a saved classifier.

        Raises SourceError for settings that PEFT does not know, and for weights that do not fit the module.
        """
        import peft
        from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

        config = self._config(generic)
        self._check_sizes()
        self._check_patterns(module)
        self._resize_embeddings(module)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if isinstance(module, peft.PeftModel):
                    model: Any = module
                    model.add_adapter(name, config)
                else:
                    kind: Any = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, peft.PeftModel)
                    model = kind(module, config, name)
                result = model.load_adapter(str(self.folder), name, torch_device="cpu")
        except Exception as error:  # PEFT and torch raise many types
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[-1:] if "size mismatch" in str(error) else lines[:1]) or type(error).__name__
            raise self.error(f"does not fit its base model: {reason}") from error
        parts = {
            "missing": [*result.missing_keys, *self._missing_saved(model, name)],
            "unexpected": result.unexpected_keys,
        }
        if listed := [f"{label}: {', '.join(sorted(names))}" for label, names in parts.items() if names]:
            raise self.error(f"has weights that do not fit its base model and its {CONFIG}: {'; '.join(listed)}")
        return model.eval()

    def whole_parameters(self) -> list[str]:
        """Return the parameters of the base model that the adapter supplies as a whole, and not as a part of LoRA."""
        return [name for name in self.tensors if not any(part in name for part in _LORA_PARTS)]

    def shape(self, parameter: str) -> tuple[int, ...]:
        """Return the shape of a parameter that the adapter supplies."""
        from safetensors import safe_open

        with safe_open(self.folder / WEIGHTS, "pt") as file:
            return tuple(file.get_slice(self.tensors[parameter]).get_shape())

    def read(self, parameter: str) -> torch.Tensor:
        """Return a parameter that the adapter supplies."""
        from safetensors import safe_open

        with safe_open(self.folder / WEIGHTS, "pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.tensors[parameter])
            return tensor

    def _resize_embeddings(self, module: Any) -> None:
        """Give a model as many embeddings as the adapter brings along, if tokens were added before its training."""
        table: Any = getattr(module, "get_input_embeddings", lambda: None)()
        names = [f"{name}.weight" for name, part in module.named_modules() if part is table]
        rows = [self.shape(name)[0] for name in names if self.supplies(name)]
        if rows and rows[0] != table.weight.shape[0]:
            module.resize_token_embeddings(rows[0], mean_resizing=False)

    def _config(self, generic: bool) -> Any:
        """Return PEFT's form of the settings, without those that only matter for training and for PEFT's own loader."""
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        settings = {name: value for name, value in self.settings.items() if name not in _PEFT_OWN}
        if settings.get("init_lora_weights") in OVERWRITTEN_INITS:
            settings.pop("init_lora_weights", None)
        if generic:
            settings["task_type"] = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = PEFT_TYPE_TO_CONFIG_MAPPING[self.kind].from_peft_type(**settings)
        except Exception as error:  # PEFT raises many types for wrong settings
            raise self.error(f"has a {CONFIG} that PEFT does not read: {_first_line(error)}") from error
        config.inference_mode = True
        return config

    def _check_sizes(self) -> None:
        """Raise SourceError for sizes in the settings for which PEFT would take any amount of memory."""
        ranges = self.settings.get("layer_replication")
        if isinstance(ranges, list) and sum(map(_layer_count, ranges)) > MAX_LAYERS:
            raise self.error(f"repeats layers until there are more than {MAX_LAYERS} (layer_replication)")
        patterns = self.settings.get("rank_pattern")
        ranks = [self.settings.get("r"), *(patterns.values() if isinstance(patterns, Mapping) else ())]
        rank = max((rank for rank in ranks if isinstance(rank, (int, float))), default=0)
        largest = max((size for name in self.tensors for size in self.shape(name)), default=0)
        if self.kind == LORA and rank > largest:  # LoRA has it as an axis of its weights
            raise self.error(f"states the rank {rank}, and no axis of its weights has more than {largest} numbers")

    def _check_patterns(self, module: nn.Module) -> None:
        """Raise SourceError if PEFT would need too long to find the adapted modules by the settings."""
        patterns = {name: _patterns(name, value) for name, value in self.settings.items() if name not in _PEFT_OWN}
        matched = [pattern for listed in patterns.values() for pattern in listed]
        if not matched:
            return
        names = [name for name, _ in (*module.named_modules(), *module.named_parameters())]
        try:
            names += [_PREFIX + name for name in names]
            _matcher.ask({"patterns": matched, "names": names, "seconds": MAX_MATCH_SECONDS})
        except ChildEndedError as error:
            settings = ", ".join(name for name, listed in patterns.items() if listed)
            raise self.error(
                f"has regular expressions in its {CONFIG} ({settings}) that took more than {MAX_MATCH_SECONDS:.0f} s "
                "to match the names of the base model's modules: list the adapted modules by name"
            ) from error

    def _missing_saved(self, model: Any, name: str) -> list[str]:
        """Return the parameters that the adapter replaces as a whole and whose values it lacks."""
        part = f".modules_to_save.{name}."
        names = [key.removeprefix(_PREFIX) for key in model.state_dict() if part in key]
        expected = [key.replace(part, ".") for key in names]
        return [key for key in expected if not self.supplies(key) and not any(part in key for part in _LORA_PARTS)]


_matcher = ChildProcess(Path(__file__).with_name("pattern_worker.py"), MAX_REPLY_SECONDS)


def _patterns(name: str, value: Any) -> list[str]:
    """Return the texts of a setting that PEFT may match as regular expressions."""
    if isinstance(value, str):
        return [] if _LITERAL.fullmatch(value) else [value]
    parts = value if isinstance(value, (list, Mapping)) else ()  # of a mapping its keys
    return [part for part in parts if isinstance(part, str) and not (name in _NAMES and _LITERAL.fullmatch(part))]


def _layer_count(bounds: Any) -> float:
    """Return the number of layers of a range of layer_replication; 0 if it is none, which PEFT refuses."""
    numbers = bounds if isinstance(bounds, list) and len(bounds) == 2 else ()
    return max(0, numbers[1] - numbers[0]) if numbers and all(isinstance(n, (int, float)) for n in numbers) else 0


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> PeftAdapter:
    """Read the settings of an adapter and the names of its weights.

    Raises SourceError for damaged or missing files, for weights in a pickle, and for settings that are refused;
    MissingExtraError without PEFT.
    """
    if not is_adapter_folder(folder):
        raise SourceError(f"{folder} is not a folder of an adapter: it holds no {CONFIG}")
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(f"{folder} holds an adapter, and reading it needs PEFT: {install_command('peft')}")
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from safetensors import SafetensorError, safe_open

    refuse_special_files(folder)
    if (size := (folder / CONFIG).stat().st_size) > MAX_CONFIG_BYTES:
        raise SourceError(f"{folder / CONFIG} has {size:,} bytes, and at most {MAX_CONFIG_BYTES:,} are read")
    settings = read_json(folder / CONFIG)
    if not isinstance(settings, dict):
        raise SourceError(f"{folder / CONFIG} must hold a JSON object")
    if not (folder / WEIGHTS).is_file():
        pickled = f": its {PICKLE} is a pickle, which is not read" if (folder / PICKLE).exists() else ""
        raise SourceError(f"the adapter {folder} holds no {WEIGHTS}{pickled}; save it with PEFT in safetensors")
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            stored = sorted(file.keys())
    except (OSError, SafetensorError) as error:
        raise SourceError(f"{folder / WEIGHTS} cannot be read: {_first_line(error)}") from error
    names = {name.removeprefix(_PREFIX).replace(_BASE_LAYER, "."): name for name in stored}
    adapter = PeftAdapter(folder, settings, names)
    config = PEFT_TYPE_TO_CONFIG_MAPPING.get(adapter.kind)
    if config is None:
        raise adapter.error(f"is of the kind {settings.get('peft_type')!r}, which PEFT does not know: update PEFT")
    from peft.config import PromptLearningConfig

    if issubclass(config, PromptLearningConfig) or adapter.kind in _NOT_MERGED:
        raise adapter.error(
            f"is of the kind {adapter.kind}, which changes no weights and cannot be merged: adapters that change "
            "weights, such as LoRA, DoRA and IA3, can be exported"
        )
    if wrong := sorted(name for name in _REFUSED_SETTINGS if settings.get(name)):
        raise adapter.error(
            f"sets {', '.join(wrong)}, with which PEFT reads files or imports code that the adapter names: save it "
            "again without that setting"
        )
    start = settings.get("init_lora_weights")
    if start not in OVERWRITTEN_INITS and not str(start).startswith(_BASE_CHANGING_INITS):
        raise adapter.error(
            f"sets init_lora_weights={start!r}, which needs the data of its training: save it with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    return adapter


def find_adapter(spec: str) -> Path:
    """Return the folder of an adapter: a local one, or one of the hub. Raises SourceError if there is none."""
    path = Path(spec)
    return download(spec) if not path.exists() and is_hub_id(spec) else path


def label_options(adapter: PeftAdapter, kind: Any, config: Any) -> dict[str, int]:
    """Return the number of labels of a classifier that the adapter brings along, as an option of from_pretrained.

    The adapter's settings do not state it. It is the size of the saved weight whose size follows it.

    kind: the class of the base model. Cost: the class is made twice, without weights.
    """
    kind = kind if not hasattr(kind, "_model_mapping") else kind._model_mapping[type(config)]
    shapes = []
    for labels in (3, 5):
        changed = config.__class__.from_dict({**config.to_dict(), "id2label": {i: str(i) for i in range(labels)}})
        with torch.device("meta"):
            shapes.append({name: value.shape for name, value in kind(changed).state_dict().items()})
    sized = [name for name in shapes[0] if shapes[0][name] != shapes[1].get(name) and adapter.supplies(name)]
    if not sized:
        return {}
    return {"num_labels": adapter.shape(sized[0])[0]}


def merge_checked(peft_model: Any, source: Source, adapter: PeftAdapter) -> None:
    """Merge the adapter into the module of a source, in place, and compare the results with PEFT's before.

    Raises SourceError if PEFT cannot merge it, or if the merged model computes something else, such as a model whose
    output projection shares the adapted embedding.
    """
    before = run_drawn(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft_model.merge_and_unload(safe_merge=True)
    except Exception as error:  # PEFT raises many types
        raise adapter.error(f"cannot be merged into its base model: {_first_line(error)}") from error
    worst = largest_difference(run_drawn(source), before)
    if not worst <= MAX_DIFFERENCE:
        raise adapter.error(
            f"computes something else after PEFT has merged it: its outputs differ by {worst:.2g} of their range; it "
            "may change a weight that the base model shares, such as an embedding that is the output projection too"
        )


def run_drawn(source: Source, **more: torch.Tensor) -> list[torch.Tensor]:
    """Run the module of a source on three drawn rows without padding.

    more: further inputs, by name.
    """
    axes = {name: source.axes.get(name, (0, 1)[: value.dim()]) for name, value in source.example.items()}
    drawn = distinct_sizes(source.example, axes, source.step_input, source.min_drawn_length) | more
    table = getattr(source.users_module, "get_input_embeddings", lambda: None)()
    weight, generator = getattr(table, "weight", None), torch.Generator().manual_seed(0)
    count = 0 if weight is None else len(weight)
    for name, value in drawn.items():
        if count and name not in (*source.masks, *source.token_types, *more) and not value.is_floating_point():
            drawn[name] = torch.randint(count, value.shape, generator=generator).to(value.dtype)
    with torch.no_grad(), source.eval_mode():
        returned = source.module(*drawn.values())
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def largest_difference(outputs: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """Return the largest difference of outputs, relative to their range."""
    worst = 0.0
    for output, reference in zip(outputs, expected, strict=True):
        span = float(reference.max() - reference.min()) or 1.0
        worst = max(worst, float((output - reference).abs().max()) / span)
    return worst


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
