"""The state of a module: it is restored after forward has run, and its tensors are compared."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tformer_export.common.source_lines import users_name

MAX_KERNEL_ROUNDING = 1e-4  # of the largest value: kernels round by less, and randomness changes more


@contextmanager
def unchanged(module: nn.Module) -> Iterator[list[str]]:
    """Restore buffers, attributes and scaled embeddings afterwards. The yielded list then names those that changed."""
    attributes = {name: (part, dict(vars(part))) for name, part in module.named_modules()}
    values = [
        value for _, previous in attributes.values() for key, value in previous.items() if key not in _MODULE_ATTRIBUTES
    ]
    containers = [(value, copy.copy(value)) for value in values if isinstance(value, (dict, list, set))]
    objects = [(value, dict(vars(value))) for value in values if _is_plain_object(value)]
    written = {**dict(module.named_buffers()), **{name: part.weight for name, part in scaled_embeddings(module)}}
    numbers = {name: (tensor, tensor.detach().clone()) for name, tensor in written.items()}
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


def scaled_embeddings(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the embeddings with `max_norm` by name. Their forward scales the rows that it reads, in place."""
    parts = module.named_modules()
    return [(n, p) for n, p in parts if isinstance(p, (nn.Embedding, nn.EmbeddingBag)) and p.max_norm is not None]


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
        self.operations = 0  # that were called

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
        self.operations += 1
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
def restored(module: nn.Module, changed: list[str] | None = None) -> Iterator[WriteUndo]:
    """Run code of a module for its results alone: its state and torch's random numbers are as before afterwards.

    changed: gets the names of the tensors that the code wrote into.
    """
    undo = WriteUndo(module, [] if changed is None else changed)
    with torch.no_grad(), unchanged(module), undo, torch.random.fork_rng(devices=[]):
        yield undo


@dataclass(frozen=True)
class Attempt:
    """A run of forward that may fail.

    outputs: the outputs; None if it failed. operations: the number of operations that were called. lines: the numbers
    of the lines at which it failed, of each frame.
    """

    outputs: tuple[Any, ...] | None
    operations: int
    lines: tuple[int | None, ...] = ()

    @property
    def runs(self) -> bool:
        return self.outputs is not None

    @property
    def first(self) -> torch.Tensor | None:
        """The first output, if it is a tensor."""
        output = self.outputs[0] if self.outputs else None
        return output if isinstance(output, torch.Tensor) else None


def attempt(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Attempt:
    """Run forward on copies of the inputs. The state of the module is restored."""
    with restored(module) as undo:
        try:
            outputs = module(*(value.clone() for value in inputs.values()))
        except Exception as error:  # the user's code may raise anything
            return Attempt(None, undo.operations, tuple(f.lineno for f in traceback.extract_tb(error.__traceback__)))
        return Attempt(tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,), undo.operations)


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


# -- functions of torch as plain operations ----------------------------------------------------------------------------
#
# Modes can then watch them, and traces hold them. `flex_attention` runs through torch's compiler, which refuses to run
# below a mode, and `CausalBias` is a subclass of Tensor, which torch cannot make below one. What they compute are masks
# and attention. An embedding with `max_norm` writes into its weights: it scales the rows that it reads, each of which
# always gets the same numbers.

RENORM_EPSILON = 1e-7  # torch's own, of embedding_renorm_
_lock = threading.RLock()


class PlainTorch:
    """Runs what torch would compile as it is written, and the functions below as plain operations.

    It holds for the whole process until the last of those that entered has left. Results of other threads are the same.
    """

    users = 0
    patches = ExitStack()

    def __enter__(self) -> None:
        with _lock:
            if not PlainTorch.users:
                PlainTorch.patches.enter_context(torch.compiler.set_stance("force_eager"))
                PlainTorch.patches.enter_context(_functions_patched())
            PlainTorch.users += 1

    def __exit__(self, *error: object) -> None:
        with _lock:
            PlainTorch.users -= 1
            if not PlainTorch.users:
                PlainTorch.patches.close()


@contextmanager
def _functions_patched() -> Iterator[None]:
    bias: Any = CausalBias
    patches: list[tuple[Any, str, Any]] = [
        (flex, "flex_attention_hop", _flex_attention),
        (F, "embedding", _without_writes(F.embedding)),
        (F, "embedding_bag", _without_writes(F.embedding_bag)),
    ]
    originals = [getattr(owner, name) for owner, name, _ in patches]
    for owner, name, function in patches:
        setattr(owner, name, function)
    bias.__new__ = _causal_mask
    try:
        yield
    finally:
        for (owner, name, _), original in zip(patches, originals, strict=True):
            setattr(owner, name, original)
        del bias.__new__  # the class has torch.Tensor's again


def _without_writes(embedding: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return an embedding that reads scaled rows where torch's own scales the rows in place."""
    signature = inspect.signature(embedding)

    @functools.wraps(embedding)
    def look_up(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        names = call.arguments
        if names["max_norm"] is not None:
            norms = torch.linalg.vector_norm(names["weight"], names["norm_type"], dim=1, keepdim=True)
            scaled = names["weight"] * (names["max_norm"] / (norms + RENORM_EPSILON))
            names["weight"] = torch.where(norms > names["max_norm"], scaled, names["weight"])
            names["max_norm"] = None
        return embedding(*call.args, **call.kwargs)

    return look_up


def _causal_mask(cls: type, variant: CausalVariant, num_queries: int, num_keys: int) -> torch.Tensor:
    diagonal = num_keys - num_queries if variant is CausalVariant.LOWER_RIGHT else 0
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(diagonal)


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, None, None]:
    """Return attention with a function of scores and a function of places that says which keys are seen.

    The functions get the places of batch, head, query and key as tensors that broadcast against the scores.

    https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html
    """
    if kernel_options.get("OUTPUT_LOGSUMEXP") or kernel_options.get("OUTPUT_MAX"):
        raise NotImplementedError("only the result of flex_attention can be exported, without return_lse or return_aux")
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    sizes = (*query.shape[:3], key.shape[2])
    places = [
        torch.arange(size).reshape([-1 if other == axis else 1 for other in range(4)])
        for axis, size in enumerate(sizes)
    ]
    mask_mod = block_mask[-1]
    keep = None if mask_mod is flex.noop_mask else mask_mod(*places, *mask_mod_other_buffers)
    if score_mod is flex._identity:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=keep, scale=scale), None, None
    scores = score_mod(query @ key.transpose(-2, -1) * scale, *places, *score_mod_other_buffers)
    if keep is not None:
        scores = torch.where(keep, scores, -torch.inf)
    weights = scores.softmax(-1).masked_fill(scores == -torch.inf, 0.0)  # a row of −∞ alone gets zeros, not NaN
    return weights @ value, None, None
