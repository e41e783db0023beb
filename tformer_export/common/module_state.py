"""The state of a module: it is restored after forward has run, and its tensors are compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tformer_export.common.plain_torch import PlainTorch
from tformer_export.common.source_lines import users_name

MAX_KERNEL_ROUNDING = 1e-4  # of the largest value: kernels round by less, and randomness changes more


@contextmanager
def unchanged(module: nn.Module) -> Iterator[list[str]]:
    """Restore buffers and attributes afterwards. The yielded list then has the names that changed."""
    attributes = {name: (part, dict(vars(part))) for name, part in module.named_modules()}
    values = [
        value for _, previous in attributes.values() for key, value in previous.items() if key not in _MODULE_ATTRIBUTES
    ]
    containers = [(value, copy.copy(value)) for value in values if isinstance(value, (dict, list, set))]
    objects = [(value, dict(vars(value))) for value in values if _is_plain_object(value)]
    numbers = {name: (tensor, tensor.detach().clone()) for name, tensor in module.named_buffers()}
    buffers = {name: (part, dict(part._buffers)) for name, part in module.named_modules()}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for name, (part, previous) in buffers.items():
            changed += [f"{name}.{key}".lstrip(".") for key, b in part._buffers.items() if b is not previous.get(key)]
            part._buffers.clear()
            part._buffers.update(previous)
        for name, (tensor, number) in numbers.items():
            if not is_same(tensor.detach(), number):
                changed.append(name)
                with torch.no_grad():
                    tensor.copy_(number)
        for name, (part, before) in attributes.items():
            now = vars(part)
            new = [k for k in now if k not in before or (now[k] is not before[k] and not k.startswith("_"))]
            changed += [f"{name}.{key}".lstrip(".") for key in new]
            now.clear()
            now.update(before)
        for container, content in containers:
            _refill(container, content)
        for value, content in objects:
            _refill(vars(value), content)
        changed[:] = [users_name(name) for name in changed]


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is an object of the user's class, which may hold tables of earlier runs."""
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, torch.Tensor)) and not callable(value)


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


class WriteUndo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Restores weights, buffers and other tensors of a module afterwards, and adds the names that changed to `changed`.

    Only a tensor that an operation is about to write is copied, so that memory does not hold a large model twice.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, changed: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed = changed
        self._tensors = dict(tensors_of(module))
        self._copies: dict[str, torch.Tensor] = {}
        self._storages = {_storage(tensor) for tensor in self._tensors.values()}

    def __enter__(self) -> Any:
        PlainTorch().__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        PlainTorch().__exit__()
        for name, before in self._copies.items():
            if not is_same(self._tensors[name].detach(), before):
                self._changed.append(name)
                with torch.no_grad():
                    self._tensors[name].copy_(before)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable:
            for position, argument in enumerate(operation._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[position] if position < len(args) else kwargs.get(argument.name)
                    self._copy({_storage(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)})
        return operation(*args, **kwargs)

    def _copy(self, written: set[int]) -> None:
        for storage in written & self._storages:
            self._storages.remove(storage)
            self._copies |= {n: t.detach().clone() for n, t in self._tensors.items() if _storage(t) == storage}


@contextmanager
def restored(module: nn.Module, changed: list[str] | None = None) -> Iterator[None]:
    """Run code of a module for its results alone: its state and torch's random numbers are as before afterwards.

    changed: gets the names of the tensors that the code wrote into.
    """
    undo = WriteUndo(module, [] if changed is None else changed)
    with torch.no_grad(), unchanged(module), undo, torch.random.fork_rng(devices=[]):
        yield


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Find the dense tensors of a module by name: weights, buffers, and tensors in other attributes."""
    for path, part in module.named_modules():
        held = {**part._parameters, **part._buffers}
        held |= {key: value for key, value in vars(part).items() if key not in _MODULE_ATTRIBUTES}
        for key, value in held.items():
            for i, leaf in enumerate(pytree.tree_leaves(value)):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    yield f"{path}.{key}".lstrip(".") + (f"[{i}]" if i else ""), leaf


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if one.shape != other.shape:
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one.layout is other.layout and is_same(one.to_dense(), other.to_dense())
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.detach(), other.detach()
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=MAX_KERNEL_ROUNDING, atol=MAX_KERNEL_ROUNDING * scale, equal_nan=True)
