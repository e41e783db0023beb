"""A folder of sentence-transformers, read without that package: a transformers model and the modules after it.

modules.json lists the modules in their order, each with its class and its folder: the transformer, pooling of one or
several kinds, dense layers, normalisation. sentence_bert_config.json and the tokenizer state the maximum length of a
text, config_sentence_transformers.json the prompt before each text. A model in memory is first saved into a folder.
https://sbert.net/docs/package_reference/sentence_transformer/models.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers
from torch import nn

from tformer_export.common.checkpoint import refuse_bomb
from tformer_export.sources.base import Source
from tformer_export.sources.pooled_module import POOLS, Pipeline
from tformer_export.sources.pooling import with_pooling
from tformer_export.sources.untrusted_files import inside, read_json, refuse_special_files
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import OutputMeaning

MODULES = "modules.json"
_CONFIG = "sentence_bert_config.json"
_FLAGS = {  # flags of its older configs → our names, in the order in which vectors are concatenated
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"cls": "first", "lasttoken": "last"}  # its names → ours, if they differ


def is_sentence_encoder(module: Any) -> bool:
    """Return whether a module is a model of sentence-transformers that computes sentence embeddings."""
    return any(
        base.__name__ == "SentenceTransformer" and base.__module__.startswith("sentence_transformers")
        for base in type(module).__mro__
    )


def from_sentence_encoder(module: Any, read: Callable[[Path], Source]) -> Source:
    """Read a sentence encoder in memory. It is saved to disk for a while.

    read: a function that reads a folder.
    """
    with TemporaryDirectory(prefix="tformer-") as name:
        module.save(name, create_model_card=False)
        source = read(Path(name))

    def answer(sample: Any, max_tokens: int | None) -> torch.Tensor:
        max_length = module.max_seq_length
        module.max_seq_length = max_length if max_tokens is None else max_tokens
        try:
            vector: torch.Tensor = module.encode(sample, convert_to_tensor=True, show_progress_bar=False)
        finally:
            module.max_seq_length = max_length
        return vector.float().cpu()

    return replace(source, name=type(module).__name__, own_pipeline=answer, reads_pairs=False)


def with_modules(folder: Path, source: Source) -> Source:
    """Add the modules of modules.json to the source of a folder's transformer.

    Raises SourceError for modules that are not supported.
    """
    listed = read_json(folder / MODULES)
    try:
        kinds = [(str(entry["type"]).rsplit(".", 1)[-1], inside(folder, entry["path"], MODULES)) for entry in listed]
    except (TypeError, KeyError, IndexError) as error:
        raise SourceError(f"{folder / MODULES} is not a list of modules with a type and a path") from error
    for _, path in kinds:
        if path.is_dir():
            refuse_special_files(path)
    pools: list[str] = []
    layers: list[nn.Module] = []
    normalize = False
    for place, (kind, path) in enumerate(kinds):
        if place == 0 and kind == "Transformer" and path.resolve() == folder.resolve():
            continue
        if normalize or (kind != "Pooling") == (not pools):
            raise _refused(folder, kind, "in this place")
        if kind == "Pooling":
            pools = _pools(folder, path)
        elif kind == "Dense":
            layers.append(_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":  # it has no effect in eval mode
            raise _refused(folder, kind, "at all")
    settings = read_json(folder / "config_sentence_transformers.json", missing={})
    where = next((path for kind, path in kinds if kind == "Pooling"), folder)
    prompt = (settings.get("prompts") or {}).get(settings.get("default_prompt_name") or "", "")
    source = _in_lower_case(folder, source)
    if not pools:
        return source
    if prompt and not read_json(where / "config.json").get("include_prompt", True):
        raise _refused(folder, "Pooling", "without the tokens of its default prompt")
    source = with_pooling(source, pools, nn.Sequential(*layers).eval() if layers else None, normalize)
    if prompt:
        source = replace(
            source,
            output_meaning=OutputMeaning(settings={"prompt": prompt}),
            own_pipeline=_prompted(source.own_pipeline, prompt),
        )
    return replace(source, reads_pairs=False)


def length_limit(folder: Path) -> int | None:
    """Return the maximum number of tokens of a text; None if the folder does not state it."""
    limit = read_json(folder / _CONFIG, missing={}).get("max_seq_length")
    return limit if isinstance(limit, int) else None


def _in_lower_case(folder: Path, source: Source) -> Source:
    """Lower the case of texts, if the folder requires it."""
    config = read_json(folder / _CONFIG, missing={})
    if not config.get("do_lower_case"):
        return source
    texts = {}
    for name, text in source.tokenizers.items():
        tokenizer = Tokenizer.from_str(text)
        existing = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *existing])
        texts[name] = tokenizer.to_str()
    answer = source.own_pipeline
    lower = None if answer is None else lambda sample, max_tokens: answer(_lowered(sample), max_tokens)
    return replace(source, tokenizers=texts, own_pipeline=lower)


def _lowered(sample: Any) -> Any:
    return sample.lower() if isinstance(sample, str) else tuple(text.lower() for text in sample)


def _prompted(answer: Pipeline | None, prompt: str) -> Pipeline | None:
    return None if answer is None else lambda sample, max_tokens: answer(prompt + sample, max_tokens)


def _pools(folder: Path, path: Path) -> list[str]:
    config = read_json(path / "config.json")
    named = config.get("pooling_mode")
    if named is None:
        named = [pool for flag, pool in _FLAGS.items() if config.get(flag)] or ["mean"]
    names = [_NAMES.get(name, name) for name in ([named] if isinstance(named, str) else named)]
    for name in names:
        if name not in POOLS:
            raise _refused(folder, f"Pooling by {name}", "at all")
    return names


def _dense(folder: Path, path: Path) -> nn.Module:
    """Load a linear layer with its activation."""
    config = read_json(path / "config.json")
    text = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = getattr(nn, text.rsplit(".", 1)[-1], None) if text.startswith("torch.nn.") else None
    if (
        config.get("use_residual")
        or not isinstance(activation, type)
        or not issubclass(activation, nn.Module)
        or config.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    ):
        raise _refused(folder, "Dense", f"with this configuration: {json.dumps(config)}")
    layer = nn.Linear(int(config["in_features"]), int(config["out_features"]), bias=bool(config.get("bias", True)))
    state = {name.removeprefix("linear."): value for name, value in _weights(path).items()}
    try:
        layer.load_state_dict(state)
    except RuntimeError as error:
        raise SourceError(f"{path}'s weights do not fit its config: {' '.join(str(error).split())}") from error
    return nn.Sequential(layer.float(), activation())


def _weights(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        if (path / "model.safetensors").exists():
            from safetensors.torch import load_file

            weights: Mapping[str, torch.Tensor] = load_file(path / "model.safetensors")
        else:
            refuse_bomb(path / "pytorch_model.bin")
            weights = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except SourceError:
        raise
    except Exception as error:  # safetensors and torch raise many types
        raise SourceError(f"{path} holds no weights that can be read: {error}") from error
    return weights


def _refused(folder: Path, kind: str, where: str) -> SourceError:
    return SourceError(
        f"{folder / MODULES} has a module {kind}, which is not supported {where}: supported are a transformer, its "
        "pooling, dense layers and a normalisation, in this order; otherwise export only the transformer (its own "
        "config.json)"
    )
