"""The modules after a sentence encoder's transformer: pooling, dense layers, normalisations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers
from torch import nn
from torch.nn import functional as F

from tformer_export.common.checkpoint import refuse_bomb
from tformer_export.sources.base import Source
from tformer_export.sources.pooled_module import POOLS, Pipeline
from tformer_export.sources.pooling import with_pooling
from tformer_export.sources.sentence_transformers.saved import SavedModel, SavedModule
from tformer_runtime.base.errors import SourceError
from tformer_runtime.format.manifest import OutputMeaning

_FLAGS = {  # flags of its older configs → our names, in the order in which vectors are concatenated
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"cls": "first", "lasttoken": "last"}  # its names → ours, if they differ
_POOLING = {*_FLAGS, "pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension"}
_DENSE = {"in_features", "out_features", "bias", "activation_function", "use_residual"}
_VECTORS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


class _Normalize(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return F.normalize(vectors, dim=-1)


class _Truncate(nn.Module):
    """Keeps the first numbers of vectors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors[..., : self.count]


class _Dense(nn.Module):
    """A linear layer with its activation. residual: whether the input, projected if its size is another, is added."""

    def __init__(self, inner: int, outer: int, bias: bool, activation: nn.Module, residual: bool) -> None:
        super().__init__()
        self.linear, self.activation, self.adds_input = nn.Linear(inner, outer, bias=bias), activation, residual
        if residual and inner != outer:
            self.residual = nn.Linear(inner, outer, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.activation(self.linear(vectors))
        if not self.adds_input:
            return result
        return result + (self.residual(vectors) if hasattr(self, "residual") else vectors)


def with_modules(source: Source, saved: SavedModel) -> Source:
    """Add the modules of a folder to the source of its transformer.

    Raises SourceError for modules that are not supported.
    """
    pools: list[str] = ["mean"] if saved.is_static else []
    layers: list[nn.Module] = []
    includes_prompt = True
    for module in saved.modules[1:]:
        if (module.kind != "Pooling") == (not pools):
            raise saved.refused(module.kind, "in this place")
        if module.kind == "Pooling":
            pools, includes_prompt = _pools(saved, module)
        elif module.kind == "Dense":
            layers.append(_dense(module))
        elif module.kind == "LayerNorm":
            layers.append(_layer_norm(module))
        elif module.kind == "Normalize":
            module.config((), _VECTORS, missing={})
            layers.append(_Normalize())
        elif module.kind != "Dropout":  # it has no effect in eval mode
            raise saved.refused(module.kind, "at all")
    if saved.dimensions is not None:
        layers.append(_Truncate(saved.dimensions))
    source = _in_lower_case(source) if saved.is_lower_case else source
    if not pools:
        if layers or saved.prompt:
            raise SourceError(
                f"{saved.folder} has a prompt or truncate_dim, but no Pooling that makes vectors of texts"
            )
        return source
    if saved.prompt and not includes_prompt:
        raise saved.refused("Pooling", "without the tokens of its default prompt")
    source = with_pooling(source, pools, nn.Sequential(*layers).eval() if layers else None)
    if saved.prompt:
        source = replace(
            source,
            output_meaning=OutputMeaning(settings={"prompt": saved.prompt}),
            own_pipeline=_prompted(source.own_pipeline, saved.prompt),
        )
    return replace(source, reads_pairs=False)


def _in_lower_case(source: Source) -> Source:
    """Lower the case of texts."""
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


def _pools(saved: SavedModel, module: SavedModule) -> tuple[list[str], bool]:
    """Return the names of the poolings, and whether they read the tokens of a prompt."""
    config = module.config(_POOLING, {})
    named = config.get("pooling_mode")
    if named is None:
        named = [pool for flag, pool in _FLAGS.items() if config.get(flag)] or ["mean"]
    names = [_NAMES.get(name, name) for name in ([named] if isinstance(named, str) else named)]
    for name in names:
        if name not in POOLS:
            raise saved.refused(f"Pooling by {name}", "at all")
    return names, bool(config.get("include_prompt", True))


def _dense(module: SavedModule) -> nn.Module:
    """Load a linear layer with its activation."""
    config = module.config(_DENSE, _VECTORS)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = activation_named(name)
    if activation is None:
        raise SourceError(
            f"{module.path / 'config.json'} names the activation {name}, which is not of torch.nn: it is not supported"
        )
    sizes = int(config["in_features"]), int(config["out_features"])
    bias, residual = bool(config.get("bias", True)), bool(config.get("use_residual"))
    return _loaded(_Dense(*sizes, bias, activation, residual), module.path)


def _layer_norm(module: SavedModule) -> nn.Module:
    norm = nn.LayerNorm(int(module.config({"dimension"}, {})["dimension"]))
    _loaded(nn.ModuleDict({"norm": norm}), module.path)
    return norm


def activation_named(name: str) -> nn.Module | None:
    """Return the activation of a name with its path, such as torch.nn.modules.activation.Tanh; None for others."""
    kind: Callable[[], Any] | None = (
        getattr(nn, name.rsplit(".", 1)[-1], None) if name.startswith("torch.nn.") else None
    )
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return None
    try:
        return kind()
    except TypeError:  # it needs arguments, which no file holds
        return None


def _loaded(layer: nn.Module, path: Path) -> nn.Module:
    """Load the weights of a module from its folder, in float32."""
    try:
        layer.load_state_dict(read_weights(path))
    except RuntimeError as error:
        raise SourceError(f"{path}'s weights do not fit its config: {' '.join(str(error).split())}") from error
    return layer.float()


def read_weights(path: Path) -> Mapping[str, torch.Tensor]:
    """Read the weights of a folder. Raises SourceError if there are none."""
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
