"""Several PEFT adapters in one model: LoRA of linear layers and embeddings, switched by row."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tformer_export.sources.base import Source, users_module
from tformer_export.sources.call.adapter_switch import (
    AdapterSwitch,
    LowRank,
    SwitchedEmbedding,
    SwitchedProduct,
    WithAdapters,
    adapter_example,
)
from tformer_export.sources.hugging_face.hub import model_name
from tformer_export.sources.hugging_face.peft_adapter import (
    LORA,
    MAX_DIFFERENCE,
    OVERWRITTEN_INITS,
    PeftAdapter,
    find_adapter,
    largest_difference,
    read_adapter,
    run_drawn,
)
from tformer_export.sources.task_names import RECOGNIZES
from tformer_runtime.base.errors import OptionError
from tformer_runtime.format.manifest import ADAPTER_INPUT, BASE_ADAPTER

_DRAWN_ROWS = 3
_SUPPORTED_SETTINGS = {  # of LoRA; others change something else than a low-rank part, and must have their defaults
    "alpha_pattern", "exclude_modules", "fan_in_fan_out", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "qalora_group_size", "r", "rank_pattern",
    "runtime_config", "target_modules", "task_type", "use_rslora",
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision",
}  # fmt: skip
_UNUSED: tuple[Any, ...] = (None, False, "none", [], {}, 0)


def read_adapters(
    adapters: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]],
) -> dict[str, PeftAdapter]:
    """Read adapters: name → folder or hub id; or a list of these or of NAME=FOLDER, else with the folder's name.

    Raises OptionError for names that are taken, SourceError for adapters that cannot be read or switched by row.
    """
    if isinstance(adapters, Mapping):
        named = [(str(name), find_adapter(os.fspath(path))) for name, path in adapters.items()]
    else:
        named = [_with_name(os.fspath(spec)) for spec in adapters]
    found: dict[str, PeftAdapter] = {}
    for name, folder in named:
        if name in found or name == BASE_ADAPTER or not name:
            taken = f"{name!r} is the model without an adapter" if name == BASE_ADAPTER else f"{name!r} is given twice"
            raise OptionError(f"the adapter {folder} needs a name of its own, and {taken}: write NAME={folder}")
        found[name] = read_adapter(folder)
        _check_switchable(found[name])
    return found


def _with_name(spec: str) -> tuple[str, Path]:
    """Return the name and the folder of an adapter that is given as its folder or hub id, or as NAME=FOLDER."""
    name, sign, path = spec.partition("=")
    folder = find_adapter(path if sign and not Path(spec).exists() else spec)
    return (name if sign and not Path(spec).exists() else model_name(folder)), folder


def with_adapters(
    source: Source, adapters: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]]
) -> Source:
    """Return a source whose rows choose among adapters, and the model without them, by the input ADAPTER_INPUT.

    The module of `source` stays as it is; both share their weights.

    adapters: see `read_adapters`.

    Raises SourceError for an adapter that does not fit the model, or whose results differ from PEFT's.
    Cost: one forward for each adapter, twice.
    """
    if source.series is not None or (source.task == RECOGNIZES and source.step_input is not None):
        raise OptionError(
            f"adapters are switched in models that generate text and in single-pass models, and this one's task is "
            f"{source.task}: export a file for each adapter, merged"
        )
    found = read_adapters(adapters)
    own = users_module(source.module).state_dict()
    for adapter in found.values():
        _check_same_base(own, adapter)
    overwritten = {name: own[name].clone() for adapter in found.values() for name in adapter.whole_parameters()}
    weights = (*source.module.parameters(), *source.module.buffers())
    trainable = [weight for weight in weights if weight.requires_grad]
    module = copy.deepcopy(source.module, {id(weight): weight for weight in weights})
    plain = replace(source, module=module)
    peft_model: Any = None
    for number, adapter in enumerate(found.values()):
        peft_model = adapter.apply(peft_model or users_module(module), _peft_name(number), generic=True)
    with torch.no_grad():  # PEFT loads these weights of the base model again, perhaps rounded, and freezes all of them
        for name, value in overwritten.items():
            own[name].copy_(value)
    for weight in trainable:
        weight.requires_grad_(True)
    expected = _outputs_of_peft(plain, peft_model, len(found))
    switch = AdapterSwitch()
    _switch_layers(users_module(module), switch, list(found.values()))
    switched = replace(
        source,
        module=WithAdapters(module, switch, tuple(found)),
        example=source.example | adapter_example(len(found)),
        axes={**source.axes, ADAPTER_INPUT: (0,)},
        adapters=tuple(found),
    )
    _compare(switched, expected, list(found.values()))
    default = source.generation_defaults.get("adapter")
    if default not in (None, BASE_ADAPTER, *found):
        raise OptionError(f"the generation defaults name the adapter {default!r}, and there are {', '.join(found)}")
    return switched


def _check_switchable(adapter: PeftAdapter) -> None:
    """Raise SourceError unless an adapter is LoRA alone."""
    remedy = "export a file with this adapter alone, merged: tformer-export " + str(adapter.folder)
    if adapter.kind != LORA:
        raise adapter.error(f"is of the kind {adapter.kind}, and only LoRA is switched by row: {remedy}")
    wrong = [
        name for name, value in adapter.settings.items() if name not in _SUPPORTED_SETTINGS and value not in _UNUSED
    ]
    if adapter.settings.get("init_lora_weights") not in OVERWRITTEN_INITS:
        wrong.append("init_lora_weights")
    if wrong:
        raise adapter.error(
            f"sets {', '.join(sorted(wrong))}, and only plain LoRA of linear layers and embeddings is switched by row: "
            f"{remedy}"
        )


def _check_same_base(own: Mapping[str, torch.Tensor], adapter: PeftAdapter) -> None:
    """Raise SourceError if an adapter brings along whole weights with other values than the model's.

    PEFT saves an adapted embedding together with its adapter.

    own: the weights of the model.
    """
    for name in adapter.whole_parameters():
        if name not in own or own[name].shape != adapter.shape(name) or not _are_close(own[name], adapter.read(name)):
            raise adapter.error(
                f"holds the whole weight {name} with other values than the model has, and only plain LoRA is switched "
                f"by row: export a file with this adapter alone, merged: tformer-export {adapter.folder}"
            )


def _are_close(weight: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether weights are equal but for rounding to half precision."""
    return torch.allclose(weight.float(), other.float(), rtol=2**-7, atol=1e-6)


def _peft_name(number: int) -> str:
    return f"adapter{number}"  # a name of PEFT's is a part of a module's name and has no dots


def _outputs_of_peft(source: Source, peft_model: Any, count: int) -> list[list[torch.Tensor]]:
    """Return the outputs for drawn rows: without an adapter, then with each."""
    with peft_model.disable_adapter():
        outputs = [run_drawn(source)]
    for number in range(count):
        peft_model.set_adapter(_peft_name(number))
        outputs.append(run_drawn(source))
    return outputs


def _switch_layers(module: nn.Module, switch: AdapterSwitch, adapters: Sequence[PeftAdapter]) -> None:
    """Replace PEFT's layers by layers that are switched by row. A layer in several places stays one layer."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in list(module.named_modules()):
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer.get_base_layer()
        kind = (
            SwitchedProduct
            if isinstance(base, (nn.Linear, Conv1D))
            else SwitchedEmbedding
            if isinstance(base, nn.Embedding)
            else None
        )
        if kind is None or not isinstance(layer, LoraLayer):
            owner = next(a for i, a in enumerate(adapters) if _peft_name(i) in layer.scaling)
            raise owner.error(
                f"adapts {name}, a {type(base).__name__}, and only LoRA of nn.Linear, nn.Embedding and Conv1D is "
                f"switched by row: export a file with this adapter alone, merged: tformer-export {owner.folder}"
            )
        replaced[layer] = kind(base, switch, [_low_rank(layer, _peft_name(i)) for i in range(len(adapters))])
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child in replaced:
                setattr(parent, name, replaced[child])


def _low_rank(layer: Any, name: str) -> LowRank | None:
    """Return the part of an adapter in PEFT's layer; None if it does not adapt the layer."""
    if name in layer.lora_A:
        return LowRank(layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]))
    if name in layer.lora_embedding_A:
        scale = float(getattr(layer.get_base_layer(), "embed_scale", 1.0))  # PEFT scales its part as the embedding does
        return LowRank(layer.lora_embedding_A[name], layer.lora_embedding_B[name], scale * float(layer.scaling[name]))
    return None


def _compare(source: Source, expected: Sequence[Sequence[torch.Tensor]], adapters: Sequence[PeftAdapter]) -> None:
    """Compare batches in which each row has another adapter with PEFT's outputs for one adapter at a time.

    Raises SourceError where they differ.
    """
    count = len(expected)
    for first in range(count):
        numbers = [(first + row) % count for row in range(_DRAWN_ROWS)]
        outputs = run_drawn(source, **{ADAPTER_INPUT: torch.tensor(numbers)})
        for row, number in enumerate(numbers):
            difference = largest_difference(
                (output[row] for output in outputs), (output[row] for output in expected[number])
            )
            if not difference <= MAX_DIFFERENCE:
                adapter = adapters[max(0, number - 1)]
                raise adapter.error(
                    f"gives outputs that differ from PEFT's by {difference:.2g} of their range if each row of a batch "
                    "has its own adapter: the model may not keep the rows apart where it is adapted; export a file "
                    f"with this adapter alone, merged: tformer-export {adapter.folder}"
                )
